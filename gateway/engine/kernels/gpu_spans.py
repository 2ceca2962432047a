"""The work of the attention kernels: tiles of tokens and the splits of the keys they see."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gateway.engine.kernels.gpu_upload import Table, WorkList, lists_in, packed, upload
from gateway.engine.kernels.segments import AttentionSpan

TILE_ENTRIES = 4
ITEM_ENTRIES = 5
MERGE_ENTRIES = 5


class Tiling(NamedTuple):
    """How the tokens and the keys of a span are cut. Keys are cut at multiples of `split_keys`
    from the start of the sequence, whatever part of it a batch computes."""

    tokens: int
    split_keys: int


class SpanWork(NamedTuple):
    """Work of the spans that are cut in the same way."""

    items: WorkList
    """(I, 5): first token of a tile, its tokens, position of the first, where the sequence's
    pages begin in the list of pages, split. The items of a tile follow one another."""
    merges: WorkList
    """(T, 5): token, its tile's first item less its first split, first and last split (exclusive),
    row of the token in its tile."""


class AttentionWork(NamedTuple):
    pages: Tensor
    """The pages of all sequences, one sequence after another."""
    prefill: SpanWork
    decode: SpanWork


class Spans:
    """What one batch's spans become, once for all layers (see `Work.derive`)."""

    def __init__(self, spans: Sequence[AttentionSpan]) -> None:
        self._spans = spans
        self._work: dict[tuple[int | None, Tiling, Tiling], AttentionWork] = {}

    def work(self, window: int | None, prefill: Tiling, decode: Tiling) -> AttentionWork:
        """Spans of one token are decoded, longer ones prefilled."""
        key = window, prefill, decode
        if key not in self._work:
            self._work[key] = _attention_work(self._spans, *key)
        return self._work[key]


def _attention_work(
    spans: Sequence[AttentionSpan], window: int | None, prefill: Tiling, decode: Tiling
) -> AttentionWork:
    first_pages = np.cumsum([0, *(len(span.pages) for span in spans)]).tolist()
    located = list(zip(spans, first_pages, strict=False))
    prefills = [(span, page) for span, page in located if span.stop - span.start > 1]
    decodes = [(span, page) for span, page in located if span.stop - span.start == 1]
    tables = [
        *cut(_tiles(prefills, prefill.tokens), window, prefill.split_keys),
        *cut(_tiles(decodes, decode.tokens), window, decode.split_keys),
    ]
    (run,) = upload([packed(tables)], spans[0].pages.device)
    lists = lists_in(run, tables)
    return AttentionWork(
        torch.cat([span.pages for span in spans]),
        SpanWork(*lists[:2]),
        SpanWork(*lists[2:]),
    )


def _tiles(located: list[tuple[AttentionSpan, int]], tile_tokens: int) -> Table:
    """int64 (tiles, 4): the entries of an item but its split."""
    tiles = [
        (start, min(tile_tokens, span.stop - start), span.context - span.stop + start, page)
        for span, page in located
        for start in range(span.start, span.stop, tile_tokens)
    ]
    return np.array(tiles, dtype=np.int64).reshape(-1, TILE_ENTRIES)


def cut(tiles: Table, window: int | None, split_keys: int) -> tuple[Table, Table]:
    """The items and the merges of these tiles."""
    start, tokens, position, _ = tiles.T
    seen = np.maximum(0, position - window + 1) if window is not None else np.zeros_like(position)
    first_split = seen // split_keys
    splits = -(-(position + tokens) // split_keys) - first_split
    of_item, split = numbered(splits)
    items = np.column_stack((tiles[of_item], first_split[of_item] + split))
    base = np.cumsum(splits) - splits - first_split
    of_token, row = numbered(tokens)
    by_tile = np.column_stack((base, first_split, first_split + splits))
    merges = np.column_stack((start[of_token] + row, by_tile[of_token], row))
    return items, merges


def numbered(counts: Table) -> tuple[Table, Table]:
    """Of each of `counts[i]` things its i, and its number among them."""
    of = np.repeat(np.arange(len(counts)), counts)
    return of, np.arange(len(of)) - (np.cumsum(counts) - counts)[of]
