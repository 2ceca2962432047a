"""What the walk of a request sees, over both kinds of counters."""

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime
from typing import Any

import pytest

from gateway.errors import DatabaseUnavailable, InsufficientQuota, RateLimited
from gateway.tenants.keys import Principal
from gateway.tenants.limits.counters import BUCKET_MS, BUCKETS, LEASE_MS, Counters
from gateway.tenants.limits.counting import TRANCHE, CountingLimiter
from gateway.tenants.limits.headers import duration
from gateway.tenants.limits.limiter import Demand, Reservation, Used
from gateway.tenants.limits.rules import Limits
from gateway.tenants.usage.rates import FREE, Rates
from tests.tenants.limits.stores import NOON, Clock, budget, principal

PRICE = Rates(input_micros=1_000_000, cached_input_micros=100_000, output_micros=2_000_000)
"""1000 nanos a token of the prompt, 2000 of the answer."""


class Ledger:
    def __init__(self) -> None:
        self.nanos = 0
        self.asked: list[tuple[str, datetime]] = []
        self.failure: Exception | None = None

    async def __call__(self, owner: str, start: datetime) -> int:
        self.asked.append((owner, start))
        await asyncio.sleep(0.01)
        if self.failure is not None:
            raise self.failure
        return self.nanos


class Desk:
    def __init__(self, counters: Counters, clock: Clock) -> None:
        self.ledger = Ledger()
        self.counters, self.clock = counters, clock
        self.limiter = CountingLimiter(counters, self.ledger, now=lambda: NOON)
        self._made = 0

    async def reserve(
        self, who: Principal, prompt: int = 10, output: int = 64, price: Rates = FREE
    ) -> Reservation:
        self._made += 1
        demand = Demand(f"chatcmpl-{self._made}", who, prompt, output, price)
        return await self.limiter.reserve(demand)

    async def refusal(self, *args: Any, **more: Any) -> RateLimited:
        with pytest.raises(RateLimited) as caught:
            await self.reserve(*args, **more)
        return caught.value


@pytest.fixture
async def desk(counting: tuple[Counters, Clock]) -> AsyncIterator[Desk]:
    desk = Desk(*counting)
    async with desk.limiter.running():
        yield desk


async def grown(reservation: Reservation, tokens: int) -> int:
    """Produce tokens one by one as long as they are granted; how many were."""
    for produced in range(1, tokens + 1):
        if await reservation.grant(produced) < produced:
            return produced - 1
    return tokens


# --- headers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0, "0s"), (20, "20ms"), (1000, "1s"), (8_640, "9s"), (60_000, "1m0s"), (360_000, "6m0s")],
)
def test_durations_are_written_as_openai_writes_them(ms: int, text: str):
    assert duration(ms) == text


async def test_headers_tell_of_the_tightest_limit(desk: Desk):
    who = principal(
        Limits(requests_per_minute=9, tokens_per_minute=1000), Limits(requests_per_minute=5)
    )
    assert (await desk.reserve(who)).headers == {
        "x-ratelimit-limit-requests": "5",
        "x-ratelimit-remaining-requests": "4",
        "x-ratelimit-reset-requests": "1m5s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "926",
        "x-ratelimit-reset-tokens": "1m5s",
    }


async def test_who_has_no_limits_gets_no_headers_and_costs_nothing(desk: Desk):
    before = desk.counters
    desk.limiter._counters = None  # type: ignore[assignment]  # it would fail if it were asked
    reservation = await desk.reserve(principal(budgets=(budget(0, hard=False),)), output=10**6)
    assert reservation.headers == {}
    assert await reservation.grant(10**6) == 10**6
    await reservation.settle(Used(10, 10**6))
    desk.limiter._counters = before


