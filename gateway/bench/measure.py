"""Figures out of timelines."""

from collections import Counter
from collections.abc import Iterable

import numpy as np
from msgspec import Struct

from gateway.bench.load import Run
from gateway.bench.timeline import Timeline

EXAMPLES_MAX = 3
"""Details shown of each kind of failure."""


class Spread(Struct, frozen=True):
    """Of some numbers; all None if there are none. Percentiles are interpolated linearly."""

    count: int
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class Requests(Struct, frozen=True):
    """sent = completed + failed + unfinished."""

    sent: int
    completed: int
    failed: int
    unfinished: int
    """They ran when the measurement ended, and were cut off by us."""
    short: int
    """Completed with fewer tokens than were asked for, by usage."""
    failures: dict[str, int]
    examples: dict[str, list[str]]
    """Kind → details of its first failures."""


class Objectives(Struct, frozen=True):
    """Shares of the requests that could be judged; None without any.

    A failed request attains nothing. One that was cut off at the end is judged by what had arrived;
    if that was nothing, it has missed its time to first token or, before that, is left out.
    """

    ttft_s: float
    inter_token_s: float
    judged: int
    attained_ttft: float | None
    attained_both: float | None
    """And its mean time per output token is within the limit."""


class Figures(Struct, frozen=True):
    duration_s: float
    requests: Requests
    requests_per_s: float
    """Completed ones."""
    output_tokens: int
    """Of completed requests, and those that had arrived of unfinished ones; of failed ones none."""
    output_tokens_by: str
    """`usage`, `chunks`, or `usage and chunks` if some requests were counted by either."""
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    """Of the requests of which a token arrived, so that their prompts were computed."""
    ttft_s: Spread
    inter_token_s: Spread
    """Between chunks with text."""
    tpot_s: Spread
    e2e_s: Spread
    """Of completed requests; the three above of unfinished ones, too."""
    late_s: Spread
    """Of sending, after the moment when a request was due."""
    slo: Objectives


def figures(run: Run, slo_ttft_s: float, slo_inter_token_s: float) -> Figures:
    answered = [one for one in run.timelines if one.failure is None]
    completed = [one for one in answered if one.completed]
    tokens = sum(one.output_tokens for one in answered)
    prompts = sum(one.prompt_tokens for one in answered if one.ttft_s is not None)
    duration_s = run.duration_s
    return Figures(
        duration_s=duration_s,
        requests=_requests(run.timelines),
        requests_per_s=len(completed) / duration_s,
        output_tokens=tokens,
        output_tokens_by=_counted_by(answered),
        output_tokens_per_s=tokens / duration_s,
        prompt_tokens_per_s=prompts / duration_s,
        ttft_s=spread(one.ttft_s for one in answered),
        inter_token_s=spread(gap for one in answered for gap in one.gaps_s),
        tpot_s=spread(one.tpot_s for one in answered),
        e2e_s=spread(one.e2e_s for one in completed),
        late_s=spread(one.late_s for one in run.timelines),
        slo=objectives(run, slo_ttft_s, slo_inter_token_s),
    )


def spread(values: Iterable[float | None]) -> Spread:
    known = np.array([value for value in values if value is not None], dtype=np.float64)
    if not known.size:
        return Spread(0)
    p50, p90, p99 = np.percentile(known, [50, 90, 99]).tolist()
    return Spread(known.size, float(known.mean()), p50, p90, p99)


def objectives(run: Run, ttft_s: float, inter_token_s: float) -> Objectives:
    judged = attained_ttft = attained_both = 0
    for one in run.timelines:
        if one.running and one.ttft_s is None and run.ended_s - one.sent_s <= ttft_s:
            continue
        judged += 1
        if one.failure is None and one.ttft_s is not None and one.ttft_s <= ttft_s:
            attained_ttft += 1
            attained_both += one.tpot_s is None or one.tpot_s <= inter_token_s
    return Objectives(
        ttft_s=ttft_s,
        inter_token_s=inter_token_s,
        judged=judged,
        attained_ttft=attained_ttft / judged if judged else None,
        attained_both=attained_both / judged if judged else None,
    )


def _requests(timelines: list[Timeline]) -> Requests:
    completed = [one for one in timelines if one.completed]
    failures = [one.failure for one in timelines if one.failure is not None]
    examples: dict[str, list[str]] = {}
    for kind, detail in failures:
        details = examples.setdefault(kind, [])
        if detail not in details and len(details) < EXAMPLES_MAX:
            details.append(detail)
    return Requests(
        sent=len(timelines),
        completed=len(completed),
        failed=len(failures),
        unfinished=sum(one.running for one in timelines),
        short=sum((one.counted_tokens or one.asked_tokens) < one.asked_tokens for one in completed),
        failures=dict(Counter(kind for kind, _ in failures).most_common()),
        examples=examples,
    )


def _counted_by(timelines: list[Timeline]) -> str:
    ways = {one.counted_tokens is not None for one in timelines if one.output_tokens}
    return " and ".join([name for way, name in ((True, "usage"), (False, "chunks")) if way in ways])
