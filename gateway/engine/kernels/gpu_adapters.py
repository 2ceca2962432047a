"""The work of the LoRA kernels: an adapter's row table, and tiles of a batch's tokens.

A row table stays on the device as long as its adapter stays in its pages. It is one run of int64,
so that one pointer leads to everything:

    layers │ layer 0: qkv, o, … head │ layer 1: … │ offset of row 0 │ of row 1 │ …
             └ 8 entries each: rank, first, then start and stop of up to three targets

`first` is where in the table the group's row offsets begin: `rank` rows of A, then as many of Bᵀ.
`start` and `stop` are a target's share of the rank. Offsets count elements from the pool's start.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gateway.engine.kernels.gpu_spans import numbered
from gateway.engine.kernels.gpu_upload import NO_ROWS, Table, WorkList, lists_in, packed, upload
from gateway.engine.kernels.segments import LoraSegment
from gateway.engine.memory.rows import ALIGNMENT, GROUPS, RowLayout

TILE_TOKENS = 16
TILE_RANKS = 16
TILE_COLUMNS = 128

GROUP_INDEX = {group: index for index, group in enumerate(GROUPS)}
GROUP_ENTRIES = 8
ITEM_ENTRIES = 7
TILE_ENTRIES = 4


class Columns(NamedTuple):
    """Columns `start:stop` of a group's fused output belong to its target number `slot`."""

    slot: int
    start: int
    stop: int


class AdapterTable(NamedTuple):
    entries: Tensor
    scales: Tensor
    """float32, as long as `entries`: of use beside the offset of a row of A."""
    row: tuple[int, ...]
    """Addresses of both, then for each group the largest rank that any layer has in it."""
    columns: tuple[frozenset[Columns], ...]
    """For each group the targets that any layer has in it."""
    aligned: tuple[bool, ...]
    """Whether all rows and columns of a group begin and end at multiples of ALIGNMENT. The
    model's widths decide that and not the adapter, so each model compiles once."""


class GroupWork(NamedTuple):
    """Work of one group of targets."""

    shrink: WorkList
    """(I, 7): addresses of the adapter's table and of its scales, first token, tokens, where
    their part of the rank intermediate begins and how long its rows are, first rank row."""
    expand: WorkList
    """The same, once for all rank rows."""
    tiles: Tensor
    """(tiles of columns, 4): slot of the target, its first column, its width, first column of the
    tile within the target."""
    elements: int
    """Of the rank intermediate: each token has as many as its own adapter's rank."""
    aligned: bool


class GroupTables(NamedTuple):
    """`GroupWork` on the host, as far as it depends on the batch."""

    shrink: Table
    expand: Table
    elements: int


