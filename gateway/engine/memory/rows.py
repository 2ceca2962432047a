"""Where each rank row of an adapter lies: the layout of its pages.

An adapter's matrices are stored as *rank rows*. Rank row r of a target module is A[r]
(in_features elements) and, elsewhere, column r of B (out_features elements): B is kept
transposed, so any rank packs tightly. Rows follow one another in an adapter's own sequence of
pages; a row never straddles two pages. Nothing is padded to a largest rank (S-LoRA, section 4,
stores one row per KV cell, which breaks where KV rows and adapter rows differ in length).

Targets that read the same input share one shrink pass, so their A rows lie together:

    group qkv, layer 0:   A: q0 q1 … k0 k1 … v0 v1 …   B: q0 q1 …   k0 k1 …   v0 v1 …

The embeddings, of which a model has one at each end, count as targets of layer 0.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

GROUPS: dict[str, tuple[str, ...]] = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
    "embed": ("embed_tokens",),
    "head": ("lm_head",),
}
IntArray = np.ndarray[Any, np.dtype[np.int64]]
FloatArray = np.ndarray[Any, np.dtype[np.float32]]
TARGETS = tuple(target for targets in GROUPS.values() for target in targets)
ALIGNMENT = 16
"""Elements; a matrix begins at a multiple of it, so that rows which are such multiples long can be
read in wide pieces, whatever lies before them."""


class RowLayoutError(ValueError):
    """A row is longer than a page, so this adapter can't be stored in this pool."""


class Run(NamedTuple):
    """Consecutive rows within one page."""

    page: int
    """Index into the adapter's own pages, not into the pool."""
    offset: int
    """Elements from the start of the page."""
    rows: int


class Rows(NamedTuple):
    """One stored matrix of `sum(run.rows)` rows of `width` elements."""

    width: int
    runs: tuple[Run, ...]


class Expand(NamedTuple):
    """Bᵀ of one target: which part of the rank intermediate it reads, which columns it adds to."""

    target: str
    ranks: slice
    columns: slice
    rows: Rows


class GroupRows(NamedTuple):
    """All rank rows of one layer's group of targets."""

    rank: int
    """Sum of the ranks of the group's targets."""
    scales: tuple[float, ...]
    """One scale per rank row; it multiplies the rank intermediate."""
    shrink: Rows
    expand: tuple[Expand, ...]


class RowTable(NamedTuple):
    """The same layout as flat arrays, for kernels that walk single rows.

    Of each (layer, group) first its `rank` rows of A lie one after another, then as many of Bᵀ:

        entry   first … first+rank      …first+2·rank
                A rows, `scale`         Bᵀ rows, `column` and `width`
    """

    first_LG: IntArray
    """int64 (layers, groups): entry of the first A row, groups in the order of GROUPS."""
    rank_LG: IntArray
    """int64 (layers, groups); 0 where the adapter leaves the group alone."""
    page_X: IntArray
    """int64: index into the adapter's own pages."""
    offset_X: IntArray
    """int64: elements from the start of the page."""
    scale_X: FloatArray
    """float32."""
    column_X: IntArray
    """int64: first column of the group's fused output that the row adds to."""
    width_X: IntArray
    """int64: elements of the row."""
    ranks_LGT2: IntArray
    """int64 (layers, groups, targets, 2): each target's share of its group's rank, from and to;
    the same twice where the target is not adapted."""
    columns_GT2: IntArray
    """int64 (groups, targets, 2): columns of each target that any layer adapts, in the same way."""
    divisor_G: IntArray
    """int64 (groups,): the largest number that divides the page and each width and first column of
    the group's rows. Where it is a multiple of ALIGNMENT, so are all offsets and columns."""


