"""x-ratelimit-*, as OpenAI sends them."""

import math
from collections.abc import Sequence

from gateway.tenants.limits.bounds import Bound, Bounds
from gateway.tenants.limits.counters import Fill


def rate_headers(bounds: Bounds, fills: Sequence[Fill]) -> dict[str, str]:
    """Of the tightest limit of each kind; of kinds without a limit, nothing."""
    split = len(bounds.requests)
    return {
        **_kind("requests", bounds.requests, fills[:split]),
        **_kind("tokens", bounds.tokens, fills[split:]),
    }


def _kind(kind: str, bounds: Sequence[Bound], fills: Sequence[Fill]) -> dict[str, str]:
    if not bounds or not fills:
        return {}
    left, limit, reset_ms = min(
        (max(0, bound.limit - fill.used), bound.limit, fill.reset_ms)
        for bound, fill in zip(bounds, fills, strict=True)
    )
    return {
        f"x-ratelimit-limit-{kind}": str(limit),
        f"x-ratelimit-remaining-{kind}": str(left),
        f"x-ratelimit-reset-{kind}": duration(reset_ms),
    }


def duration(ms: int) -> str:
    """`0s`, `20ms`, `1s`, `6m0s`; never less than it is."""
    if 0 < ms < 1000:
        return f"{ms}ms"
    minutes, seconds = divmod(math.ceil(ms / 1000), 60)
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
