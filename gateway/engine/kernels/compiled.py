"""The loops behind `cpu`, compiled by Numba around the vector code of `tiles`.

Arrays are flat. Elements of the pool are float32, or bfloat16 as uint16; everything else is
float32. A row's sums run in one order that only its own length decides: neither the rest of the
batch nor the number of threads changes a bit of it. Nothing here has fast-math: it would leave
the order to the compiler.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, prange

from gateway.engine.kernels.tiles import (
    LANES,
    TILE,
    dots,
    outer,
    silu_times,
    softmax,
    transpose,
)

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
loop: Decorator = njit(parallel=True, nogil=True, cache=True)
piece: Decorator = njit(nogil=True, cache=True)

WIDE = TILE * LANES
"""Columns of a tile of `outer`."""
EXPAND_COLUMNS = 4096
"""Of a work item: one adapter's part of a vocabulary gives work to all threads."""
LINEAR_COLUMNS = 32
"""Of one work item: few enough that threads get equal shares, and that their rows of the weight
stay in the second-level cache."""


@piece
def _dot_rows(
    x: Any,
    x_at: int,
    x_step: int,
    x_rows: int,
    w: Any,
    w_at: Any,
    first: int,
    w_rows: int,
    width: int,
    out: Any,
    out_at: int,
    out_step: int,
) -> None:
    """out[m, n] = x[m] · w[n] for any numbers of rows; those of w begin at w_at[first:]."""
    x_whole, w_whole = x_rows // TILE * TILE, w_rows // TILE * TILE
    for m in range(0, x_whole, TILE):
        at, to = x_at + m * x_step, out_at + m * out_step
        for n in range(0, w_whole, TILE):
            dots(TILE, TILE, x, at, x_step, w, w_at, first + n, width, out, to + n, out_step)
    for m in range(x_rows):
        at, to = x_at + m * x_step, out_at + m * out_step
        if m >= x_whole:
            for n in range(0, w_whole, TILE):
                dots(1, TILE, x, at, x_step, w, w_at, first + n, width, out, to + n, out_step)
        for n in range(w_whole, w_rows):
            dots(1, 1, x, at, x_step, w, w_at, first + n, width, out, to + n, out_step)


@piece
def _add_outer(
    x: Any,
    x_at: int,
    x_step: int,
    rows: int,
    w: Any,
    w_at: Any,
    start: int,
    stop: int,
    width: int,
    out: Any,
    out_at: int,
    out_step: int,
) -> None:
    """out[m, :width] += Σ x[m, k] · w[k, :width]; the rows of w begin at w_at[start:stop], their
    x at x_at."""
    whole = rows // TILE * TILE
    x_at -= start
    for c in range(0, width, WIDE):
        w_c, left = w[c:], width - c
        for m in range(0, whole, TILE):
            outer(TILE, TILE, 1, x, x_at + m * x_step, x_step, w_c, w_at, 0, start, stop, out,
                  out_at + m * out_step + c, out_step, left)  # fmt: skip
        for m in range(whole, rows):
            outer(1, TILE, 1, x, x_at + m * x_step, x_step, w_c, w_at, 0, start, stop, out,
                  out_at + m * out_step + c, out_step, left)  # fmt: skip


