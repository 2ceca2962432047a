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
