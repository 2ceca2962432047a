"""What one iteration did, for tests and benchmarks: counts say more than times do on a machine
that others use too."""

from typing import NamedTuple

from gateway.engine.scheduling.plan import Plan


class Share(NamedTuple):
    """What one request had of an iteration, in tokens."""

    request_id: str
    adapter: str | None
    prefilled: int
    decoded: int


class StepRecord(NamedTuple):
    iteration: int
    shares: list[Share]
    pages_kv: int
    pages_prefixes: int
    pages_adapters: int
    adapter_loads: int
    """Copies host → pool that planning this iteration needed."""
    bytes_loaded: int
    preemptions: int
    plan_s: float
    compute_s: float
    """Packing the batch, the forward pass and sampling."""
    commit_s: float

    @property
    def tokens(self) -> int:
        return sum(share.prefilled + share.decoded for share in self.shares)


def shares(plan: Plan) -> list[Share]:
    """Before the plan is committed."""
    found = []
    for sequence, length in plan.slices:
        decoded = int(sequence.generated > 0 and length == 1)
        found.append(Share(sequence.id, sequence.digest, length - decoded, decoded))
    return found


class Totals:
    """Since the engine's start."""

    def __init__(self) -> None:
        self.iterations = 0
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.cached_tokens = 0
        self.batch_adapters_max = 0
        """Most distinct adapters in one forward pass."""

    def count(self, plan: Plan) -> None:
        """One iteration, before its plan is committed."""
        self.iterations += 1
        adapters, last = 0, None
        for sequence, length in plan.slices:
            if length == 1 and sequence.generated > 0:
                self.decode_tokens += 1
            else:
                self.prefill_tokens += length
            digest = sequence.digest
            if digest is not None and digest != last:  # slices are ordered by adapter
                adapters, last = adapters + 1, digest
        self.batch_adapters_max = max(self.batch_adapters_max, adapters)
