"""The work lists that the attention and LoRA kernels walk. Built once per iteration."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from gateway.engine.memory.rows import RowLayout

Item = TypeVar("Item")
Derived = TypeVar("Derived")


class Work(Generic[Item]):
    """A work list of one batch, the same for all layers, and what implementations derive from
    it: tables of offsets, say, that are built once and not once a layer."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._items = items
        self._derived: dict[Callable[..., Any], Any] = {}

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def derive(self, build: Callable[[Sequence[Item]], Derived]) -> Derived:
        """`build(items)`, called at most once for this batch."""
        if build not in self._derived:
            self._derived[build] = build(self._items)
        derived: Derived = self._derived[build]
        return derived


class FixedWork(Work[Item]):
    """A work list of whatever batch it is filled with, for launches that are recorded once. Its
    items are known to what was derived from them beforehand (by `build`), and to nobody else."""

    def __init__(self, items_max: int, derived: Mapping[Callable[..., Any], object]) -> None:
        super().__init__([])
        self._items_max = items_max
        self._derived.update(derived)

    def __len__(self) -> int:
        """Items that there can be."""
        return self._items_max

    def derive(self, build: Callable[[Sequence[Item]], Derived]) -> Derived:
        assert build in self._derived, f"{build} can't be recorded"
        return super().derive(build)


class AttentionSpan(NamedTuple):
    """Tokens `start:stop` of the batch belong to one sequence, the last ones of its context."""

    start: int
    stop: int
    context: int
    """Tokens of the sequence whose KV is in its pages, this span's included."""
    pages: Tensor
    """int64: the sequence's pages in order, just enough for `context`."""


@dataclass(frozen=True, slots=True)
class LoraSegment:
    """Tokens `start:stop` of the batch use one adapter."""

    start: int
    stop: int
    layout: RowLayout
    pages: list[int]
    """Where in the pool the adapter's pages lie."""
    tables: dict[str, Any] = field(default_factory=dict)
    """What implementations derive from layout and pages, kept while the adapter stays in them."""
