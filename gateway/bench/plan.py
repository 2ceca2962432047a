"""All that a run depends on but the models and their keys."""

from msgspec import Struct

from gateway.bench.shape import Shape


class Limit(Struct, frozen=True):
    """When a run ends; one of both."""

    requests: int | None
    duration_s: float | None
    """Of a closed loop: what then runs is cut off, and counts with what has arrived. Of an open
    one: nothing is sent after it, and what was sent is waited for."""


class Plan(Struct, frozen=True, kw_only=True):
    url: str
    shape: Shape
    concurrency: int | None
    """Clients of a closed loop; None: an open one of `rate` and `cv`."""
    rate: float | None
    cv: float
    limit: Limit
    warmup: int
    seed: int
    timeout_s: float
    slo_ttft_s: float
    slo_inter_token_s: float
    pids: tuple[int, ...]
