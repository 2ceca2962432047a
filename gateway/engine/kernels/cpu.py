"""CPU twins of the reference ops: straight from the pool, no gather, no copy, no padding.

Numba compiles them on this machine at start and keeps them on disk, so no compiler is needed. Each
row (of tokens, or of heads) is computed by itself in a fixed order, so its bits do not depend on
the rest of the batch, on how a prompt was cut, on pages, nor on the number of threads.

float16 has no twins: its ops are the reference's. The matrix products of 16-bit weights are
torch's; their rows had the same bits for every number of rows from 1 to 512 that was tried, with 1
to 16 threads, and processors with 16-bit instructions are twice as fast there as any float32 code.

T tokens of the batch · D input width · C output columns · R rank rows · N pages · P page elements
B block tokens · H query heads · K KV heads · E head dimension · S segments or spans
U units: tokens of one segment, or of one span with one KV head · X entries of a row table
Y pages of all spans
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gateway.engine.kernels import compiled, reference
from gateway.engine.kernels.reference import rms_norm, rotate, write_kv
from gateway.engine.kernels.segments import AttentionSpan, LoraSegment, Work
from gateway.engine.memory.rows import GROUPS

__all__ = [
    "linear",
    "lora_expand",
    "lora_gather",
    "lora_shrink",
    "paged_attention",
    "rms_norm",
    "rotate",
    "silu_times_up",
    "write_kv",
]

Array = np.ndarray[Any, Any]
GROUP_INDEX = {group: index for index, group in enumerate(GROUPS)}
ATTENTION_ROWS = 32
"""Query rows of a unit: tokens times the query heads of a KV head. They share one pass over keys
and values; their scores stay in the second-level cache up to some thousand tokens of context."""
LORA_TOKENS = 16
"""Tokens of a unit: so few that one long segment gives work to all threads."""


def linear(x_TD: Tensor, weight_CD: Tensor, bias_C: Tensor | None = None) -> Tensor:
    """See reference.linear."""
    if weight_CD.dtype != torch.float32:
        return F.linear(x_TD, weight_CD, bias_C)
    columns, width = weight_CD.shape
    out_TC = torch.empty(len(x_TD), columns)
    bias = _NO_BIAS if bias_C is None else bias_C.numpy()
    compiled.linear(
        _flat(x_TD.contiguous()), _flat(weight_CD), bias, len(x_TD), columns, width, _flat(out_TC)
    )
    return out_TC


def silu_times_up(gate_up_TC: Tensor) -> Tensor:
    """See reference.silu_times_up."""
    if gate_up_TC.dtype not in _READABLE:
        return reference.silu_times_up(gate_up_TC)
    rows, width = len(gate_up_TC), gate_up_TC.shape[1] // 2
    out_TF = torch.empty(rows, width)
    compiled.silu_times_up(_flat(gate_up_TC), rows, width, _flat(out_TF))
    return out_TF.to(gate_up_TC.dtype)


class _Units(NamedTuple):
    """The tiles of all spans, each once for every KV head; the same number of them for every
    thread, costly and cheap ones mixed."""

    row_U: Array
    tokens_U: Array
    position_U: Array
    first_page_U: Array
    """Where the sequence's pages begin in `page_Y`."""
    kv_head_U: Array
    page_Y: Array


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
    _, _, block_tokens, kv_heads, head_dim = cache_N2BKE.shape
    heads = q_THE.shape[1]
    units = spans.derive(AttentionTiles).units(
        kv_heads, max(1, ATTENTION_ROWS // (heads // kv_heads))
    )
    out_THE = torch.empty(q_THE.shape)
    pool, offset, page_stride = _pool(cache_N2BKE)
    compiled.attention(
        _flat(q_THE.float().contiguous()),
        heads,
        head_dim,
        pool,
        offset,
        page_stride,
        block_tokens,
        kv_heads,
        units.row_U,
        units.tokens_U,
        units.position_U,
        units.first_page_U,
        units.kv_head_U,
        units.page_Y,
        np.float32(scale),
        window or 2**62,
        _flat(out_THE),
    )
    return out_THE.to(q_THE.dtype)


class AttentionTiles:
    """What one batch's spans become, once for all layers (see `Work.derive`)."""

    def __init__(self, spans: Sequence[AttentionSpan]) -> None:
        self._spans = spans
        self._units: dict[tuple[int, int], _Units] = {}

    def units(self, kv_heads: int, tokens_max: int) -> _Units:
        key = kv_heads, tokens_max
        if key not in self._units:
            self._units[key] = _cut_spans(self._spans, *key)
        return self._units[key]


def _cut_spans(spans: Sequence[AttentionSpan], kv_heads: int, tokens_max: int) -> _Units:
    pages = [span.pages.numpy() for span in spans]
    first_pages = np.cumsum([0, *(len(page) for page in pages)]).tolist()
    units = [
        (start, min(tokens_max, span.stop - start), span.context - span.stop + start, page, head)
        for span, page in zip(spans, first_pages, strict=False)
        for start in range(span.start, span.stop, tokens_max)
        for head in range(kv_heads)
    ]
    # dealt out by cost, as each thread takes a run of units
    units.sort(key=lambda unit: unit[1] * (unit[1] + unit[2]))
    threads = numba.get_num_threads()
    dealt = [unit for thread in range(threads) for unit in units[thread::threads]]
    row_U, tokens_U, position_U, page_U, head_U = np.array(dealt, dtype=np.int64).T.copy()
    return _Units(row_U, tokens_U, position_U, page_U, head_U, np.concatenate(pages))


class _Rows(NamedTuple):
    """The row tables of the adapters, end to end, and tiles of their tokens."""

    start_U: Array
    stop_U: Array
    first_LGU: Array
    rank_LGU: Array
    at_X: Array
    """Where a row begins in the pool, in elements."""
    scale_X: Array
    column_X: Array
    width_X: Array
    rank_max: int


def lora_shrink(
    x_TD: Tensor, pages_NP: Tensor, segments: Work[LoraSegment], layer: int, group: str
) -> Array | list[Tensor | None]:
    """See reference.lora_shrink. Returns (T, R); tokens without an adapter, and ranks beyond their
    adapter's, have no values."""
    if pages_NP.dtype not in _READABLE:
        return reference.lora_shrink(x_TD, pages_NP, segments, layer, group)
    rows = segments.derive(LoraTiles).rows(pages_NP.shape[1])
    shrunk_TR = np.empty((len(x_TD), rows.rank_max), dtype=np.float32)
    if layer < len(rows.first_LGU):
        place = layer, GROUP_INDEX[group]
        compiled.shrink(
            _flat(x_TD.float().contiguous()),
            x_TD.shape[1],
            _flat(pages_NP),
            rows.start_U,
            rows.stop_U,
            rows.first_LGU[place],
            rows.rank_LGU[place],
            rows.at_X,
            rows.scale_X,
            shrunk_TR,
        )
    return shrunk_TR


def lora_gather(
    tokens_T: Tensor, pages_NP: Tensor, segments: Work[LoraSegment], layer: int, group: str
) -> Array | list[Tensor | None]:
    """See reference.lora_gather. Returns what `lora_shrink` does."""
    if pages_NP.dtype not in _READABLE:
        return reference.lora_gather(tokens_T, pages_NP, segments, layer, group)
    rows = segments.derive(LoraTiles).rows(pages_NP.shape[1])
    gathered_TR = np.empty((len(tokens_T), rows.rank_max), dtype=np.float32)
    if layer >= len(rows.first_LGU):
        return gathered_TR
    pool, tokens, place = _flat(pages_NP), tokens_T.numpy(), (layer, GROUP_INDEX[group])
    units = zip(rows.start_U, rows.stop_U, rows.first_LGU[place], rows.rank_LGU[place], strict=True)
    for start, stop, first, rank in units:
        entries = slice(first, first + rank)
        values = pool[rows.at_X[entries] + tokens[start:stop, None]]
        gathered_TR[start:stop, :rank] = _float32(values) * rows.scale_X[entries]
    return gathered_TR


def lora_expand(
    shrunk_TR: Array | list[Tensor | None],
    pages_NP: Tensor,
    segments: Work[LoraSegment],
    layer: int,
    group: str,
    y_TC: Tensor,
) -> None:
    """See reference.lora_expand."""
    if isinstance(shrunk_TR, list):
        reference.lora_expand(shrunk_TR, pages_NP, segments, layer, group, y_TC)
        return
    rows = segments.derive(LoraTiles).rows(pages_NP.shape[1])
    if layer >= len(rows.first_LGU):
        return
    place = layer, GROUP_INDEX[group]
    sum_TC = y_TC if y_TC.dtype == torch.float32 else torch.zeros(y_TC.shape)
    compiled.expand(
        shrunk_TR,
        _flat(pages_NP),
        rows.start_U,
        rows.stop_U,
        rows.first_LGU[place],
        rows.rank_LGU[place],
        rows.at_X,
        rows.column_X,
        rows.width_X,
        _flat(sum_TC),
        y_TC.shape[1],
    )
    if sum_TC is not y_TC:
        y_TC += sum_TC.to(y_TC.dtype)


class LoraTiles:
    """What one batch's segments become, once for all layers (see `Work.derive`)."""

    def __init__(self, segments: Sequence[LoraSegment]) -> None:
        self._segments = segments
        self._rows: dict[int, _Rows] = {}

    def rows(self, page_elements: int) -> _Rows:
        if page_elements not in self._rows:
            self._rows[page_elements] = _cut_segments(self._segments, page_elements)
        return self._rows[page_elements]


def _cut_segments(segments: Sequence[LoraSegment], page_elements: int) -> _Rows:
    tables = [item.layout.table for item in segments]
    entries = np.cumsum([0, *(len(table.page_X) for table in tables[:-1])])
    layers = max(len(table.first_LG) for table in tables)
    first_LGS = np.zeros((layers, len(GROUPS), len(tables)), dtype=np.int64)
    rank_LGS = np.zeros_like(first_LGS)
    for s, (table, start) in enumerate(zip(tables, entries, strict=True)):
        first_LGS[: len(table.first_LG), :, s] = table.first_LG + start
        rank_LGS[: len(table.rank_LG), :, s] = table.rank_LG
    units = [
        (s, start, min(start + LORA_TOKENS, item.stop))
        for s, item in enumerate(segments)
        for start in range(item.start, item.stop, LORA_TOKENS)
    ]
    segment_U, start_U, stop_U = np.array(units, dtype=np.int64).reshape(-1, 3).T.copy()
    return _Rows(
        start_U,
        stop_U,
        # indexing with an array puts that axis first in memory
        np.ascontiguousarray(first_LGS[:, :, segment_U]),
        np.ascontiguousarray(rank_LGS[:, :, segment_U]),
        np.concatenate(
            [
                np.array(item.pages)[table.page_X] * page_elements + table.offset_X
                for item, table in zip(segments, tables, strict=True)
            ]
        ),
        np.concatenate([table.scale_X for table in tables]),
        np.concatenate([table.column_X for table in tables]),
        np.concatenate([table.width_X for table in tables]),
        int(rank_LGS.max()),
    )


_NO_BIAS: Array = np.zeros(0, dtype=np.float32)
_READABLE = (torch.float32, torch.bfloat16)


def _float32(values: Array) -> Array:
    """Elements of the pool as `_flat` gives them, widened."""
    if values.dtype == np.float32:
        return values
    widened: Array = (values.astype(np.uint32) << 16).view(np.float32)
    return widened


def _flat(tensor: Tensor) -> Array:
    """The contiguous tensor's memory as numpy sees it; bfloat16, which it does not know, as
    uint16."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    assert tensor.is_contiguous(), "a copy would be written to, and lost"
    array: Array = tensor.numpy().reshape(-1)
    return array


def _pool(cache_N2BKE: Tensor) -> tuple[Array, int, int]:
    """The whole pool as one run of elements, where this layer's part of page 0 begins in it, and
    how far it is from page to page."""
    elements = cache_N2BKE.untyped_storage().nbytes() // cache_N2BKE.element_size()
    flat = torch.as_strided(cache_N2BKE, (elements,), (1,), 0)
    return _flat(flat), int(cache_N2BKE.storage_offset()), cache_N2BKE.stride(0)
