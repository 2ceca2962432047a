"""The tables of a decoding batch at a fixed place, for launches that are recorded once.

A recorded launch keeps its grid, its pointers and its sizes. So a batch of any sequences, adapters,
ranks and lengths becomes one run of int64, always at the same place:

    tokens │ positions │ pages │ slots │ heads of the lists │ rows of the lists …
    └ as many as the largest batch has ┘ └ how many rows, and where they lie: `WorkList.head`

The kernels walk as many rows as a head says and look nowhere else, so that what a larger batch has
left behind is never read. Rows of padding are in no list and write no KV (their page is -1).
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gateway.engine.kernels.gpu_adapters import ITEM_ENTRIES as LORA_ENTRIES
from gateway.engine.kernels.gpu_adapters import (
    TILE_RANKS,
    BatchAdapters,
    Columns,
    GroupWork,
    Segments,
    tiles_of,
)
from gateway.engine.kernels.gpu_spans import (
    ITEM_ENTRIES,
    MERGE_ENTRIES,
    AttentionWork,
    Spans,
    SpanWork,
    Tiling,
    cut,
)
from gateway.engine.kernels.gpu_upload import (
    HEAD_ENTRIES,
    NO_ROWS,
    Table,
    WorkList,
    packed,
    staged,
)
from gateway.engine.kernels.segments import AttentionSpan, FixedWork, LoraSegment
from gateway.engine.memory.rows import ALIGNMENT, GROUPS

PAGE_LIST, ITEMS, MERGES, GROUP_LISTS = 0, 1, 2, 3
LISTS = GROUP_LISTS + 2 * len(GROUPS)

NOWHERE = -1
"""Page of a row of padding."""
RANKS_PER_TOKEN = 1024
"""Ranks of a group's targets together that a batch may have per token. On average, so that a
large adapter among small ones is no matter."""
ITEMS_AT_LEAST = 512
ITEMS_PER_TOKEN = 8
"""Attention items of a batch: one for each split of the keys. Their sums take memory beside the
pool, so there is room for one long context, or for moderate ones in all rows."""


class Step(NamedTuple):
    """Static inputs of a batch of one token per sequence. All int64 (T,)."""

    tokens_T: Tensor
    positions_T: Tensor
    page_T: Tensor
    slot_T: Tensor


class Decode(NamedTuple):
    """The newest token of a sequence."""

    token: int
    position: int
    pages: list[int]
    """Of the sequence, just enough for the position."""


class FixedTables:
    """`rows_max`: sequences of the largest batch."""

    def __init__(
        self,
        pages_NP: Tensor,
        block_tokens: int,
        projections: Mapping[str, tuple[int, int]],
        rows_max: int,
        context_tokens: int,
    ) -> None:
        self._pages_NP = pages_NP
        self._block_tokens = block_tokens
        self._context_tokens = context_tokens
        self._stride = rows_max + rows_max % 2  # keeps every tensor at a multiple of 16 bytes
        self._lists = len(Step._fields) * self._stride
        self._run = torch.zeros(
            self._lists + self._lists_entries(rows_max), dtype=torch.int64, device=pages_NP.device
        )
        self.step(rows_max).page_T.fill_(NOWHERE)
        self._tiles = {
            group: torch.from_numpy(tiles_of(_columns(group, projections))).to(pages_NP.device)
            for group in GROUPS
        }
        # of all targets, hence of those that an adapter has
        self._aligned = {
            group: not any(
                width % ALIGNMENT
                for target in targets
                for width in (*projections[target], pages_NP.stride(0))
            )
            for group, targets in GROUPS.items()
        }
        self._cut: tuple[int | None, int] | None = None
        """Window and keys of a split, as the kernels ask for them."""

    # --- places ---------------------------------------------------------------------------------

    def step(self, rows: int) -> Step:
        starts = range(0, self._lists, self._stride)
        return Step(*(self._run[start : start + rows] for start in starts))

    def spans(self, rows: int) -> FixedWork[AttentionSpan]:
        return FixedWork(rows, {Spans: _FixedSpans(self, rows)})

    def lora(self, rows: int) -> FixedWork[LoraSegment]:
        return FixedWork(rows, {Segments: _FixedSegments(self, rows)})

    def attention_work(self, rows: int, window: int | None, decode: Tiling) -> AttentionWork:
        self._cut = window, decode.split_keys
        decodes = SpanWork(self._list(ITEMS, self._items_max(rows)), self._list(MERGES, rows))
        nothing = self._run[:0]
        prefills = SpanWork(WorkList(nothing, 0), WorkList(nothing, 0))
        return AttentionWork(self._run[self._lists :], prefills, decodes)

    def group_work(self, rows: int, group: str) -> GroupWork:
        shrink, expand = _lists_of(group)
        elements = rows * RANKS_PER_TOKEN
        return GroupWork(
            self._list(shrink, _shrink_items_max(rows)),
            self._list(expand, rows),
            self._tiles[group],
            elements,
            self._aligned[group],
        )

    def _list(self, index: int, rows_max: int) -> WorkList:
        at = self._lists + HEAD_ENTRIES * index
        return WorkList(self._run[at : at + HEAD_ENTRIES], rows_max, exact=False)

    # --- bounds ---------------------------------------------------------------------------------

    def _items_max(self, rows: int) -> int:
        return ITEMS_AT_LEAST + ITEMS_PER_TOKEN * rows

    def _lists_entries(self, rows: int) -> int:
        pages = rows * -(-self._context_tokens // self._block_tokens)
        attention = ITEM_ENTRIES * self._items_max(rows) + MERGE_ENTRIES * rows
        lora = LORA_ENTRIES * len(GROUPS) * (_shrink_items_max(rows) + rows)
        return HEAD_ENTRIES * LISTS + pages + attention + lora

    # --- batches --------------------------------------------------------------------------------

    def fill(self, rows: int, decodes: Sequence[Decode], segments: Sequence[LoraSegment]) -> bool:
        """Put a batch where launches recorded for `rows` rows find it, in one copy. False if it
        has more work than they have room for; then nothing has changed."""
        assert len(decodes) <= rows, f"{len(decodes)} sequences for {rows} rows"
        lists = list(self._attention_tables(decodes))
        if len(lists[ITEMS]) > self._items_max(rows):
            return False
        if segments:
            adapters = BatchAdapters(segments, self._pages_NP)
            groups = [adapters.cut(group) for group in GROUPS]
            if any(tables.elements > rows * RANKS_PER_TOKEN for tables in groups):
                return False
            lists += chain.from_iterable((tables.shrink, tables.expand) for tables in groups)
        else:
            lists += [NO_ROWS] * (2 * len(GROUPS))
        run = np.concatenate((self._step_tables(decodes), packed(lists)), axis=None)
        there = staged(run.nbytes, self._run.device).view(torch.int64)
        there.numpy()[:] = run
        self._run[: len(run)].copy_(there, non_blocking=True)
        return True

    def _step_tables(self, decodes: Sequence[Decode]) -> Table:
        step = np.zeros((len(Step._fields), self._stride), dtype=np.int64)
        step[Step._fields.index("page_T")] = NOWHERE
        step[:, : len(decodes)] = np.array(
            [
                (token, position, pages[-1], position % self._block_tokens)
                for token, position, pages in decodes
            ],
            dtype=np.int64,
        ).T
        return step

    def _attention_tables(self, decodes: Sequence[Decode]) -> Iterator[Table]:
        assert self._cut is not None, "attention has not been recorded"
        # counted from the heads, as the list of pages is
        first_pages = accumulate(
            (len(item.pages) for item in decodes), initial=HEAD_ENTRIES * LISTS
        )
        tiles = [
            (row, 1, item.position, first_page)
            for row, (item, first_page) in enumerate(zip(decodes, first_pages, strict=False))
        ]
        pages = list(chain.from_iterable(item.pages for item in decodes))
        yield np.array(pages, dtype=np.int64)[:, None]
        yield from cut(np.array(tiles, dtype=np.int64), *self._cut)


class _FixedSpans(NamedTuple):
    """In place of `Spans`."""

    tables: FixedTables
    rows: int

    def work(self, window: int | None, prefill: Tiling, decode: Tiling) -> AttentionWork:
        return self.tables.attention_work(self.rows, window, decode)


class _FixedSegments(NamedTuple):
    """In place of `Segments`."""

    tables: FixedTables
    rows: int

    def work(self, group: str, pages_NP: Tensor) -> GroupWork:
        return self.tables.group_work(self.rows, group)


def _shrink_items_max(rows: int) -> int:
    """A token's ranks fill tiles, but the last one."""
    return rows * (RANKS_PER_TOKEN // TILE_RANKS + 1)


def _lists_of(group: str) -> tuple[int, int]:
    first = GROUP_LISTS + 2 * list(GROUPS).index(group)
    return first, first + 1


def _columns(group: str, projections: Mapping[str, tuple[int, int]]) -> Iterator[Columns]:
    start = 0
    for slot, target in enumerate(GROUPS[group]):
        stop = start + projections[target][0]
        yield Columns(slot, start, stop)
        start = stop