class TargetRank(NamedTuple):
    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Layout of one adapter in pages of `page_elements` elements."""

    pages: int
    groups: Mapping[tuple[int, str], GroupRows]
    """By (layer, group); a group without adapted targets is absent."""
    elements: int
    """Elements that carry weights; the rest of the pages is unused."""
    table: RowTable

    @classmethod
    def plan(
        cls,
        ranks: Mapping[tuple[int, str], TargetRank],
        projections: Mapping[str, tuple[int, int]],
        page_elements: int,
    ) -> "RowLayout":
        """Lay out an adapter with these ranks by (layer, target).

        `projections` gives (out_features, in_features) of every target. Raises RowLayoutError.
        """
        cursor = _Cursor(page_elements)
        groups: dict[tuple[int, str], GroupRows] = {}
        for layer in sorted({layer for layer, _ in ranks}):
            for group, targets in GROUPS.items():
                if any((layer, target) in ranks for target in targets):
                    present = list(_present(ranks, projections, layer, group))
                    groups[layer, group] = _group(present, projections, cursor)
        return cls(cursor.pages, groups, cursor.elements, _table(groups, page_elements))


class _Present(NamedTuple):
    target: str
    rank: int
    scale: float
    columns: slice


class _Cursor:
    """Hands out space row by row."""

    def __init__(self, page_elements: int) -> None:
        self._page_elements = page_elements
        self._page = 0
        self._offset = 0
        self.elements = 0

    @property
    def pages(self) -> int:
        return self._page + (self._offset > 0)

    def rows(self, count: int, width: int) -> Rows:
        if width > self._page_elements:
            raise RowLayoutError(
                f"a row of {width} elements does not fit a page of {self._page_elements}; "
                f"raise engine.block_tokens {-(-width // self._page_elements)}-fold"
            )
        runs: list[Run] = []
        self.elements += count * width
        aligned = -(-self._offset // ALIGNMENT) * ALIGNMENT
        self._offset = min(aligned, self._page_elements)
        while count:
            fitting = min(count, (self._page_elements - self._offset) // width)
            if fitting:
                runs.append(Run(self._page, self._offset, fitting))
                self._offset += fitting * width
                count -= fitting
            else:
                self._page, self._offset = self._page + 1, 0
        return Rows(width, tuple(runs))


def _present(
    ranks: Mapping[tuple[int, str], TargetRank],
    projections: Mapping[str, tuple[int, int]],
    layer: int,
    group: str,
) -> Iterator[_Present]:
    column = 0
    for target in GROUPS[group]:
        width = projections[target][0]
        if (layer, target) in ranks:
            rank, scale = ranks[layer, target]
            yield _Present(target, rank, scale, slice(column, column + width))
        column += width


def _group(
    present: list[_Present], projections: Mapping[str, tuple[int, int]], cursor: _Cursor
) -> GroupRows:
    rank = sum(item.rank for item in present)
    shrink = cursor.rows(rank, projections[present[0].target][1])
    expand, row = [], 0
    for item in present:
        rows = cursor.rows(item.rank, projections[item.target][0])
        expand.append(Expand(item.target, slice(row, row + item.rank), item.columns, rows))
        row += item.rank
    scales = tuple(item.scale for item in present for _ in range(item.rank))
    return GroupRows(rank, scales, shrink, tuple(expand))


def _table(groups: Mapping[tuple[int, str], GroupRows], page_elements: int) -> RowTable:
    layers = 1 + max((layer for layer, _ in groups), default=-1)
    first_LG = np.zeros((layers, len(GROUPS)), dtype=np.int64)
    rank_LG = np.zeros_like(first_LG)
    page: list[int] = []
    offset: list[int] = []
    scale: list[float] = []
    column: list[int] = []
    width: list[int] = []
    targets_max = max(len(targets) for targets in GROUPS.values())
    ranks_LGT2 = np.zeros((*first_LG.shape, targets_max, 2), dtype=np.int64)
    columns_GT2 = np.zeros(ranks_LGT2.shape[1:], dtype=np.int64)
    divisor_G = np.full(len(GROUPS), page_elements, dtype=np.int64)
    for (layer, group), rows in groups.items():
        place = layer, list(GROUPS).index(group)
        for expand in rows.expand:
            slot = GROUPS[group].index(expand.target)
            ranks_LGT2[*place, slot] = expand.ranks.start, expand.ranks.stop
            columns_GT2[place[1], slot] = expand.columns.start, expand.columns.stop
        first_LG[place], rank_LG[place] = len(page), rows.rank
        scale += [*rows.scales, *(0.0 for _ in rows.scales)]
        parts = [(rows.shrink, 0), *((part.rows, part.columns.start) for part in rows.expand)]
        for part, start in parts:
            divisor_G[place[1]] = math.gcd(divisor_G[place[1]], part.width, start)
            for run in part.runs:
                page += [run.page] * run.rows
                offset += range(run.offset, run.offset + run.rows * part.width, part.width)
                column += [start] * run.rows
                width += [part.width] * run.rows
    integers = (np.array(values, dtype=np.int64) for values in (page, offset, column, width))
    page_X, offset_X, column_X, width_X = integers
    return RowTable(
        first_LG,
        rank_LG,
        page_X,
        offset_X,
        np.array(scale, dtype=np.float32),
        column_X,
        width_X,
        ranks_LGT2,
        columns_GT2,
        divisor_G,
    )
