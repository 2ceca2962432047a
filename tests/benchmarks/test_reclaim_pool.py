"""The one reclaim order on small seeded traces, beside the policies it replaces."""

from pathlib import Path

import pytest

from benchmarks.reclaim_pool import POLICIES, Costs, Result, keys, simulate, working_set
from benchmarks.reclaim_trace import TRACES, Request, read, write

REQUESTS = 600


def replay(trace: str, share: float) -> dict[str, Result]:
    requests = list(TRACES[trace](7, REQUESTS))
    pages = int(share * working_set(requests, Costs()))
    return {policy: simulate(requests, pages, policy, Costs()) for policy in POLICIES}


@pytest.mark.parametrize("trace", ["alpha 0.9", "drifting", "scanned"])
def test_the_order_halves_what_the_power_law_costs(trace: str):
    results = replay(trace, 0.25)
    ours = results["ours"].seconds
    assert ours < 0.6 * results["LRU"].seconds
    assert ours < 0.5 * results["drop all"].seconds
    assert results["clairvoyant"].seconds < ours


@pytest.mark.parametrize("share", [0.1, 0.25])
def test_conversations_lose_nothing_beside_lru(share: float):
    results = replay("conversations", share)
    assert results["ours"].seconds < results["LRU"].seconds
    assert results["ours"].seconds < 0.9 * results["drop all"].seconds


def test_every_policy_is_asked_the_same():
    asked = {
        policy: (result.hits["adapter"] + result.misses["adapter"])
        for policy, result in replay("alpha 0.9", 0.1).items()
    }
    requests = list(TRACES["alpha 0.9"](7, REQUESTS))
    again = REQUESTS - len({request.adapter for request in requests})
    assert set(asked.values()) == {again}


def test_a_pool_that_holds_everything_brings_nothing_back():
    requests = list(TRACES["conversations"](7, REQUESTS))
    everything = sum(Costs().pages(64) for _ in range(200)) + sum(len(keys(r)) for r in requests)
    kept = simulate(requests, everything, "ours", Costs())
    assert kept.seconds == 0
    assert kept.misses.total() == 0


def test_what_is_dropped_is_paid_for_when_it_is_asked_for_again():
    first = Request(0.0, "a", 8, ["a/0", "a/1"], 2, 1.0)
    other = Request(10.0, None, 0, [f"base/{index}" for index in range(15)], 15, 1.0)
    again = Request(20.0, "a", 8, ["a/0", "a/1"], 2, 1.0)
    costs = Costs()
    assert costs.pages(8) == 14
    for policy in POLICIES:
        result = simulate([first, other, again], 16, policy, costs)
        # of the 16 pages the second request leaves one at most: of the prefix, if not of nothing
        assert result.adapter_s == pytest.approx(8 * costs.bytes_per_rank / costs.copy_bytes_per_s)
        assert result.prefix_s in (costs.block_s, 2 * costs.block_s)


def test_a_recorded_trace_replays_the_same(tmp_path: Path):
    requests = list(TRACES["scanned"](7, 200))
    assert requests == list(TRACES["scanned"](7, 200))
    write(tmp_path / "trace.jsonl", requests)
    assert read(tmp_path / "trace.jsonl") == requests
    assert len((tmp_path / "trace.jsonl").read_text().splitlines()) == len(requests)
