"""One suite over the counters in Redis and those in the process."""

from typing import Any

import pytest

from gateway.tenants.limits.counters import (
    BUCKET_MS,
    BUCKETS,
    LEASE_MS,
    RECHECK_MS,
    WINDOW_MS,
    Answer,
    Counters,
)
from gateway.tenants.limits.rules import Limits
from tests.tenants.limits.stores import Clock, budget, claim_of, principal

Counting = tuple[Counters, Clock]

REQUESTS = principal(Limits(requests_per_minute=3))
TOKENS = principal(Limits(tokens_per_minute=100))
RUNNING = principal(Limits(concurrent_requests=2))
SPENDER = principal(budgets=(budget(1000),))


async def admit(counters: Counters, who: Any, name: str, **more: Any) -> Answer:
    return (await counters.admit(claim_of(who, name, **more))).answer


async def test_no_more_requests_than_the_limit_pass_in_any_minute(counting: Counting):
    counters, clock = counting
    for name in "abc":
        assert await admit(counters, REQUESTS, name) is Answer.ADMITTED
        clock.pass_(7_000)
    refused = await counters.admit(claim_of(REQUESTS, "d"))
    assert refused.answer is Answer.WINDOW_FULL
    # the first one came at the beginning of a bucket: all of that is older than a minute then
    assert refused.wait_ms == WINDOW_MS + BUCKET_MS - 21_000
    clock.pass_(refused.wait_ms - 1)
    assert await admit(counters, REQUESTS, "e") is Answer.WINDOW_FULL
    clock.pass_(1)
    assert await admit(counters, REQUESTS, "f") is Answer.ADMITTED
    assert await admit(counters, REQUESTS, "g") is Answer.WINDOW_FULL


async def test_a_window_tells_what_is_used_and_when_it_is_empty(counting: Counting):
    counters, clock = counting
    clock.pass_(1_500)
    (fill,) = (await counters.admit(claim_of(REQUESTS, "a"))).fills
    assert (fill.used, fill.reset_ms) == (1, BUCKETS * BUCKET_MS - 1_500)


async def test_unused_tokens_go_back_to_the_bucket_they_came_from(counting: Counting):
    counters, clock = counting
    claim = claim_of(TOKENS, "a", tokens=60)
    await counters.admit(claim)
    clock.pass_(30_000)
    assert await counters.extend(claim, 60, 40) == 40
    assert await admit(counters, TOKENS, "b") is Answer.WINDOW_FULL
    await counters.settle(claim, 50, 0, refused=False)  # all of the second grant, 10 of the first
    verdict = await counters.admit(claim_of(TOKENS, "c", tokens=50))
    assert verdict.answer is Answer.ADMITTED
    assert verdict.fills[0].used == 100
    clock.pass_(WINDOW_MS + BUCKET_MS - 30_000)
    assert (await counters.admit(claim_of(TOKENS, "d", tokens=50))).fills[0].used == 100


async def test_f3_what_was_used_beyond_the_grant_counts_once(counting: Counting):
    counters, _ = counting
    claim = claim_of(TOKENS, "a", tokens=20)
    await counters.admit(claim)
    for _ in range(2):
        await counters.settle(claim, 90, 0, refused=False)
    verdict = await counters.admit(claim_of(TOKENS, "b", tokens=11))
    assert (verdict.answer, verdict.fills[0].used) == (Answer.WINDOW_FULL, 90)
    assert await admit(counters, TOKENS, "c", tokens=10) is Answer.ADMITTED


async def test_an_extension_gets_what_is_left_and_then_nothing(counting: Counting):
    counters, _ = counting
    claim = claim_of(TOKENS, "a", tokens=70)
    await counters.admit(claim)
    assert await counters.extend(claim, 70, 64) == 30
    assert await counters.extend(claim, 100, 64) == 0


