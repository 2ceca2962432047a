"""The loops behind `cpu`, compiled by Numba.

Elements of the pool are float32, or bfloat16 read as uint16 and widened; everything else is
float32. Sums run over a row in one order that only the row's length decides.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic, overload

TILE_COLUMNS = 4096
"""Of an output: as much as stays in a core's first cache while the rank rows are added to it."""
FAST = {"reassoc", "contract", "nsz"}
"""Lets sums be split over vector lanes; NaN and Inf still come through: callers look for them."""

loop: Callable[[Callable[..., Any]], Callable[..., Any]] = njit(
    fastmath=FAST, parallel=True, nogil=True, cache=True
)


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def _float_of_bits(_context: Any, bits: Any) -> Any:
    def generate(_target: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), generate


def _widen(value: Any) -> Any:
    raise NotImplementedError("compiled only")


@overload(_widen, inline="always")  # type: ignore[untyped-decorator]
def _widen_by_type(value: Any) -> Any:
    def bfloat16(value: Any) -> Any:
        return _float_of_bits(np.uint32(value) << np.uint32(16))

    def float32(value: Any) -> Any:
        return value

    return bfloat16 if value == types.uint16 else float32


@loop
def shrink(
    x_TD: Any,
    pages_NP: Any,
    start_S: Any,
    stop_S: Any,
    first_S: Any,
    rank_S: Any,
    page_X: Any,
    offset_X: Any,
    scale_X: Any,
    out_TR: Any,
) -> None:
    """out[t, r] = scale_r · x_t · A_r for the tokens of each segment."""
    width = x_TD.shape[1]
    for s in prange(len(start_S)):
        for r in range(rank_S[s]):
            entry = first_S[s] + r
            offset = offset_X[entry]
            a_D = pages_NP[page_X[entry], offset : offset + width]
            for t in range(start_S[s], stop_S[s]):
                x_D = x_TD[t]
                total = np.float32(0)
                for d in range(width):
                    total += x_D[d] * _widen(a_D[d])
                out_TR[t, r] = total * scale_X[entry]


@loop
def gather(
    tokens_T: Any,
    pages_NP: Any,
    start_S: Any,
    stop_S: Any,
    first_S: Any,
    rank_S: Any,
    page_X: Any,
    offset_X: Any,
    scale_X: Any,
    out_TR: Any,
) -> None:
    """out[t, r] = scale_r · A_r[token of t] for the tokens of each segment."""
    for s in prange(len(start_S)):
        for r in range(rank_S[s]):
            entry = first_S[s] + r
            page, offset = page_X[entry], offset_X[entry]
            for t in range(start_S[s], stop_S[s]):
                out_TR[t, r] = _widen(pages_NP[page, offset + tokens_T[t]]) * scale_X[entry]


@loop
def expand(
    shrunk_TR: Any,
    pages_NP: Any,
    start_S: Any,
    stop_S: Any,
    first_S: Any,
    rank_S: Any,
    page_X: Any,
    offset_X: Any,
    column_X: Any,
    width_X: Any,
    y_TC: Any,
) -> None:
    """y[t, column:] += shrunk[t, r] · B_r for the tokens of each segment."""
    tiles = (y_TC.shape[1] + TILE_COLUMNS - 1) // TILE_COLUMNS
    for unit in prange(len(start_S) * tiles):
        s, first = unit // tiles, unit % tiles * TILE_COLUMNS
        for r in range(rank_S[s]):
            entry = first_S[s] + rank_S[s] + r
            width = min(width_X[entry] - first, TILE_COLUMNS)
            offset, column = offset_X[entry] + first, column_X[entry] + first
            b_C = pages_NP[page_X[entry], offset : offset + width]
            for t in range(start_S[s], stop_S[s]):
                h = shrunk_TR[t, r]
                y_C = y_TC[t, column : column + width]
                for c in range(width):
                    y_C[c] += h * _widen(b_C[c])


@loop
def decode_attention(
    q_THE: Any,
    pool: Any,
    layer_offset: int,
    page_stride: int,
    block_tokens: int,
    kv_heads: int,
    row_S: Any,
    context_S: Any,
    first_S: Any,
    page_Y: Any,
    scale: Any,
    window: int,
    out_THE: Any,
) -> None:
    """Attention of one query row over the whole context of its sequence, softmax in two passes."""
    group, width = q_THE.shape[1] // kv_heads, q_THE.shape[2]
    values_offset = block_tokens * kv_heads * width
    for unit in prange(len(row_S) * kv_heads):
        s, kv_head = unit // kv_heads, unit % kv_heads
        context, row = context_S[s], row_S[s]
        first = max(0, context - window)
        scores = np.empty((group, context), dtype=np.float32)
        largest = np.full(group, -np.inf, dtype=np.float32)
        for position in range(first, context):
            page = page_Y[first_S[s] + position // block_tokens]
            slot = (position % block_tokens) * kv_heads + kv_head
            base = layer_offset + page * page_stride + slot * width
            key = pool[base : base + width]
            for g in range(group):
                q = q_THE[row, kv_head * group + g]
                total = np.float32(0)
                for e in range(width):
                    total += q[e] * _widen(key[e])
                score = total * scale
                scores[g, position] = score
                # not max(): a NaN must come through
                if not score <= largest[g]:
                    largest[g] = score
        sums = np.zeros((group, width), dtype=np.float32)
        weights = np.zeros(group, dtype=np.float32)
        for position in range(first, context):
            page = page_Y[first_S[s] + position // block_tokens]
            slot = (position % block_tokens) * kv_heads + kv_head
            base = layer_offset + page * page_stride + values_offset + slot * width
            value = pool[base : base + width]
            for g in range(group):
                weight = np.exp(scores[g, position] - largest[g])
                weights[g] += weight
                for e in range(width):
                    sums[g, e] += weight * _widen(value[e])
        for g in range(group):
            out = out_THE[row, kv_head * group + g]
            for e in range(width):
                out[e] = sums[g, e] / weights[g]
