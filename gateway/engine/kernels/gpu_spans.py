"""The work of the attention kernels: tiles of tokens and the splits of the keys they see."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from gateway.engine.kernels.gpu_upload import Table, table, upload
from gateway.engine.kernels.segments import AttentionSpan

ITEM_ENTRIES = 5
MERGE_ENTRIES = 5


class Tiling(NamedTuple):
    """How the tokens and the keys of a span are cut. Keys are cut at multiples of `split_keys`
    from the start of the sequence, whatever part of it a batch computes."""

    tokens: int
    split_keys: int


class SpanWork(NamedTuple):
    """Work of the spans that are cut in the same way."""

    items: Tensor
    """(I, 5): first token of a tile, its tokens, position of the first, where the sequence's
    pages begin in the list of pages, split. The items of a tile follow one another."""
    merges: Tensor
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
    tables = [*_cut(prefills, window, prefill), *_cut(decodes, window, decode)]
    uploaded = upload(tables, spans[0].pages.device)
    return AttentionWork(
        torch.cat([span.pages for span in spans]),
        SpanWork(*uploaded[:2]),
        SpanWork(*uploaded[2:]),
    )


def _cut(
    located: list[tuple[AttentionSpan, int]], window: int | None, tiling: Tiling
) -> tuple[Table, Table]:
    items: list[tuple[int, ...]] = []
    merges: list[tuple[int, ...]] = []
    for span, page in located:
        for start in range(span.start, span.stop, tiling.tokens):
            tokens = min(tiling.tokens, span.stop - start)
            position = span.context - span.stop + start
            seen = 0 if window is None else max(0, position - window + 1)
            stop = triton.cdiv(position + tokens, tiling.split_keys)
            splits = range(seen // tiling.split_keys, stop)
            base = len(items) - splits.start
            merges += [(start + row, base, splits.start, splits.stop, row) for row in range(tokens)]
            items += [(start, tokens, position, page, split) for split in splits]
    return table(items, ITEM_ENTRIES), table(merges, MERGE_ENTRIES)