async def test_f4_a_refused_request_changes_nothing(counting: Counting):
    counters, _ = counting
    who = principal(
        Limits(requests_per_minute=10, tokens_per_minute=1000, concurrent_requests=5),
        Limits(requests_per_minute=10, concurrent_requests=1),
        (budget(1000),),
    )
    (pot,) = claim_of(who, "a").bounds.pots
    await counters.raise_spent(pot, 0)
    first = claim_of(who, "a", tokens=10, hold_nanos=10)
    assert [fill.used for fill in (await counters.admit(first)).fills] == [1, 1, 10]
    for name in "bcd":
        verdict = await counters.admit(claim_of(who, name, tokens=10, hold_nanos=10))
        assert verdict.answer is Answer.NO_PLACE
        assert [fill.used for fill in verdict.fills] == [1, 1, 10]
    await counters.settle(first, 10, 0, refused=False)
    whole = claim_of(who, "e", tokens=10, hold_nanos=1000)  # nothing of the refused ones is held
    assert (await counters.admit(whole)).answer is Answer.ADMITTED


@pytest.mark.parametrize("key", [Limits(tokens_per_minute=50), Limits(requests_per_minute=1)])
async def test_the_limits_of_the_key_hold_as_well(counting: Counting, key: Limits):
    counters, _ = counting
    tenant = Limits(requests_per_minute=100, tokens_per_minute=1000)
    mine, sister = principal(tenant, key), principal(tenant, key, key_id="k2")
    assert await admit(counters, mine, "a", tokens=30) is Answer.ADMITTED
    assert await admit(counters, mine, "b", tokens=30) is Answer.WINDOW_FULL
    assert await admit(counters, sister, "c", tokens=30) is Answer.ADMITTED


