"""What concerns Redis only: slots, lifetimes, forgotten scripts, eviction, how calls travel."""

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest
import redis
from redis.asyncio import Redis
from redis.crc import key_slot

from gateway.db import now
from gateway.settings import Limits as LimitSettings
from gateway.tenants.limits import pipelines
from gateway.tenants.limits.bounds import bounds_of
from gateway.tenants.limits.counters import Answer, CountersLost
from gateway.tenants.limits.degraded import DegradingCounters
from gateway.tenants.limits.rules import BudgetRule, Limits
from gateway.tenants.limits.shared import SharedCounters
from tests.tenants.limits.stores import claim_of, client_of, principal

ALL = principal(
    Limits(requests_per_minute=100, tokens_per_minute=1000, concurrent_requests=50),
    Limits(requests_per_minute=100, tokens_per_minute=1000, concurrent_requests=50),
    (
        BudgetRule("b1", "tenant:t1", "month", 10**6, True),
        BudgetRule("b2", "tenant:t1", "day", 10**6, True),
        BudgetRule("b3", "key:k1", "day", 10**6, True),
    ),
)


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Redis]:
    client = client_of(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
async def counters(client: Redis) -> AsyncIterator[SharedCounters]:
    counters = SharedCounters(client)
    yield counters
    await counters.close()


def claim(name: str = "a", tokens: int = 10):
    current = claim_of(ALL, name, tokens, tokens, 1000)
    return type(current)(name, bounds_of(ALL, now()), tokens, tokens, 1000)


async def test_f6_all_keys_of_a_tenant_lie_in_one_slot(client: Redis, counters: SharedCounters):
    for pot in claim().bounds.pots:
        await counters.raise_spent(pot, 0)
    assert (await counters.admit(claim())).answer is Answer.ADMITTED
    await counters.extend(claim(), 10, 10)
    keys = [key async for key in client.scan_iter("*")]
    assert len(keys) == 6 + 3 * 2 + 1
    assert len({key_slot(key) for key in keys}) == 1
    assert key_slot(keys[0]) != key_slot(keys[0].replace(b"t1", b"t2"))


async def test_every_key_has_a_lifetime(client: Redis, counters: SharedCounters):
    for pot in claim().bounds.pots:
        await counters.raise_spent(pot, 0)
    await counters.admit(claim())
    await counters.extend(claim(), 10, 10)
    await counters.beat(claim())
    await counters.probe()
    keys = [key async for key in client.scan_iter("*")]
    lives = {key: await client.pttl(key) for key in keys}
    assert all(ms > 0 for ms in lives.values()), lives
    await counters.settle(claim(), 15, 15, refused=False)
    assert all([await client.pttl(key) > 0 async for key in client.scan_iter("*")])


async def test_a_redis_that_forgot_the_scripts_is_told_again(
    client: Redis, counters: SharedCounters
):
    who = principal(Limits(requests_per_minute=100))
    for _ in range(3):
        await client.script_flush()
        answers = [counters.admit(claim_of(who, f"r{one}-{_}")) for one in range(20)]
        verdicts = await asyncio.gather(*answers)
        assert {one.answer for one in verdicts} == {Answer.ADMITTED}
    last = await counters.admit(claim_of(who, "last"))
    assert last.fills[0].used == 61


async def calls_of_scripts(client: Redis) -> tuple[int, int]:
    """Scripts run, and all other commands of clients."""
    stats = await client.info("commandstats")
    scripts = stats.get("cmdstat_evalsha", {}).get("calls", 0)
    reads = sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("eval", "ping"))
    return scripts, reads


async def test_a_request_is_two_scripts(client: Redis, counters: SharedCounters):
    for pot in claim().bounds.pots:
        await counters.raise_spent(pot, 0)
    await counters.admit(claim("warm"))
    await counters.settle(claim("warm"), 10, 0, refused=False)
    before = await calls_of_scripts(client)
    for number in range(10):
        await counters.admit(claim(f"r{number}"))
        await counters.settle(claim(f"r{number}"), 10, 0, refused=False)
    after = await calls_of_scripts(client)
    assert (after[0] - before[0], after[1] - before[1]) == (20, 0)


async def test_many_calls_at_once_need_few_connections(
    client: Redis, counters: SharedCounters, redis_url: str
):
    who = principal(Limits(requests_per_minute=10_000))
    verdicts = await asyncio.gather(
        *(counters.admit(claim_of(who, f"r{number}")) for number in range(2_000))
    )
    assert max(verdict.fills[0].used for verdict in verdicts) == 2_000
    with redis.Redis.from_url(redis_url) as plain:
        open_now = [one for one in plain.client_list() if one["cmd"] == "evalsha"]
        assert len(open_now) <= pipelines.CONNECTIONS_MAX


async def test_calls_that_would_wait_too_long_are_refused(
    counters: SharedCounters, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(pipelines, "WAITING_MAX", 5)
    who = principal(Limits(requests_per_minute=100))
    answers = await asyncio.gather(
        *(counters.admit(claim_of(who, f"r{number}")) for number in range(9)),
        return_exceptions=True,
    )
    assert sum(isinstance(answer, CountersLost) for answer in answers) == 4


@pytest.mark.parametrize(("policy", "warned"), [("allkeys-lru", True), ("noeviction", False)])
async def test_f7_a_redis_that_may_evict_is_warned_of_at_the_start(
    client: Redis, caplog: pytest.LogCaptureFixture, policy: str, warned: bool
):
    await client.config_set("maxmemory-policy", policy)
    try:
        with caplog.at_level(logging.WARNING):
            async with DegradingCounters(SharedCounters(client), LimitSettings()).watching():
                await asyncio.sleep(0.2)
    finally:
        await client.config_set("maxmemory-policy", "noeviction")
    assert ("maxmemory-policy allkeys-lru" in caplog.text) is warned


async def test_a_redis_without_room_counts_as_away(client: Redis, counters: SharedCounters):
    who = principal(Limits(requests_per_minute=100))
    await counters.admit(claim_of(who, "a"))
    await client.config_set("maxmemory", 1)
    try:
        with pytest.raises(CountersLost, match="Memory"):
            await counters.admit(claim_of(who, "b"))
        with pytest.raises(CountersLost):
            await counters.probe()
    finally:
        await client.config_set("maxmemory", 0)
    await counters.probe()
