"""CPU twins of the reference ops: straight from the pool, no gather, no copy, no padding.

Numba compiles them on this machine at start and keeps them on disk, so no compiler is needed. Each
row is computed by itself in a fixed order, so its bits do not depend on the rest of the batch.
Long runs of tokens (prefill) go to the reference's matrix products, which are faster there.

T tokens of the batch · D input width · C output columns · R rank rows · N pages · P page elements
B block tokens · H query heads · K KV heads · E head dimension · S segments or spans
X entries of a row table, Y pages of all spans
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gateway.engine.kernels import compiled, reference
from gateway.engine.kernels.reference import rms_norm, rotate, write_kv
from gateway.engine.kernels.segments import AttentionSpan, LoraSegment, Work
from gateway.engine.memory.rows import GROUPS

__all__ = [
    "lora_expand",
    "lora_gather",
    "lora_shrink",
    "paged_attention",
    "rms_norm",
    "rotate",
    "write_kv",
]

Array = np.ndarray[Any, Any]
GROUP_INDEX = {group: index for index, group in enumerate(GROUPS)}
LONG_TOKENS = 32
"""From here on a matrix product is faster than walking the rows (measured on AVX-512)."""


class _Spans(NamedTuple):
    """Decodes, one row each, for the compiled kernel; and the rest."""

    row_S: Array
    context_S: Array
    first_S: Array
    """Where the span's pages begin in `page_Y`."""
    page_Y: Array
    prefills: list[AttentionSpan]


def paged_attention(
    q_THE: Tensor,
    cache_N2BKE: Tensor,
    spans: Work[AttentionSpan],
    scale: float,
    window: int | None,
) -> Tensor:
    """See reference.paged_attention."""
    if q_THE.dtype not in _READABLE:
        return reference.paged_attention(q_THE, cache_N2BKE, spans, scale, window)
    work = spans.derive(_split_spans)
    out_THE = torch.empty_like(q_THE)
    for span in work.prefills:
        reference.attend(q_THE, cache_N2BKE, span, scale, window, out_THE)
    if len(work.row_S):
        out = out_THE if out_THE.dtype == torch.float32 else torch.empty_like(out_THE).float()
        pool, offset, page_stride = _flat(cache_N2BKE)
        compiled.decode_attention(
            q_THE.float().numpy(),
            pool,
            offset,
            page_stride,
            cache_N2BKE.shape[2],
            cache_N2BKE.shape[3],
            work.row_S,
            work.context_S,
            work.first_S,
            work.page_Y,
            np.float32(scale),
            window or 2**62,
            out.numpy(),
        )
        if out is not out_THE:
            rows = torch.from_numpy(work.row_S)
            out_THE[rows] = out[rows].to(out_THE.dtype)
    return out_THE


def _split_spans(spans: Sequence[AttentionSpan]) -> _Spans:
    decodes = [span for span in spans if span.stop - span.start == 1]
    pages = [span.pages.numpy() for span in decodes]
    lengths = [len(page) for page in pages]
    return _Spans(
        np.array([span.start for span in decodes], dtype=np.int64),
        np.array([span.context for span in decodes], dtype=np.int64),
        np.cumsum([0, *lengths[:-1]], dtype=np.int64),
        np.concatenate(pages) if pages else np.zeros(0, dtype=np.int64),
        [span for span in spans if span.stop - span.start > 1],
    )


class _Rows(NamedTuple):
    """Short segments, for the compiled kernel: the row tables of their adapters, end to end."""

    start_S: Array
    stop_S: Array
    first_LGS: Array
    rank_LGS: Array
    page_X: Array
    """Pages of the pool."""
    offset_X: Array
    scale_X: Array
    column_X: Array
    width_X: Array
    rank_max: int


class _Segments(NamedTuple):
    short: _Rows | None
    long: Work[LoraSegment]


class _Shrunk(NamedTuple):
    """What shrink leaves for expand."""

    short_TR: Array
    long: list[Tensor | None]


def lora_shrink(
    x_TD: Tensor, pages_NP: Tensor, segments: Work[LoraSegment], layer: int, group: str
) -> _Shrunk:
    """See reference.lora_shrink."""
    work = segments.derive(_split_segments)
    long = reference.lora_shrink(x_TD, pages_NP, work.long, layer, group)
    rows = work.short
    if rows is None:
        return _Shrunk(_NOTHING, long)
    short_TR = np.empty((len(x_TD), rows.rank_max), dtype=np.float32)
    if layer < len(rows.first_LGS):
        place = layer, GROUP_INDEX[group]
        compiled.shrink(
            x_TD.float().numpy(),
            _readable(pages_NP),
            rows.start_S,
            rows.stop_S,
            rows.first_LGS[place],
            rows.rank_LGS[place],
            rows.page_X,
            rows.offset_X,
            rows.scale_X,
            short_TR,
        )
    return _Shrunk(short_TR, long)


