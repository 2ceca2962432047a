"""Redis away, back, and slow."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.asyncio import Redis

from gateway.errors import DatabaseUnavailable, InsufficientQuota, LimiterUnavailable, RateLimited
from gateway.settings import Limits as LimitSettings
from gateway.tenants.keys import Principal
from gateway.tenants.limits import degraded, pipelines
from gateway.tenants.limits.counting import CountingLimiter
from gateway.tenants.limits.degraded import DegradingCounters
from gateway.tenants.limits.limiter import Demand, Reservation, Used
from gateway.tenants.limits.rules import Limits
from gateway.tenants.limits.shared import SharedCounters
from gateway.tenants.usage.rates import FREE, Rates
from tests.redis_server import OwnRedis
from tests.tenants.limits.slow import proxy
from tests.tenants.limits.stores import budget, client_of, principal

PRICE = Rates(1_000_000, 1_000_000, 1_000_000)
LOCAL = LimitSettings(without_redis="local", replicas=2)
CLOSED = LimitSettings(without_redis="closed")


class Gateway:
    def __init__(self, redis: Redis, settings: LimitSettings) -> None:
        self.now = 0.0
        self.spent = 0
        self.failure: Exception | None = None
        """Of the ledger."""
        self.counters = DegradingCounters(
            SharedCounters(redis), settings, clock=lambda: time.monotonic() + self.now
        )
        self.limiter = CountingLimiter(self.counters, self._spent)
        self._made = 0

    async def _spent(self, owner: str, start: object) -> int:
        if self.failure is not None:
            raise self.failure
        return self.spent

    async def reserve(
        self, who: Principal, prompt: int = 1, output: int = 1, price: Any = FREE
    ) -> Reservation:
        self._made += 1
        name = f"chatcmpl-{id(self)}-{self._made}"
        return await self.limiter.reserve(Demand(name, who, prompt, output, price))

    async def spend(self, who: Principal, tokens: int) -> None:
        """By a request whose answer stays empty, charged to the ledger too."""
        reservation = await self.reserve(who, tokens, 1, PRICE)
        await reservation.settle(Used(tokens, 0))
        self.spent += tokens * 1000

    async def passes(self, who: Principal, tries: int) -> int:
        """How many of so many requests are let in. Raises what isn't a refusal."""
        tried = [self.reserve(who) for _ in range(tries)]
        answers = await asyncio.gather(*tried, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, RateLimited):
                raise answer
        return sum(not isinstance(answer, BaseException) for answer in answers)

    async def recovered(self, within_s: float = 5.0) -> None:
        until = time.monotonic() + within_s
        while self.counters._away is not None:
            assert time.monotonic() < until
            await asyncio.sleep(0.02)


@asynccontextmanager
async def gateway(url: str, settings: LimitSettings) -> AsyncIterator[Gateway]:
    client = client_of(url)
    one = Gateway(client, settings)
    async with one.counters.watching(), one.limiter.running():
        yield one
    await client.aclose()


async def test_without_redis_each_replica_has_its_share(own_redis: OwnRedis, redis_url: str):
    who = principal(Limits(requests_per_minute=10))
    async with gateway(own_redis.url, LOCAL) as one, gateway(own_redis.url, LOCAL) as other:
        with own_redis.stopped():
            assert await one.passes(who, 30) == 5
            assert await other.passes(who, 30) == 5
            assert await one.passes(who, 30) == 0
        await one.recovered()
        await other.recovered()
        assert await one.passes(who, 4) + await other.passes(who, 30) == 10


async def test_a_limit_below_the_number_of_replicas_leaves_each_one(own_redis: OwnRedis):
    settings = LimitSettings(without_redis="local", replicas=50)
    async with gateway(own_redis.url, settings) as one:
        with own_redis.stopped():
            assert await one.passes(principal(Limits(requests_per_minute=10)), 5) == 1
            assert (
                await one.passes(principal(Limits(requests_per_minute=0), tenant_id="t0"), 5) == 0
            )


async def test_redis_that_comes_and_goes_does_not_lift_the_limit(own_redis: OwnRedis):
    who = principal(Limits(requests_per_minute=10))
    async with gateway(own_redis.url, LOCAL) as one:
        let_in = 0
        for _ in range(3):
            with own_redis.stopped():
                let_in += await one.passes(who, 30)
            await one.recovered()
        assert let_in == 5


async def test_closed_refuses_whoever_has_limits(own_redis: OwnRedis):
    async with gateway(own_redis.url, CLOSED) as one:
        who = principal(Limits(requests_per_minute=10))
        with own_redis.stopped():
            for _ in range(3):
                with pytest.raises(LimiterUnavailable) as caught:
                    await one.reserve(who)
            assert caught.value.status == 503
            assert caught.value.headers() == {"retry-after": "2"}
            await one.reserve(principal())  # nothing is to be counted
        await one.recovered()
        await one.reserve(who)


async def test_local_counting_is_for_a_while_only(own_redis: OwnRedis):
    who = principal(Limits(requests_per_minute=1000))
    async with gateway(own_redis.url, LOCAL) as one:
        with own_redis.stopped():
            await one.reserve(who)
            one.now += LOCAL.without_redis_s + 1
            with pytest.raises(LimiterUnavailable):
                await one.reserve(who)
        await one.recovered()
        await one.reserve(who)


