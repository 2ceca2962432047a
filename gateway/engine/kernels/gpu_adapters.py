"""The work of the LoRA kernels: an adapter's row table, and tiles of a batch's tokens.

A row table stays on the device as long as its adapter stays in its pages. It is one run of int64,
so that one pointer leads to everything:

    layers │ layer 0: qkv, o, … head │ layer 1: … │ offset of row 0 │ of row 1 │ …
             └ 8 entries each: rank, first, then start and stop of up to three targets

`first` is where in the table the group's row offsets begin: `rank` rows of A, then as many of Bᵀ.
`start` and `stop` are a target's share of the rank. Offsets count elements from the pool's start.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gateway.engine.kernels.gpu_upload import table, upload
from gateway.engine.kernels.segments import LoraSegment
from gateway.engine.memory.rows import ALIGNMENT, GROUPS, GroupRows, RowLayout

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
    rank_max: Mapping[str, int]
    """The largest rank that any layer has in a group; a group without targets is absent."""
    columns: Mapping[str, frozenset[Columns]]
    """The targets that any layer has in a group."""
    aligned: Mapping[str, bool]
    """Whether all rows and columns of a group begin and end at multiples of ALIGNMENT. The
    model's widths decide that and not the adapter, so each model compiles once."""


class GroupWork(NamedTuple):
    """Work of one group of targets."""

    shrink: Tensor
    """(I, 7): addresses of the adapter's table and of its scales, first token, tokens, where
    their part of the rank intermediate begins and how long its rows are, first rank row."""
    expand: Tensor
    """The same, once for all rank rows."""
    tiles: Tensor
    """(tiles of columns, 4): slot of the target, its first column, its width, first column of the
    tile within the target."""
    elements: int
    """Of the rank intermediate: each token has as many as its own adapter's rank."""
    aligned: bool


class Segments:
    """What one batch's segments become, once for all layers (see `Work.derive`)."""

    def __init__(self, segments: Sequence[LoraSegment]) -> None:
        self._segments = segments
        self._work: dict[str, GroupWork] = {}

    def work(self, group: str, pages_NP: Tensor) -> GroupWork:
        if group not in self._work:
            self._work[group] = _group_work(self._segments, group, pages_NP)
        return self._work[group]


def _group_work(segments: Sequence[LoraSegment], group: str, pages_NP: Tensor) -> GroupWork:
    adapted = [
        (segment, adapter)
        for segment in segments
        if group in (adapter := _adapter_table(segment, pages_NP)).rank_max
    ]
    # the longest first, so that the short ones fill the gaps at the end
    adapted.sort(key=lambda item: -item[1].rank_max[group])
    expand: list[tuple[int, ...]] = []
    elements = 0
    for segment, adapter in adapted:
        rank = adapter.rank_max[group]
        addresses = adapter.entries.data_ptr(), adapter.scales.data_ptr()
        for start in range(segment.start, segment.stop, TILE_TOKENS):
            tokens = min(TILE_TOKENS, segment.stop - start)
            expand.append((*addresses, start, tokens, elements, rank, 0))
            elements += tokens * rank
    shrink = [(*item[:-1], row) for item in expand for row in range(0, item[-2], TILE_RANKS)]
    columns: set[Columns] = set().union(*(adapter.columns[group] for _, adapter in adapted))
    tables = [
        table(shrink, ITEM_ENTRIES),
        table(expand, ITEM_ENTRIES),
        table(_tiles(columns), TILE_ENTRIES),
    ]
    shrink_items, expand_items, tiles = upload(tables, pages_NP.device)
    aligned = all(adapter.aligned[group] for _, adapter in adapted)
    return GroupWork(shrink_items, expand_items, tiles, elements, aligned)


def _tiles(columns: set[Columns]) -> Iterator[tuple[int, ...]]:
    for slot, start, stop in sorted(columns):
        for column in range(0, stop - start, TILE_COLUMNS):
            yield slot, start, stop - start, column


def _adapter_table(segment: LoraSegment, pages_NP: Tensor) -> AdapterTable:
    if "gpu" not in segment.tables:
        segment.tables["gpu"] = _build(
            segment.layout, segment.pages, pages_NP.stride(0), pages_NP.device
        )
    found: AdapterTable = segment.tables["gpu"]
    return found


def _build(
    layout: RowLayout, pages: list[int], page_elements: int, device: torch.device
) -> AdapterTable:
    rows = layout.table
    offsets = np.array(pages, dtype=np.int64)[rows.page_X] * page_elements + rows.offset_X
    layers = len(rows.rank_LG)
    first_offset = 1 + layers * len(GROUPS) * GROUP_ENTRIES
    heads = np.zeros((layers, len(GROUPS), GROUP_ENTRIES), dtype=np.int64)
    heads[:, :, 0], heads[:, :, 1] = rows.rank_LG, rows.first_LG + first_offset
    columns: dict[str, set[Columns]] = {}
    aligned: dict[str, bool] = {}
    for (layer, group), found in layout.groups.items():
        head, seen = heads[layer, GROUP_INDEX[group]], columns.setdefault(group, set())
        for part in found.expand:
            slot = GROUPS[group].index(part.target)
            head[2 + 2 * slot : 4 + 2 * slot] = part.ranks.start, part.ranks.stop
            seen.add(Columns(slot, part.columns.start, part.columns.stop))
        aligned[group] = aligned.get(group, True) and _aligned(found, page_elements)
    no_scales = np.zeros(first_offset, dtype=np.float32)
    entries, scales = upload(
        [
            np.concatenate((np.array([layers]), heads.ravel(), offsets)),
            np.concatenate((no_scales, rows.scale_X)),
        ],
        device,
    )
    rank_max = dict(zip(GROUPS, rows.rank_LG.max(0, initial=0).tolist(), strict=True))
    return AdapterTable(
        entries,
        scales,
        {group: rank for group, rank in rank_max.items() if rank},
        {group: frozenset(seen) for group, seen in columns.items()},
        aligned,
    )


def _aligned(rows: GroupRows, page_elements: int) -> bool:
    lengths = [page_elements, rows.shrink.width]
    for part in rows.expand:
        lengths += [part.rows.width, part.columns.start]
    return not any(length % ALIGNMENT for length in lengths)
