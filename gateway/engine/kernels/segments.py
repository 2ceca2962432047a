"""The work lists that the attention and LoRA kernels walk. Built once per iteration."""

from typing import NamedTuple

from torch import Tensor

from gateway.engine.memory.rows import RowLayout


class AttentionSpan(NamedTuple):
    """Tokens `start:stop` of the batch belong to one sequence, the last ones of its context."""

    start: int
    stop: int
    context: int
    """Tokens of the sequence whose KV is in its pages, this span's included."""
    pages: Tensor
    """int64: the sequence's pages in order, just enough for `context`."""


class LoraSegment(NamedTuple):
    """Tokens `start:stop` of the batch use one adapter."""

    start: int
    stop: int
    layout: RowLayout
    pages: list[int]
    """Where in the pool the adapter's pages lie."""
