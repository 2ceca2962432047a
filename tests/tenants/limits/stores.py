"""Both places where counters can lie, on a clock that a test moves."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Literal

import redis
from redis.asyncio import Redis

from gateway.redis_client import connect
from gateway.settings import Redis as RedisSettings
from gateway.settings import Secret, Settings
from gateway.tenants.keys import Principal
from gateway.tenants.limits.bounds import bounds_of
from gateway.tenants.limits.counters import Claim, Counters
from gateway.tenants.limits.local import LocalCounters
from gateway.tenants.limits.rules import BudgetRule, Limits
from gateway.tenants.limits.scripts import scripts
from gateway.tenants.limits.shared import SharedCounters

Kind = Literal["local", "redis"]

NOON = datetime(2096, 3, 14, 12, tzinfo=UTC)
"""In the future, where no key's time to live ends while a test runs."""
CLOCK_KEY = "test:now"
CLOCK = f"""(function()
  local ms = tonumber(redis.call('GET', '{CLOCK_KEY}'))
  return {{math.floor(ms / 1000), (ms % 1000) * 1000}}
end)()"""


class Clock:
    """The time of a store; 0 is the beginning of a bucket."""

    def __init__(self, tell: Callable[[int], object]) -> None:
        self.ms = int(NOON.timestamp()) * 1000
        self._tell = tell
        tell(self.ms)

    def pass_(self, ms: int) -> None:
        self.ms += ms
        self._tell(self.ms)


def client_of(url: str, pool_size: int = 32) -> Redis:
    client = connect(Settings(redis=RedisSettings(url=Secret(url), pool_size=pool_size)))
    assert client is not None
    return client


@asynccontextmanager
async def store(kind: Kind, url: str) -> AsyncIterator[tuple[Counters, Clock]]:
    """Empty counters and their clock."""
    if kind == "local":
        clock = Clock(lambda ms: None)
        yield LocalCounters(clock=lambda: clock.ms / 1000), clock
        return
    with redis.Redis.from_url(url) as plain:
        plain.flushdb()
        clock = Clock(lambda ms: plain.set(CLOCK_KEY, ms))
        client = client_of(url)
        counters = SharedCounters(client, scripts(CLOCK))
        try:
            yield counters, clock
        finally:
            await counters.close()
            await client.aclose()


def principal(
    tenant: Limits | None = None,
    key: Limits | None = None,
    budgets: tuple[BudgetRule, ...] = (),
    *,
    tenant_id: str = "t1",
    key_id: str = "k1",
) -> Principal:
    return Principal(
        tenant_id=tenant_id,
        tenant_slug="acme",
        key_id=key_id,
        scopes=frozenset({"inference"}),
        tenant_limits=tenant or Limits(),
        key_limits=key or Limits(),
        budgets=budgets,
    )


def budget(amount_nanos: int, owner: str = "tenant:t1", *, hard: bool = True) -> BudgetRule:
    return BudgetRule("b1", owner, "month", amount_nanos, hard)


def claim_of(
    who: Principal,
    request_id: str,
    tokens: int = 1,
    hold_nanos: int = 0,
    output_micros: int = 0,
) -> Claim:
    return Claim(request_id, bounds_of(who, NOON), tokens, hold_nanos, output_micros)
