"""The least that a step can cost: bytes that must come from memory once, products to be computed.

The benchmarks' adapters have one rank on all seven projections.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch

from gateway.engine.memory.rows import GROUPS
from gateway.engine.messages import ModelInfo
from gateway.engine.scheduling.plan import Slice


class Machine(NamedTuple):
    bandwidth: float
    """Bytes per second."""
    rate: float
    """Floating-point operations per second."""


class Use(NamedTuple):
    """Of one adapter by the tokens of a batch."""

    rank: int
    tokens: int


class Load(NamedTuple):
    """What a batch computes."""

    tokens: int
    samples: int
    keys: float
    """Tokens whose KV is read: the contexts of all sequences."""
    pairs: float
    """Of a token and one it attends to."""
    uses: Sequence[Use] = ()
    """One per distinct adapter."""

    @property
    def decodes(self) -> bool:
        return self.tokens == self.samples


@dataclass(frozen=True, slots=True)
class Cost:
    bytes: float = 0
    flops: float = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.bytes + other.bytes, self.flops + other.flops)

    def seconds(self, machine: Machine) -> float:
        """Computing and reading can go on at the same time."""
        return max(self.bytes / machine.bandwidth, self.flops / machine.rate)


def decoding(sequences: int, context: float, ranks: Iterable[int] = ()) -> Load:
    """Sequences of so many tokens each decode, over adapters of these ranks in turn."""
    ranks = list(ranks)[:sequences]
    uses = []
    for index, rank in enumerate(ranks):
        tokens = len(range(index, sequences, len(ranks)))
        uses.append(Use(rank, tokens))
    return Load(sequences, sequences, sequences * context, sequences * context, uses)


def planned(slices: Sequence[Slice]) -> Load:
    """What an iteration is about to compute, each adapter's slices side by side."""
    tokens = keys = 0
    pairs = 0.0
    for sequence, length in slices:
        tokens += length
        keys += sequence.computed + length
        pairs += length * (sequence.computed + (length + 1) / 2)
    samples = sum(item.samples for item in slices)
    uses = []
    for digest, group in groupby(slices, key=lambda item: item.sequence.digest):
        members = list(group)
        adapter = members[0].sequence.adapter
        if digest is not None and adapter is not None:
            rank = adapter.layout.groups[0, "o"].rank
            uses.append(Use(rank, sum(item.length for item in members)))
    return Load(tokens, samples, keys, pairs, uses)


def products(info: ModelInfo) -> dict[str, tuple[int, int]]:
    """(columns, width) of a layer's matrices as the forward pass has them, fused by input."""
    shapes = {}
    for group in ("qkv", "o", "gate_up", "down"):
        targets = [info.projections[target] for target in GROUPS[group]]
        shapes[group] = sum(columns for columns, _ in targets), targets[0][1]
    return shapes


def stages(info: ModelInfo, load: Load) -> dict[str, Cost]:
    """By stage of the forward pass; what is absent handles the step's own activations only.

    A group's shrink runs with its product, its expand with the stage that follows.
    """
    follows = {"qkv": "rotate", "o": "add", "gate_up": "activate", "down": "add"}
    element: int = getattr(torch, info.dtype).itemsize
    found = {name: Cost() for name in (*follows, *follows.values())}
    for group, (columns, width) in products(info).items():
        parts = len(GROUPS[group])
        found[group] += _product(columns, width, load.tokens, element)
        for use in load.uses:
            # each target has an A of its own, and a B over its own columns
            found[group] += _product(parts * use.rank, width, use.tokens, element)
            found[follows[group]] += _product(columns, use.rank, use.tokens, element)
    heads, kv_heads = info.projections["q_proj"][0], info.projections["k_proj"][0]
    found["attend"] = Cost(2 * kv_heads * load.keys * element, 4 * heads * load.pairs)
    of_layers = {
        name: Cost(info.layers * cost.bytes, info.layers * cost.flops)
        for name, cost in found.items()
    }
    head = _product(info.vocab_size, info.hidden_size, load.samples, element)
    return of_layers | {"head": head}


def step(info: ModelInfo, load: Load) -> Cost:
    """Of the whole forward pass."""
    return sum(stages(info, load).values(), Cost())


def adapter_bytes(info: ModelInfo, load: Load) -> float:
    """Of the distinct adapters of the batch."""
    return step(info, load).bytes - step(info, load._replace(uses=())).bytes


def _product(columns: int, width: int, rows: int, element: int) -> Cost:
    return Cost(columns * width * element, 2 * columns * width * rows)
