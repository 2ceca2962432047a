"""What the servers are asked: kinds of loads, each at several concurrencies."""

from collections.abc import Iterable, Iterator
from zlib import crc32

from msgspec import Struct

from benchmarks.peers.layout import ADAPTERS

PROMPT_TOKENS = (32, 128)
OUTPUT_TOKENS = (32, 64)
FIRST_TOKEN_S = 2.0
"""Within which a first token is in time."""
VOCABULARY = (100, 49000)
"""Token ids of prompts: none that steers a chat."""

KINDS = {"base": 0, "adapters-32": 32, "adapters-128": ADAPTERS, "static": 32}
"""Kind of load → adapters that the server has. In `static`, requests arrive and end together, as
transformers needs them, with an adapter of its own for each."""
BLOCKS = (("base",), ("adapters-32", "adapters-128"), ("static",))
"""Kinds that are measured close to each other in time, by every server in turn."""
CONCURRENCY = {"static": (8, 32)}
CONCURRENCY_ELSE = (1, 8, 32)


class Load(Struct, frozen=True):
    kind: str
    concurrency: int

    @property
    def name(self) -> str:
        return f"{self.kind}/c{self.concurrency}"

    def seed(self, round: int) -> int:
        """Of its requests. Every server gets the same ones, and none gets a prompt twice: it might
        remember it, and not all can be told not to."""
        return crc32(f"{self.name} {round}".encode())


def loads_of(kind: str) -> Iterator[Load]:
    for concurrency in CONCURRENCY.get(kind, CONCURRENCY_ELSE):
        yield Load(kind, concurrency)


def select(names: Iterable[str]) -> list[Load]:
    """The loads that are named by their kind, `base`, or alone, `base/c8`, in the order in which
    they are measured. Raises ValueError for a name that fits none."""
    every = [load for kind in KINDS for load in loads_of(kind)]
    wanted = set(names)
    if unknown := wanted - set(KINDS) - {load.name for load in every}:
        raise ValueError(
            f"no load {sorted(unknown)[0]!r}; there is {', '.join(load.name for load in every)}"
        )
    return [load for load in every if load.kind in wanted or load.name in wanted]