class BatchAdapters:
    """The adapters of one batch as one table: a row for each segment."""

    def __init__(self, segments: Sequence[LoraSegment], pages_NP: Tensor) -> None:
        self._tables = [adapter_table(segment, pages_NP) for segment in segments]
        rows = [
            (*table.row, segment.start, segment.stop)
            for segment, table in zip(segments, self._tables, strict=True)
        ]
        self._rows = np.array(rows, dtype=np.int64).reshape(len(rows), len(GROUPS) + 4)

    def aligned(self, group: str) -> bool:
        return all(table.aligned[GROUP_INDEX[group]] for table in self._tables)

    def columns(self, group: str) -> set[Columns]:
        """The targets that any adapter has in a group."""
        index = GROUP_INDEX[group]
        return set().union(*(table.columns[index] for table in self._tables))

    def cut(self, group: str) -> GroupTables:
        """Tiles of tokens of each adapter that has this group."""
        rank_S = self._rows[:, 2 + GROUP_INDEX[group]]
        if not rank_S.any():  # as embeddings mostly
            return GroupTables(NO_ROWS, NO_ROWS, 0)
        # the longest first, so that the short ones fill the gaps at the end
        order = np.argsort(-rank_S, kind="stable")[: np.count_nonzero(rank_S)]
        rank, (start, stop) = rank_S[order], self._rows[order, -2:].T
        of_tile, tile = numbered(-(-(stop - start) // TILE_TOKENS))
        rank, first = rank[of_tile], start[of_tile] + tile * TILE_TOKENS
        tokens = np.minimum(TILE_TOKENS, stop[of_tile] - first)
        elements = tokens * rank
        to, all_rows = np.cumsum(elements) - elements, np.zeros_like(rank)
        addresses = self._rows[order[of_tile], :2]
        expand = np.column_stack((addresses, first, tokens, to, rank, all_rows))
        of_item, rank_tile = numbered(-(-rank // TILE_RANKS))
        shrink = expand[of_item]
        shrink[:, -1] = rank_tile * TILE_RANKS
        return GroupTables(shrink, expand, int(elements.sum()))


class Segments:
    """What one batch's segments become, once for all layers (see `Work.derive`)."""

    def __init__(self, segments: Sequence[LoraSegment]) -> None:
        self._segments = segments
        self._adapters: BatchAdapters | None = None
        self._work: dict[str, GroupWork] = {}

    def work(self, group: str, pages_NP: Tensor) -> GroupWork:
        if self._adapters is None:
            self._adapters = BatchAdapters(self._segments, pages_NP)
        if group not in self._work:
            tables = self._adapters.cut(group)
            lists = tables.shrink, tables.expand
            columns = self._adapters.columns(group)
            run, tiles = upload([packed(lists), tiles_of(columns)], pages_NP.device)
            shrink, expand = lists_in(run, lists)
            self._work[group] = GroupWork(
                shrink, expand, tiles, tables.elements, self._adapters.aligned(group)
            )
        return self._work[group]


def tiles_of(columns: Iterable[Columns]) -> Table:
    """`GroupWork.tiles` of these targets."""
    return np.array(list(_tiles(columns)), dtype=np.int64).reshape(-1, TILE_ENTRIES)


def _tiles(columns: Iterable[Columns]) -> Iterator[tuple[int, ...]]:
    for slot, start, stop in sorted(columns):
        for column in range(0, stop - start, TILE_COLUMNS):
            yield slot, start, stop - start, column


def adapter_table(segment: LoraSegment, pages_NP: Tensor) -> AdapterTable:
    if "gpu" not in segment.tables:
        segment.tables["gpu"] = _build(
            segment.layout, segment.pages, pages_NP.stride(0), pages_NP.device
        )
    found: AdapterTable = segment.tables["gpu"]
    return found


def _build(
    layout: RowLayout, pages: list[int], page_elements: int, device: torch.device
) -> AdapterTable:
    """On the step loop, so only what depends on the pages is computed here."""
    rows = layout.table
    offsets = np.array(pages, dtype=np.int64)[rows.page_X] * page_elements + rows.offset_X
    layers = len(rows.rank_LG)
    first_offset = 1 + layers * len(GROUPS) * GROUP_ENTRIES
    heads = np.empty((layers, len(GROUPS), GROUP_ENTRIES), dtype=np.int64)
    heads[:, :, 0], heads[:, :, 1] = rows.rank_LG, rows.first_LG + first_offset
    heads[:, :, 2:] = rows.ranks_LGT2.reshape(layers, len(GROUPS), GROUP_ENTRIES - 2)
    no_scales = np.zeros(first_offset, dtype=np.float32)
    entries, scales = upload(
        [
            np.concatenate(([layers], heads, offsets), axis=None, dtype=np.int64),
            np.concatenate((no_scales, rows.scale_X)),
        ],
        device,
    )
    ranks = rows.rank_LG.max(0, initial=0).tolist()
    columns = (
        frozenset(Columns(slot, *item) for slot, item in enumerate(group) if item[0] < item[1])
        for group in rows.columns_GT2.tolist()
    )
    return AdapterTable(
        entries,
        scales,
        (entries.data_ptr(), scales.data_ptr(), *ranks),
        tuple(columns),
        tuple((rows.divisor_G % ALIGNMENT == 0).tolist()),
    )
