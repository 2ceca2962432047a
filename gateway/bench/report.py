"""What a run has shown, as one JSON object and as a table."""

from typing import Any

import msgspec

from gateway.bench.measure import Figures, Spread
from gateway.bench.processes import Usage
from gateway.bench.runner import Result

DIGITS = 6
"""Of seconds and rates in JSON: microseconds."""


def as_dict(settings: dict[str, Any], result: Result) -> dict[str, Any]:
    """Times in seconds, memory in MiB, None for what could not be measured."""
    usage = result.usage
    measured: dict[str, Any] = msgspec.to_builtins(result.figures)
    late_s = measured.pop("late_s")
    report = {
        "settings": settings,
        "started_at": result.started_at.isoformat(timespec="milliseconds"),
        "interrupted": result.run.interrupted,
        **measured,
        "server": {
            "peak_pss_mib": usage.peak_pss_mib,
            "mean_cores": usage.mean_cores,
            "ended": usage.ended,
        },
        "client": {
            "cpu_share": usage.own_cores,
            "other_cores": usage.other_cores,
            "late_s": late_s,
        },
    }
    rounded: dict[str, Any] = _rounded(report)
    return rounded


def table(result: Result) -> str:
    figures, usage = result.figures, result.usage
    requests, slo = figures.requests, figures.slo
    counts = f"{requests.completed} completed, {requests.failed} failed"
    if requests.unfinished:
        counts += f", {requests.unfinished} cut off at the end"
    lines = [
        ("duration", f"{figures.duration_s:.1f} s"),
        ("requests", f"{requests.sent} sent: {counts}"),
        *((f"  {kind}", str(count)) for kind, count in requests.failures.items()),
        ("requests/s", f"{figures.requests_per_s:.3f}"),
        ("output tokens/s", f"{figures.output_tokens_per_s:.1f}  (by {_by(figures)})"),
        ("prompt tokens/s", f"{figures.prompt_tokens_per_s:.1f}"),
        ("", f"{'mean':>9}{'p50':>9}{'p90':>9}{'p99':>9}"),
        ("time to first token", _spread(figures.ttft_s)),
        ("inter-token latency", _spread(figures.inter_token_s)),
        ("time per output token", _spread(figures.tpot_s)),
        ("whole answer", _spread(figures.e2e_s)),
        ("objectives attained", f"{_share(slo.attained_ttft)} first token within {slo.ttft_s:g} s"),
        (
            "",
            f"{_share(slo.attained_both)} and each other within {slo.inter_token_s:g} s on average",
        ),
        ("server", _server(usage)),
        ("client", _client(usage)),
    ]
    if requests.short:
        lines.insert(2, ("  short", f"{requests.short} with fewer tokens than asked for"))
    width = max(len(name) for name, _ in lines)
    text = [f"{name:{width}}  {value}".rstrip() for name, value in lines]
    for kind, details in requests.examples.items():
        text += [f"{kind}: {detail}" for detail in details]
    return "\n".join(text)


def _spread(spread: Spread) -> str:
    values = (spread.mean, spread.p50, spread.p90, spread.p99)
    return "".join(f"{'-' if value is None else _time(value):>9}" for value in values)


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def _by(figures: Figures) -> str:
    return figures.output_tokens_by or "nothing"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _server(usage: Usage) -> str:
    if usage.peak_pss_mib is None or usage.mean_cores is None:
        return "not watched (--pid)"
    ended = f"; ended meanwhile: {', '.join(map(str, usage.ended))}" if usage.ended else ""
    return f"{usage.peak_pss_mib:.0f} MiB at most (PSS), {usage.mean_cores:.2f} cores{ended}"


def _client(usage: Usage) -> str:
    others = "" if usage.other_cores is None else f", {usage.other_cores:.2f} by all others"
    return f"{usage.own_cores:.3f} cores{others}"


def _rounded(value: Any) -> Any:
    match value:
        case float():
            return round(value, DIGITS)
        case dict():
            return {name: _rounded(item) for name, item in value.items()}
        case list() | tuple():
            return [_rounded(item) for item in value]
        case _:
            return value