async def test_a_dead_redis_costs_one_wait_and_not_one_for_each_request(
    own_redis: OwnRedis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    who = principal(Limits(requests_per_minute=10_000))
    async with (
        proxy(own_redis.port) as between,
        gateway(f"redis://127.0.0.1:{between.port}/0", LOCAL) as one,
    ):
        await one.reserve(who)
        between.silent = True  # it takes connections and says nothing
        begun = time.monotonic()
        assert await one.passes(who, 500) == 500
        first_s = time.monotonic() - begun
        assert await one.passes(who, 500) == 500
        rest_s = time.monotonic() - begun - first_s
        assert first_s < 1.5, "all of them wait at the same time"
        assert rest_s < 0.3
        between.silent = False
        await one.recovered()
    lines = [record.message for record in caplog.records if record.name == degraded.__name__]
    assert len([line for line in lines if "away" in line]) == 1
    assert len([line for line in lines if "back after" in line]) == 1


async def test_a_running_answer_goes_on_without_redis_and_after_it(own_redis: OwnRedis):
    who = principal(Limits(tokens_per_minute=1000, concurrent_requests=1))
    async with gateway(own_redis.url, LOCAL) as one:
        reservation = await one.reserve(who, 10, 10_000)
        with own_redis.stopped():
            assert await reservation.grant(65) == 128
        await one.recovered()
        assert await reservation.grant(129) == 192
        with pytest.raises(RateLimited):
            await one.reserve(who)  # what Redis had forgotten is there again
        await reservation.settle(Used(10, 150))
        await one.reserve(who)


async def test_an_answer_that_cannot_be_counted_ends_in_an_error(own_redis: OwnRedis):
    who = principal(Limits(tokens_per_minute=1000))
    async with gateway(own_redis.url, CLOSED) as one:
        reservation = await one.reserve(who, 10, 10_000)
        with own_redis.stopped():
            assert await reservation.grant(64) == 64
            with pytest.raises(LimiterUnavailable):
                await reservation.grant(65)
            await reservation.settle(Used(10, 64))  # never fails


async def test_budgets_hold_without_redis_and_after_it(own_redis: OwnRedis):
    who = principal(budgets=(budget(20_000),))
    async with gateway(own_redis.url, LOCAL) as one:
        await one.spend(who, 4)
        with own_redis.stopped():
            await one.spend(who, 7)  # of 16 left, half
            with pytest.raises(InsufficientQuota):
                await one.spend(who, 3)
        await one.recovered()
        await one.spend(who, 8)
        with pytest.raises(InsufficientQuota):
            await one.spend(who, 2)


async def test_redis_learns_what_was_spent_without_it_and_the_other_way_round(
    own_redis: OwnRedis, redis_url: str
):
    who = principal(budgets=(budget(40_000),))
    async with (
        proxy(own_redis.port) as between,  # cut off, Redis keeps what it knows
        gateway(f"redis://127.0.0.1:{between.port}/0", LOCAL) as one,
    ):
        await one.spend(who, 4)
        between.silent = True
        await one.spend(who, 17)  # of 36 left, half
        between.silent = False
        await one.recovered()
        with pytest.raises(InsufficientQuota):
            await one.spend(who, 19)  # 19 are left, and the answer needs one
        await one.spend(who, 11)
        between.silent = True
        with pytest.raises(InsufficientQuota):
            await one.spend(who, 4)  # of 8 left, half
        await one.spend(who, 3)


async def test_a_ledger_that_is_away_when_redis_is_back_is_asked_again(
    own_redis: OwnRedis, redis_url: str
):
    who = principal(budgets=(budget(40_000),))
    async with (
        proxy(own_redis.port) as between,  # cut off, Redis keeps what it knows
        gateway(f"redis://127.0.0.1:{between.port}/0", LOCAL) as one,
    ):
        await one.spend(who, 4)
        between.silent = True
        await one.spend(who, 17)  # of 36 left, half
        between.silent = False
        await one.recovered()
        one.failure = DatabaseUnavailable("away")
        for _ in range(2):
            with pytest.raises(DatabaseUnavailable):
                await one.spend(who, 19)
        one.failure = None
        with pytest.raises(InsufficientQuota):
            await one.spend(who, 19)  # 19 are left, and the answer needs one
        await one.spend(who, 11)


async def test_a_slow_redis_is_waited_for(own_redis: OwnRedis):
    who = principal(Limits(requests_per_minute=1_000))
    async with proxy(own_redis.port) as between:
        between.delay_s = 0.2
        async with gateway(f"redis://127.0.0.1:{between.port}/0", CLOSED) as one:
            begun = time.monotonic()
            assert await one.passes(who, 3_000) == 1_000
            assert time.monotonic() - begun < 5
            assert between.open_max <= pipelines.CONNECTIONS_MAX + 2


async def test_redis_restarted_under_load_means_503_at_most(own_redis: OwnRedis):
    who = principal(Limits(requests_per_minute=10**6, concurrent_requests=10**4))
    answers: dict[str, int] = {}
    async with gateway(own_redis.url, CLOSED) as one:
        stop = False

        async def client() -> None:
            while not stop:
                try:
                    reservation = await one.reserve(who)
                    await reservation.grant(1)
                    await reservation.settle(Used(1, 1))
                    answer = "200"
                except LimiterUnavailable:
                    answer = "503"
                    await asyncio.sleep(0.01)
                answers[answer] = answers.get(answer, 0) + 1
                await asyncio.sleep(0)

        clients = [asyncio.create_task(client()) for _ in range(50)]
        await asyncio.sleep(0.5)
        await asyncio.to_thread(own_redis.stop)
        await asyncio.sleep(0.5)
        assert answers.get("503", 0) > 0
        await asyncio.to_thread(own_redis.start)
        await one.recovered()
        before = answers["200"]
        await asyncio.sleep(0.5)
        stop = True
        await asyncio.gather(*clients)
        assert answers["200"] > before + 50


async def test_a_gateway_starts_while_redis_is_away(own_redis: OwnRedis):
    who = principal(Limits(requests_per_minute=10))
    with own_redis.stopped():
        async with gateway(own_redis.url, LOCAL) as one:
            assert await one.passes(who, 30) == 5