def lora_gather(
    tokens_T: Tensor, pages_NP: Tensor, segments: Work[LoraSegment], layer: int, group: str
) -> _Shrunk:
    """See reference.lora_gather."""
    work = segments.derive(_split_segments)
    long = reference.lora_gather(tokens_T, pages_NP, work.long, layer, group)
    rows = work.short
    if rows is None:
        return _Shrunk(_NOTHING, long)
    short_TR = np.empty((len(tokens_T), rows.rank_max), dtype=np.float32)
    if layer < len(rows.first_LGS):
        place = layer, GROUP_INDEX[group]
        compiled.gather(
            tokens_T.numpy(),
            _readable(pages_NP),
            rows.start_S,
            rows.stop_S,
            rows.first_LGS[place],
            rows.rank_LGS[place],
            rows.page_X,
            rows.offset_X,
            rows.scale_X,
            short_TR,
        )
    return _Shrunk(short_TR, long)


def lora_expand(
    shrunk: _Shrunk,
    pages_NP: Tensor,
    segments: Work[LoraSegment],
    layer: int,
    group: str,
    y_TC: Tensor,
) -> None:
    """See reference.lora_expand."""
    work = segments.derive(_split_segments)
    reference.lora_expand(shrunk.long, pages_NP, work.long, layer, group, y_TC)
    rows = work.short
    if rows is None or layer >= len(rows.first_LGS):
        return
    place = layer, GROUP_INDEX[group]
    sum_TC = y_TC if y_TC.dtype == torch.float32 else torch.zeros(y_TC.shape)
    compiled.expand(
        shrunk.short_TR,
        _readable(pages_NP),
        rows.start_S,
        rows.stop_S,
        rows.first_LGS[place],
        rows.rank_LGS[place],
        rows.page_X,
        rows.offset_X,
        rows.column_X,
        rows.width_X,
        sum_TC.numpy(),
    )
    if sum_TC is not y_TC:
        y_TC += sum_TC.to(y_TC.dtype)


def _split_segments(segments: Sequence[LoraSegment]) -> _Segments:
    short = [item for item in segments if item.stop - item.start < LONG_TOKENS]
    long = [item for item in segments if item.stop - item.start >= LONG_TOKENS]
    return _Segments(_rows(short) if short else None, Work(long))


def _rows(segments: list[LoraSegment]) -> _Rows:
    tables = [item.layout.table for item in segments]
    entries = np.cumsum([0, *(len(table.page_X) for table in tables[:-1])])
    layers = max(len(table.first_LG) for table in tables)
    first_LGS = np.zeros((layers, len(GROUPS), len(tables)), dtype=np.int64)
    rank_LGS = np.zeros_like(first_LGS)
    for s, (table, start) in enumerate(zip(tables, entries, strict=True)):
        first_LGS[: len(table.first_LG), :, s] = table.first_LG + start
        rank_LGS[: len(table.rank_LG), :, s] = table.rank_LG
    return _Rows(
        np.array([item.start for item in segments], dtype=np.int64),
        np.array([item.stop for item in segments], dtype=np.int64),
        first_LGS,
        rank_LGS,
        np.concatenate([np.array(item.pages)[item.layout.table.page_X] for item in segments]),
        np.concatenate([table.offset_X for table in tables]),
        np.concatenate([table.scale_X for table in tables]),
        np.concatenate([table.column_X for table in tables]),
        np.concatenate([table.width_X for table in tables]),
        int(rank_LGS.max()),
    )


_NOTHING: Array = np.zeros((0, 0), dtype=np.float32)
_READABLE = (torch.float32, torch.bfloat16)


def _readable(tensor: Tensor) -> Array:
    """The tensor's memory as numpy sees it; bfloat16, which it does not know, as uint16."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    array: Array = tensor.numpy()
    return array


def _flat(cache_N2BKE: Tensor) -> tuple[Array, int, int]:
    """The whole pool as one run of elements, where this layer's part of page 0 begins in it, and
    how far it is from page to page."""
    elements = cache_N2BKE.untyped_storage().nbytes() // cache_N2BKE.element_size()
    flat = torch.as_strided(cache_N2BKE, (elements,), (1,), 0)
    return _readable(flat), int(cache_N2BKE.storage_offset()), cache_N2BKE.stride(0)