async def test_f18_a_429_says_when_to_come_back_and_is_let_in_then(desk: Desk):
    who = principal(Limits(requests_per_minute=1))
    desk.clock.pass_(1_300)
    await desk.reserve(who)
    desk.clock.pass_(20_000)
    refusal = await desk.refusal(who)
    headers = refusal.headers()
    assert refusal.code == "rate_limit_exceeded"
    assert headers["retry-after"] == "44"  # 65 s after the bucket began, rounded up
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert headers["x-ratelimit-limit-requests"] == "1"
    assert "x-should-retry" not in headers
    desk.clock.pass_(44_000)
    await desk.reserve(who)


async def test_f18_what_waiting_cannot_help_is_not_to_be_retried(desk: Desk):
    desk.ledger.nanos = 1000
    spent = await desk.refusal(principal(budgets=(budget(1000),)))
    never = await desk.refusal(principal(Limits(tokens_per_minute=64)), prompt=64)
    for refusal in (spent, never):
        assert refusal.status == 429
        assert refusal.headers()["x-should-retry"] == "false"
        assert "retry-after" not in refusal.headers()
    assert isinstance(spent, InsufficientQuota)
    assert (spent.type, spent.code) == ("insufficient_quota", "insufficient_quota")
    assert "64 tokens per minute" in never.message


@pytest.mark.parametrize(
    "limit", ["requests_per_minute", "tokens_per_minute", "concurrent_requests"]
)
async def test_f18_a_limit_of_0_is_no_matter_of_time(desk: Desk, limit: str):
    refusal = await desk.refusal(principal(Limits(**{limit: 0})))
    assert refusal.headers()["x-should-retry"] == "false"
    assert "retry-after" not in refusal.headers()
    assert "limit is 0" in refusal.message


# --- tokens ---------------------------------------------------------------------------------------


async def test_f1b_a_burst_with_huge_max_tokens_and_short_answers_is_not_refused(desk: Desk):
    who = principal(
        Limits(tokens_per_minute=2_000), budgets=(budget(20 * 80 * 2_000),)
    )  # 20 × max_tokens would be 200 times either
    reservations = [await desk.reserve(who, 10, 20_000, PRICE) for _ in range(20)]
    for reservation in reservations:
        assert await grown(reservation, 5) == 5
        await reservation.settle(Used(10, 5))
    again = [await desk.reserve(who, 10, 20_000, PRICE) for _ in range(20)]
    assert again[-1].headers["x-ratelimit-remaining-tokens"] == str(2_000 - 20 * 15 - 20 * 74)


async def test_f12_an_answer_ends_where_the_limit_does(desk: Desk):
    who = principal(Limits(tokens_per_minute=300))
    reservation = await desk.reserve(who, prompt=100, output=10_000)
    assert await grown(reservation, 500) == 200
    await reservation.settle(Used(100, 200))
    assert "retry-after" in (await desk.refusal(who, prompt=1)).headers()


async def test_f12_two_answers_share_what_is_left(desk: Desk):
    who = principal(Limits(tokens_per_minute=500))
    reservations = [await desk.reserve(who, prompt=50, output=10_000) for _ in range(2)]
    assert sum(await asyncio.gather(*(grown(one, 1000) for one in reservations))) == 400


async def test_a_limit_hardly_above_the_prompt_lets_a_short_answer_through(desk: Desk):
    reservation = await desk.reserve(principal(Limits(tokens_per_minute=50)), prompt=40, output=64)
    assert await grown(reservation, 64) == 10