@loop
def linear(x: Any, w: Any, bias: Any, rows: int, columns: int, width: int, out: Any) -> None:
    """out[m, n] = x[m] · w[n] + bias[n]; an empty bias is none."""
    for block in prange((columns + LINEAR_COLUMNS - 1) // LINEAR_COLUMNS):
        first = block * LINEAR_COLUMNS
        count = min(LINEAR_COLUMNS, columns - first)
        w_at = np.arange(first, first + count) * width
        _dot_rows(x, 0, width, rows, w, w_at, 0, count, width, out, first, columns)
        if len(bias):
            for m in range(rows):
                for n in range(first, first + count):
                    out[m * columns + n] += bias[n]


@loop
def shrink(
    x: Any,
    width: int,
    pool: Any,
    start_U: Any,
    stop_U: Any,
    first_U: Any,
    rank_U: Any,
    at_X: Any,
    scale_X: Any,
    out_TR: Any,
) -> None:
    """out[t, r] = scale_r · x_t · A_r for the tokens of each unit."""
    step = out_TR.shape[1]
    out = out_TR.reshape(-1)
    for u in prange(len(start_U)):
        start, tokens, rank = start_U[u], stop_U[u] - start_U[u], rank_U[u]
        _dot_rows(
            x, start * width, width, tokens, pool, at_X, first_U[u], rank, width, out,
            start * step, step,
        )  # fmt: skip
        for t in range(start, stop_U[u]):
            for r in range(rank):
                out_TR[t, r] *= scale_X[first_U[u] + r]


@loop
def expand(
    shrunk_TR: Any,
    pool: Any,
    start_U: Any,
    stop_U: Any,
    first_U: Any,
    rank_U: Any,
    at_X: Any,
    column_X: Any,
    width_X: Any,
    y: Any,
    y_width: int,
) -> None:
    """y[t, column:] += shrunk[t, r] · B_r for the tokens of each unit, rank rows in order."""
    step = shrunk_TR.shape[1]
    shrunk = shrunk_TR.reshape(-1)
    tiles = (y_width + EXPAND_COLUMNS - 1) // EXPAND_COLUMNS
    for item in prange(len(start_U) * tiles):
        u, skipped = item // tiles, item % tiles * EXPAND_COLUMNS
        start, tokens, rank = start_U[u], stop_U[u] - start_U[u], rank_U[u]
        first = first_U[u] + rank
        r = 0
        while r < rank:
            column = column_X[first + r]
            stop = r + 1
            while stop < rank and column_X[first + stop] == column:
                stop += 1
            width = min(width_X[first + r] - skipped, EXPAND_COLUMNS)
            if width > 0:
                _add_outer(
                    shrunk, start * step + r, step, tokens, pool[skipped:], at_X, first + r,
                    first + stop, width, y, start * y_width + column + skipped, y_width,
                )  # fmt: skip
            r = stop


@loop
def attention(
    q: Any,
    heads: int,
    head_dim: int,
    pool: Any,
    layer_offset: int,
    page_stride: int,
    block_tokens: int,
    kv_heads: int,
    row_U: Any,
    tokens_U: Any,
    position_U: Any,
    first_page_U: Any,
    kv_head_U: Any,
    page_Y: Any,
    scale: Any,
    window: int,
    out: Any,
) -> None:
    """Attention of a few tokens of a sequence that follow one another, with the query heads of one
    KV head. Softmax in two passes; each row counts its keys from position 0, whatever its tile."""
    group = heads // kv_heads
    values = pool[block_tokens * kv_heads * head_dim :]
    padded_dim = (head_dim + LANES - 1) // LANES * LANES
    for u in prange(len(row_U)):
        tokens, position = tokens_U[u], position_U[u]
        rows = tokens * group
        q_at = row_U[u] * heads * head_dim + kv_head_U[u] * group * head_dim
        scaled = np.empty(rows * head_dim, dtype=np.float32)
        for m in range(rows):
            at = q_at + m // group * heads * head_dim + m % group * head_dim
            for e in range(head_dim):
                scaled[m * head_dim + e] = q[at + e] * scale

        # keys from `first` up to the last token's own; the first that any token sees is `seen`
        stop = position + tokens
        seen = max(0, position - window + 1)
        first = seen // LANES * LANES
        count = stop - first
        padded = (count + LANES - 1) // LANES * LANES
        key_at = np.empty(padded, dtype=np.int64)
        page, slot = seen // block_tokens, seen % block_tokens
        for key in range(seen, stop):
            key_at[key - first] = (
                layer_offset
                + page_Y[first_page_U[u] + page] * page_stride
                + (slot * kv_heads + kv_head_U[u]) * head_dim
            )
            slot += 1
            if slot == block_tokens:
                page, slot = page + 1, 0
        # what fills the vectors up is computed, but never looked at
        key_at[: seen - first] = key_at[seen - first]
        key_at[count:] = key_at[count - 1]

        scores = np.empty(rows * padded, dtype=np.float32)
        turned = np.empty(padded_dim * WIDE, dtype=np.float32)
        whole = rows // TILE * TILE
        for key in range(0, padded, WIDE):
            left = padded - key
            for k in range(0, min(WIDE, left), LANES):
                transpose(pool, key_at, key + k, head_dim, turned, k, WIDE)
            for m in range(0, whole, TILE):
                outer(TILE, TILE, 0, scaled, m * head_dim, head_dim, turned, 0, WIDE, 0, head_dim,
                      scores, m * padded + key, padded, left)  # fmt: skip
            for m in range(whole, rows):
                outer(1, TILE, 0, scaled, m * head_dim, head_dim, turned, 0, WIDE, 0, head_dim,
                      scores, m * padded + key, padded, left)  # fmt: skip

        denominators = np.empty(rows, dtype=np.float32)
        for m in range(rows):
            own = position + m // group
            low, high = max(0, own - window + 1) - first, own + 1 - first
            denominators[m] = softmax(scores, m * padded, low, high)
            scores[m * padded + seen - first : m * padded + low] = 0
            scores[m * padded + high : m * padded + count] = 0
        sums = np.zeros(rows * head_dim, dtype=np.float32)
        _add_outer(scores, seen - first, padded, rows, values, key_at, seen - first, count,
                   head_dim, sums, 0, head_dim)  # fmt: skip
        for m in range(rows):
            at = q_at + m // group * heads * head_dim + m % group * head_dim
            for e in range(head_dim):
                out[at + e] = sums[m * head_dim + e] / denominators[m]


@loop
def silu_times_up(x: Any, rows: int, width: int, out: Any) -> None:
    """out[t] = silu(x[t, :width]) · x[t, width:]."""
    for t in prange(rows):
        silu_times(x, 2 * t * width, (2 * t + 1) * width, width, out, t * width)
