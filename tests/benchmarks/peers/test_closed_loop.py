"""What is read of the load generator's report."""

from typing import Any

import pytest

from benchmarks.peers.child import Failed
from benchmarks.peers.closed_loop import reading_of


def report(**requests: Any) -> dict[str, Any]:
    counts = {"sent": 9, "completed": 9, "failed": 0, "examples": {}}
    return {
        "output_tokens_per_s": 61.5,
        "ttft_s": {"mean": 0.4, "p50": 0.3, "p90": 0.7, "p99": 0.9},
        "requests": counts | requests,
        "slo": {"ttft_s": 2.0, "attained_ttft": 0.96},
        "client": {"cpu_share": 0.02, "other_cores": 0.05},
    }


def test_a_reading_is_the_rate_and_the_median_first_token():
    reading = reading_of(report())
    assert (reading.tokens_per_s, reading.first_token_s, reading.other_cores) == (61.5, 0.3, 0.05)
    assert reading.in_time == 0.96
    assert reading.report == report()


def test_a_rate_of_which_requests_failed_is_none():
    with pytest.raises(Failed, match=r"2 requests failed: .*no slot"):
        reading_of(report(failed=2, examples={"http_500": ["no slot"]}))


def test_a_server_that_answered_nothing_has_no_rate():
    with pytest.raises(Failed, match="not one token"):
        reading_of(report(completed=0) | {"output_tokens_per_s": 0.0})


def test_what_had_arrived_of_cut_off_requests_is_a_rate():
    assert reading_of(report(completed=0)).tokens_per_s == 61.5