async def test_tranches_come_ahead_of_need(desk: Desk, monkeypatch: pytest.MonkeyPatch):
    who = principal(Limits(tokens_per_minute=100_000))
    reservation = await desk.reserve(who, output=1000)
    assert await reservation.grant(1) == TRANCHE
    assert await reservation.grant(TRANCHE // 2 + 1) == TRANCHE
    await asyncio.sleep(0.1)
    assert await reservation.grant(TRANCHE // 2 + 2) == 2 * TRANCHE
    # and none past max_tokens
    last = await desk.reserve(who, output=TRANCHE + 3)
    assert await grown(last, TRANCHE + 3) == TRANCHE + 3
    await asyncio.sleep(0.1)
    assert await last.grant(TRANCHE + 3) == TRANCHE + 3


async def test_what_the_answer_did_not_need_is_free_again(desk: Desk):
    who = principal(Limits(tokens_per_minute=200))
    reservation = await desk.reserve(who, prompt=10, output=190)
    assert await grown(reservation, 120) == 120
    await reservation.settle(Used(10, 120))
    assert (await desk.reserve(who, 1, 1)).headers["x-ratelimit-remaining-tokens"] == "68"


async def test_a_tranche_under_way_at_the_end_is_not_left_behind(desk: Desk):
    who = principal(Limits(tokens_per_minute=1_000))
    for _ in range(20):
        reservation = await desk.reserve(who, prompt=1, output=500)
        asking = asyncio.create_task(reservation.grant(TRANCHE + 1))
        await asyncio.sleep(0)
        await reservation.settle(Used(0, 0))
        asking.cancel()
    assert (await desk.reserve(who, 1, 1)).headers["x-ratelimit-remaining-tokens"] == "998"


async def test_settling_twice_changes_nothing_more(desk: Desk):
    who = principal(Limits(requests_per_minute=10, concurrent_requests=2))
    first = await desk.reserve(who)
    await desk.reserve(who)
    await first.settle(Used(10, 1, refused=True))
    await first.settle(Used(10, 1, refused=True))
    assert (await desk.reserve(who)).headers["x-ratelimit-remaining-requests"] == "8"
    await desk.refusal(who)


# --- places ---------------------------------------------------------------------------------------


async def test_f5_a_client_that_leaves_while_it_is_admitted_keeps_no_place(desk: Desk):
    who = principal(Limits(concurrent_requests=1, requests_per_minute=10_000))
    for steps in range(12):  # leave at each point at which the event loop turns
        entering = asyncio.create_task(desk.reserve(who))
        for _ in range(steps):
            await asyncio.sleep(0.0005 if steps > 6 else 0)
        entering.cancel()
        try:
            reservation = await entering
        except asyncio.CancelledError:
            pass
        else:
            await reservation.settle(Used(0, 0, refused=True))
        await asyncio.sleep(0.02)
        last = await desk.reserve(who)
        assert last.headers["x-ratelimit-remaining-requests"] == str(9_999 - steps)
        await last.settle(Used(10, 1))


async def test_f5_settling_outlives_the_client(desk: Desk):
    who = principal(Limits(concurrent_requests=1))
    for _ in range(5):
        reservation = await desk.reserve(who)
        settling = asyncio.create_task(reservation.settle(Used(1, 1)))
        await asyncio.sleep(0)
        settling.cancel()
        await asyncio.sleep(0.02)
    await desk.reserve(who)


async def test_f5_running_requests_renew_their_leases(desk: Desk, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gateway.tenants.limits.counting.HEARTBEAT_S", 0.01)
    limiter = CountingLimiter(desk.counters, desk.ledger, now=lambda: NOON)
    desk.limiter = limiter
    who = principal(Limits(concurrent_requests=1))
    async with limiter.running():
        reservation = await desk.reserve(who)
        for _ in range(5):
            desk.clock.pass_(LEASE_MS // 3)
            await asyncio.sleep(0.1)
            refusal = await desk.refusal(who)
        assert refusal.headers()["retry-after"] == "1"
        await reservation.settle(Used(1, 1))
        await desk.reserve(who)


# --- budgets --------------------------------------------------------------------------------------


async def test_f1_concurrent_first_calls_share_one_counter(desk: Desk):
    desk.ledger.nanos = 10_000
    who = principal(budgets=(budget(10_000 + 5 * 3_000),))  # five more of 1000 + 2000 nanos
    tries = (desk.reserve(who, 1, 1, PRICE) for _ in range(50))
    answers = await asyncio.gather(*tries, return_exceptions=True)
    assert sum(not isinstance(answer, Exception) for answer in answers) == 5
    assert len(desk.ledger.asked) == 1
    assert desk.ledger.asked == [("tenant:t1", NOON.replace(day=1, hour=0))]


async def test_f1_a_budget_full_of_running_requests_is_a_matter_of_time(desk: Desk):
    who = principal(budgets=(budget(3_000),))
    first = await desk.reserve(who, 1, 1, PRICE)
    refusal = await desk.refusal(who, 1, 1, PRICE)
    assert not isinstance(refusal, InsufficientQuota)
    assert refusal.headers()["retry-after"] == "5"
    await first.settle(Used(0, 0, refused=True))  # it cost nothing after all
    second = await desk.reserve(who, 1, 1, PRICE)
    await second.settle(Used(1, 1))
    assert isinstance(await desk.refusal(who, 1, 1, PRICE), InsufficientQuota)


async def test_f1_the_real_cost_is_charged_with_the_price_of_cached_tokens(desk: Desk):
    who = principal(budgets=(budget(100_000),))
    first = await desk.reserve(who, 20, 10, PRICE)
    await first.settle(Used(20, 5, cached_tokens=10))  # 10 000 + 1 000 + 10 000
    await desk.reserve(who, 79, 1, Rates(1_000_000, 0, 0))
    await desk.refusal(who, 1, 1, PRICE)


async def test_the_budgets_of_key_and_tenant_hold_together(desk: Desk):
    both = (budget(10_000), budget(4_000, "key:k1"))
    mine, sister = principal(budgets=both), principal(budgets=both[:1], key_id="k2")
    for who in (mine, sister):
        await (await desk.reserve(who, 1, 1, PRICE)).settle(Used(1, 1))
    assert "key's budget" in (await desk.refusal(mine, 1, 1, PRICE)).message
    await (await desk.reserve(sister, 1, 1, PRICE)).settle(Used(1, 1))
    assert "tenant's budget" in (await desk.refusal(sister, 1, 1, PRICE)).message


async def test_an_answer_ends_where_the_budget_does(desk: Desk):
    who = principal(budgets=(budget(1_000 + 100 * 2_000),))
    reservation = await desk.reserve(who, 1, 5_000, PRICE)
    assert await grown(reservation, 500) == 100


async def test_a_soft_budget_refuses_nobody(desk: Desk):
    desk.ledger.nanos = 10**12
    await desk.reserve(principal(budgets=(budget(1, hard=False),)), 1, 1, PRICE)


async def test_a_ledger_that_cannot_be_read_is_503(desk: Desk):
    desk.ledger.failure = DatabaseUnavailable("away")
    with pytest.raises(DatabaseUnavailable):
        await desk.reserve(principal(budgets=(budget(1000),)), 1, 1)
    desk.ledger.failure = None
    await desk.reserve(principal(budgets=(budget(1000),)), 1, 1)


async def test_what_crashed_requests_cost_is_learned_from_the_ledger(desk: Desk):
    who = principal(budgets=(budget(10_000),))
    await desk.reserve(who, 1, 1, PRICE)  # and its process dies
    desk.ledger.nanos = 9_000
    desk.clock.pass_(BUCKETS * BUCKET_MS)
    await (await desk.reserve(who, 1, 1, PRICE)).settle(Used(0, 0))
    await asyncio.sleep(0.1)
    assert isinstance(await desk.refusal(who, 1, 1, PRICE), InsufficientQuota)


async def test_a_new_month_is_a_new_budget(desk: Desk):
    moment = NOON
    limiter = CountingLimiter(desk.counters, desk.ledger, now=lambda: moment)
    desk.limiter = limiter
    who = principal(budgets=(budget(3_000),))
    await (await desk.reserve(who, 1, 1, PRICE)).settle(Used(1, 1))
    await desk.refusal(who, 1, 1, PRICE)
    moment = NOON.replace(month=4, day=1, hour=0)
    await desk.reserve(who, 1, 1, PRICE)
    assert [start.month for _, start in desk.ledger.asked] == [3, 4]
