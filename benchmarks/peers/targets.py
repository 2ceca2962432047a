"""The ratios that Loragate is to reach, beside which table.py prints the ones found."""

from msgspec import Struct

from benchmarks.peers.loads import Load

LLAMA = "llama"
VLLM = "vllm"
PEFT = "peft"
ANY = ""


class Goal(Struct, frozen=True):
    ratio: float
    """Our output tokens per second ÷ theirs, at least."""
    peers: str
    """The best of the peers whose name begins so."""


class Target(Struct, frozen=True):
    needed: Goal
    stretch: Goal
    in_time: float = 0.0
    """Share of ours whose first token comes within FIRST_TOKEN_S; needed as well."""


_BASE = {
    1: Target(Goal(1.5, VLLM), Goal(1.0, LLAMA)),
    8: Target(Goal(1.2, ANY), Goal(1.6, ANY)),
    32: Target(Goal(1.5, ANY), Goal(2.0, ANY)),
}
_ADAPTERS = {
    1: Target(Goal(3.0, VLLM), Goal(1.0, LLAMA)),
    8: Target(Goal(3.0, ANY), Goal(5.0, ANY)),
    32: Target(Goal(3.5, ANY), Goal(6.0, ANY), in_time=0.5),
}
_STATIC = Target(Goal(5.0, PEFT), Goal(10.0, PEFT))
_TARGETS = {
    "base": _BASE,
    "adapters-32": _ADAPTERS,
    "adapters-128": _ADAPTERS,
    "static": {8: _STATIC, 32: _STATIC},
}


def target_of(load: Load) -> Target:
    return _TARGETS[load.kind][load.concurrency]
