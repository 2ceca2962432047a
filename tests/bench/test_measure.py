"""Figures of timelines that are made by hand, against arithmetic by hand."""

from typing import Any

import pytest

from gateway.bench.load import Run
from gateway.bench.measure import figures, objectives, spread
from gateway.bench.timeline import Failure, Timeline


def timeline(sent_s: float, text_s: list[float] | None = None, **more: Any) -> Timeline:
    values: dict[str, Any] = {"model": "m", "prompt_tokens": 10, "asked_tokens": 4} | more
    return Timeline(**values, sent_s=sent_s, text_s=text_s or [])


def run(*timelines: Timeline, started_s: float = 100.0, ended_s: float = 110.0) -> Run:
    return Run(list(timelines), started_s=started_s, ended_s=ended_s)


WHOLE = timeline(100.0, [101.0, 101.5, 102.5], finished_s=103.0, ended_s=103.25, counted_tokens=4)
"""TTFT 1, gaps 0.5 and 1, TPOT 2/3, E2E 3.25."""
RUNNING = timeline(104.0, [108.0, 109.0])
"""TTFT 4, a gap of 1, TPOT 1; cut off at the end."""
FAILED = timeline(105.0, [105.5, 105.6], ended_s=106.0, failure=Failure("cut", "no [DONE]"))


def test_the_times_of_one_answer():
    assert WHOLE.ttft_s == 1.0
    assert WHOLE.gaps_s == [0.5, 1.0]
    assert WHOLE.tpot_s == pytest.approx(2 / 3)
    assert WHOLE.e2e_s == 3.25
    assert WHOLE.output_tokens == 4


def test_time_per_token_needs_two_chunks_and_two_tokens():
    assert timeline(0, [1.0], ended_s=1, counted_tokens=8).tpot_s is None
    assert timeline(0, [1.0, 2.0], ended_s=2, counted_tokens=1).tpot_s is None
    # three tokens in each of two chunks
    assert timeline(0, [1.0, 2.0], ended_s=2, counted_tokens=6).tpot_s == pytest.approx(0.2)
    # without usage a chunk is a token
    assert timeline(0, [1.0, 2.0, 4.0], ended_s=4).tpot_s == pytest.approx(1.5)


def test_an_answer_without_text_has_its_first_token_at_its_end():
    assert timeline(1.0, ended_s=3.0, counted_tokens=2).ttft_s == 2.0
    assert timeline(1.0).ttft_s is None
    assert timeline(1.0, ended_s=3.0, failure=Failure("cut", "")).ttft_s is None


def test_a_window_counts_what_arrived_in_it():
    found = figures(run(WHOLE, RUNNING, FAILED), 6.0, 0.2)
    assert found.duration_s == 10.0
    counts = found.requests
    assert (counts.sent, counts.completed, counts.failed, counts.unfinished) == (3, 1, 1, 1)
    assert counts.failures == {"cut": 1}
    assert counts.examples == {"cut": ["no [DONE]"]}
    assert found.requests_per_s == 0.1
    assert found.output_tokens == 4 + 2
    assert found.output_tokens_per_s == pytest.approx(0.6)
    assert found.output_tokens_by == "usage and chunks"
    assert found.prompt_tokens_per_s == 2.0
    assert (found.ttft_s.count, found.ttft_s.mean) == (2, 2.5)
    assert found.inter_token_s.count == 3
    assert found.inter_token_s.mean == pytest.approx(2.5 / 3)
    assert (found.e2e_s.count, found.e2e_s.mean) == (1, 3.25)
    assert found.tpot_s.mean == pytest.approx((2 / 3 + 1) / 2)


def test_percentiles_are_interpolated():
    found = spread([4.0, 1.0, None, 3.0, 2.0])
    assert (found.count, found.mean, found.p50) == (4, 2.5, 2.5)
    assert found.p90 == pytest.approx(3.7)
    assert found.p99 == pytest.approx(3.97)
    one = spread([7.0])
    assert (one.mean, one.p50, one.p99) == (7.0, 7.0, 7.0)
    assert spread([]).p99 is None


def test_objectives_are_shares_of_what_could_be_judged():
    quick = timeline(100.0, [101.0, 101.1, 101.2], ended_s=101.3)
    slow_tokens = timeline(100.0, [101.0, 102.0], ended_s=102.0)
    slow_first = timeline(100.0, [103.0, 103.1], ended_s=103.1)
    waits_too_long = timeline(107.0)
    waits = timeline(109.0)  # nobody knows yet
    cut_off = timeline(108.0, [109.0, 109.1])
    judged = run(quick, slow_tokens, slow_first, waits_too_long, waits, cut_off, FAILED)
    found = objectives(judged, ttft_s=2.0, inter_token_s=0.2)
    assert found.judged == 6
    assert found.attained_ttft == pytest.approx(3 / 6)
    assert found.attained_both == pytest.approx(2 / 6)


def test_the_limits_themselves_are_attained():
    found = objectives(run(timeline(100.0, [102.0, 102.25], ended_s=102.25)), 2.0, 0.25)
    assert (found.attained_ttft, found.attained_both) == (1.0, 1.0)


def test_a_run_without_requests_has_no_shares():
    found = figures(run(), 6.0, 0.2)
    assert found.slo.attained_ttft is None
    assert found.output_tokens_by == ""
    assert found.requests_per_s == 0


def test_answers_shorter_than_asked_are_counted_where_the_server_counts():
    full = timeline(100, [101], ended_s=101, counted_tokens=4)
    short = timeline(100, [101], ended_s=101, counted_tokens=3)
    unknown = timeline(100, [101], ended_s=101)
    assert figures(run(full, short, unknown), 6, 0.2).requests.short == 1


def test_of_each_kind_of_failure_few_different_details_are_kept():
    failed = [
        timeline(100, ended_s=101, failure=Failure("http_400", f"detail {number // 2}"))
        for number in range(20)
    ]
    found = figures(run(*failed), 6, 0.2).requests
    assert found.failures == {"http_400": 20}
    assert found.examples == {"http_400": ["detail 0", "detail 1", "detail 2"]}