async def test_f5_places_are_leases_that_lapse_unless_renewed(counting: Counting):
    counters, clock = counting
    alive, crashed = claim_of(RUNNING, "alive"), claim_of(RUNNING, "crashed")
    await counters.admit(alive)
    await counters.admit(crashed)
    for _ in range(3):
        assert await admit(counters, RUNNING, "more") is Answer.NO_PLACE
        clock.pass_(LEASE_MS // 3)
        await counters.beat(alive)
    assert await admit(counters, RUNNING, "next") is Answer.ADMITTED
    assert await admit(counters, RUNNING, "last") is Answer.NO_PLACE
    await counters.settle(alive, 1, 0, refused=False)
    assert await admit(counters, RUNNING, "last") is Answer.ADMITTED


async def test_f5_whatever_is_sent_twice_counts_once(counting: Counting):
    counters, _ = counting
    who = principal(
        Limits(requests_per_minute=9, tokens_per_minute=100, concurrent_requests=1),
        budgets=(budget(1000),),
    )
    claim = claim_of(who, "a", tokens=20, hold_nanos=20, output_micros=1000)
    (pot,) = claim.bounds.pots
    await counters.raise_spent(pot, 0)
    for _ in range(2):
        verdict = await counters.admit(claim)
        assert verdict.answer is Answer.ADMITTED
        assert [fill.used for fill in verdict.fills] == [1, 20]
    assert [await counters.extend(claim, 20, 30) for _ in range(2)] == [30, 30]
    assert [fill.used for fill in (await counters.admit(claim)).fills] == [1, 50]
    for _ in range(2):
        await counters.settle(claim, 25, 25, refused=False)
    last = claim_of(who, "b", tokens=75, hold_nanos=975)
    assert [fill.used for fill in (await counters.admit(last)).fills] == [2, 100]
    await counters.settle(last, 75, 0, refused=False)
    assert await admit(counters, who, "c", tokens=0, hold_nanos=976) is Answer.SPENT


async def test_a_refused_request_gives_its_place_in_the_window_back(counting: Counting):
    counters, clock = counting
    who = principal(Limits(requests_per_minute=1, tokens_per_minute=100))
    claim = claim_of(who, "a", tokens=100)
    await counters.admit(claim)
    clock.pass_(BUCKET_MS)
    await counters.settle(claim, 0, 0, refused=True)
    assert await admit(counters, who, "b", tokens=100) is Answer.ADMITTED


async def test_f1_a_budget_is_unknown_until_the_ledger_has_told(counting: Counting):
    counters, _ = counting
    assert await admit(counters, SPENDER, "a", hold_nanos=600) is Answer.UNKNOWN
    (pot,) = claim_of(SPENDER, "a").bounds.pots
    await counters.raise_spent(pot, 400)
    await counters.raise_spent(pot, 100)  # another replica asked earlier
    assert await admit(counters, SPENDER, "a", hold_nanos=600) is Answer.ADMITTED
    assert await admit(counters, SPENDER, "b", hold_nanos=1) is Answer.HELD


async def test_f1_what_runs_holds_its_cost_until_the_real_one_is_known(counting: Counting):
    counters, clock = counting
    first = claim_of(SPENDER, "a", hold_nanos=600, output_micros=2_500)
    (pot,) = first.bounds.pots
    await counters.raise_spent(pot, 0)
    await counters.admit(first)
    assert await counters.extend(first, 1, 64) == 64
    assert await counters.extend(first, 65, 64) == 64
    assert await counters.extend(first, 129, 64) == 32, "80 of 1000 nanos are left, 2.5 a token"
    assert await admit(counters, SPENDER, "b", hold_nanos=1) is Answer.HELD
    await counters.settle(first, 1, 300, refused=False)
    assert await admit(counters, SPENDER, "c", hold_nanos=701) is Answer.SPENT
    assert await admit(counters, SPENDER, "d", hold_nanos=700) is Answer.ADMITTED
    clock.pass_(LEASE_MS)  # its process has crashed
    assert await admit(counters, SPENDER, "e", hold_nanos=700) is Answer.ADMITTED


async def test_a_budget_is_compared_with_the_ledger_once_a_minute_by_one(counting: Counting):
    counters, clock = counting
    (pot,) = claim_of(SPENDER, "a").bounds.pots
    await counters.raise_spent(pot, 0)
    clock.pass_(RECHECK_MS - 1)
    assert (await counters.admit(claim_of(SPENDER, "a"))).stale == -1
    clock.pass_(1)
    assert (await counters.admit(claim_of(SPENDER, "b"))).stale == 0
    assert (await counters.admit(claim_of(SPENDER, "c"))).stale == -1


async def test_what_costs_nothing_is_counted_in_a_budget(counting: Counting):
    counters, clock = counting
    await counters.raise_spent(claim_of(SPENDER, "a").bounds.pots[0], 0)
    settled, lapsed = claim_of(SPENDER, "a"), claim_of(SPENDER, "b")
    for claim in (settled, lapsed):
        assert (await counters.admit(claim)).answer is Answer.ADMITTED
        assert await counters.extend(claim, 10, 64) == 64
    await counters.settle(settled, 74, 0, refused=False)
    clock.pass_(LEASE_MS)
    assert await admit(counters, SPENDER, "c", hold_nanos=1000) is Answer.ADMITTED


async def test_large_budgets_lose_no_digit(counting: Counting):
    counters, _ = counting
    amount = 2**53 - 1
    who = principal(budgets=(budget(amount),))
    (pot,) = claim_of(who, "a").bounds.pots
    await counters.raise_spent(pot, amount - 3)
    claim = claim_of(who, "a", hold_nanos=2)
    await counters.admit(claim)
    await counters.settle(claim, 1, 2, refused=False)
    assert await admit(counters, who, "b", hold_nanos=2) is Answer.SPENT
    assert await admit(counters, who, "c", hold_nanos=1) is Answer.ADMITTED


async def test_a_request_that_the_store_forgot_is_counted_from_then_on(counting: Counting):
    counters, clock = counting
    who = principal(Limits(tokens_per_minute=100, concurrent_requests=1))
    claim = claim_of(who, "a", tokens=80)
    await counters.admit(claim)
    clock.pass_(WINDOW_MS + BUCKET_MS)  # without a heartbeat
    assert await counters.extend(claim, 80, 64) == 64
    assert await admit(counters, who, "b", tokens=36) is Answer.NO_PLACE
    await counters.settle(claim, 100, 0, refused=False)
    assert (await counters.admit(claim_of(who, "c", tokens=80))).fills[0].used == 100


async def test_tenants_do_not_share(counting: Counting):
    counters, _ = counting
    for name in "abc":
        await counters.admit(claim_of(REQUESTS, name))
    other = principal(Limits(requests_per_minute=3), tenant_id="t2")
    assert await admit(counters, REQUESTS, "d") is Answer.WINDOW_FULL
    assert await admit(counters, other, "e") is Answer.ADMITTED
