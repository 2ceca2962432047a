"""The ops of a forward pass on a CPU, for one item of work each; `compiled_step` strings them
together.

A row's sums run in one order that only its own length decides: neither the rest of the batch nor
the number of threads changes a bit of it. Nothing here has fast-math: it would leave the order to
the compiler. Adapters and KV are read where they lie in the pool: no gather, no padding to the
largest rank.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from gateway.engine.kernels.compiling import piece
from gateway.engine.kernels.emitter import LANES
from gateway.engine.kernels.tiles import (
    PANEL,
    PANEL_ROWS,
    TILE,
    added,
    copied,
    dots,
    element,
    outer,
    product,
    rotated,
    scaled,
    silu_times,
    softmax,
    sum_of_squares,
)

WIDE = TILE * LANES
"""Columns of a tile of `outer`."""
GROUPS_COUNT = 6
QKV, OUT, GATE_UP, DOWN, EMBED, HEAD = map(np.int64, range(GROUPS_COUNT))
"""Groups of targets that read the same input, in the order of memory.rows.GROUPS; not taken from
there, as what is compiled is kept by what stands in this folder. Not plain integers: for each of
those Numba would compile what is called with it anew."""


@piece
def row_step(x: Any, width: int) -> int:
    """How far rows of x lie apart: 16-bit ones are made of pairs."""
    per_step: int = 4 // x.itemsize
    return (width + per_step - 1) // per_step * per_step


@piece
def multiply_panel(
    x: Any, x_step: int, rows: int, panels: Any, at: int, panel: int, columns: int, out: Any
) -> None:  # fmt: skip
    """out[:rows, columns of the panel] = x · panel; the matrix begins at `at`."""
    steps = x_step * x.itemsize // 4
    w_at = at + panel * x_step * PANEL
    first = panel * PANEL
    m = 0
    while m + PANEL_ROWS <= rows:
        product(PANEL_ROWS, x, m * x_step, x_step, panels, w_at, steps, out, m * columns + first,
                columns, columns - first)  # fmt: skip
        m += PANEL_ROWS
    if PANEL_ROWS > 4 and m + 4 <= rows:
        product(4, x, m * x_step, x_step, panels, w_at, steps, out, m * columns + first,
                columns, columns - first)  # fmt: skip
        m += 4
    if PANEL_ROWS > 2 and m + 2 <= rows:
        product(2, x, m * x_step, x_step, panels, w_at, steps, out, m * columns + first,
                columns, columns - first)  # fmt: skip
        m += 2
    if m < rows:
        product(1, x, m * x_step, x_step, panels, w_at, steps, out, m * columns + first,
                columns, columns - first)  # fmt: skip


@piece
def embed_row(head: Any, embed: Any, token: int, width: int, out: Any, at: int) -> None:
    """The embedding of a token; out of the packed output embeddings where `embed` is empty."""
    if len(embed):
        copied(embed, token * width, width, out, at)
        return
    per_step = 4 // head.itemsize
    lane = token // PANEL * PANEL * row_step(head, width) + token % PANEL * per_step
    for k in range(width):
        out[at + k] = element(head, lane + k // per_step * PANEL * per_step + k % per_step)


@piece
def norm_row(
    x: Any, at: int, width: int, weight: Any, weight_at: int, eps: Any, out: Any, out_at: int
) -> None:
    """See reference.rms_norm."""
    mean = sum_of_squares(x, at, width) / np.float32(width)
    scaled(x, at, width, np.float32(1) / np.sqrt(mean + eps), weight, weight_at, out, out_at)


@piece
def rotate_and_store(model: Any, pool: Any, layer: int, row: int, tokens: Any, y: Any, q: Any) -> (
    None
):  # fmt: skip
    """Bias, norms of heads and rotary embedding of one token; its q to `q`, k and v to the pool."""
    dim, heads, kv_heads = model.head_dim, model.heads, model.kv_heads
    columns = (heads + 2 * kv_heads) * dim
    at = row * columns
    if len(model.qkv_bias_LN):
        added(y, at, model.qkv_bias_LN, layer * columns, columns, y, at)
    turn_at, group = tokens.position_T[row] * dim, heads // kv_heads
    for head in range(heads):
        head_at = at + head * dim
        if len(model.q_norm_LE):
            norm_row(y, head_at, dim, model.q_norm_LE, layer * dim, model.eps, y, head_at)
        q_row = (head // group * len(tokens.token_T) + row) * group + head % group
        rotated(y, head_at, dim // 2, model.turn_PE, turn_at, q, q_row * dim)
    slot = tokens.position_T[row] % pool.block_tokens
    of_kind = pool.block_tokens * kv_heads * dim
    key_at = tokens.page_T[row] * pool.page + 2 * layer * of_kind + slot * kv_heads * dim
    for head in range(kv_heads):
        head_at = at + (heads + head) * dim
        if len(model.k_norm_LE):
            norm_row(y, head_at, dim, model.k_norm_LE, layer * dim, model.eps, y, head_at)
        rotated(y, head_at, dim // 2, model.turn_PE, turn_at, pool.elements, key_at + head * dim)
    value_at = at + (heads + kv_heads) * dim
    copied(y, value_at, kv_heads * dim, pool.elements, key_at + of_kind)


@piece
def attend(model: Any, pool: Any, layer: int, tiles: Any, a: int, q: Any, out: Any, step: int) -> (
    None
):  # fmt: skip
    """Unit `a`, over keys and values of all its pages. Softmax in two passes; each row counts its
    keys from position 0, whatever its tile."""
    head_dim, block_tokens, kv_heads = model.head_dim, pool.block_tokens, model.kv_heads
    group = model.heads // kv_heads
    kv_head = tiles.kv_head_A[a]
    of_kind = block_tokens * kv_heads * head_dim
    keys_at = 2 * layer * of_kind + kv_head * head_dim
    values = pool.elements[of_kind:]
    tokens, position = tiles.tokens_A[a], tiles.position_A[a]
    rows = tokens * group

    # keys from `first` up to the last token's own; the first that any token sees is `seen`
    stop = position + tokens
    seen = max(0, position - model.window + 1)
    first = seen // LANES * LANES
    count = stop - first
    padded = (count + LANES - 1) // LANES * LANES
    key_at = np.empty(padded, dtype=np.int64)
    page, slot = seen // block_tokens, seen % block_tokens
    for key in range(seen, stop):
        of_page = tiles.page_Y[tiles.first_page_A[a] + page] * pool.page
        key_at[key - first] = of_page + keys_at + slot * kv_heads * head_dim
        slot += 1
        if slot == block_tokens:
            page, slot = page + 1, 0
    # what fills the tiles up is computed, but never looked at
    key_at[: seen - first] = key_at[seen - first]
    key_at[count:] = key_at[count - 1]

    floats = np.empty(rows * (padded + head_dim + 1), dtype=np.float32)
    scores, totals = floats[: rows * padded], floats[rows * padded : rows * (padded + 1)]
    sums = floats[rows * (padded + 1) :]
    q_at = (kv_head * tiles.rows + tiles.row_A[a]) * group * head_dim
    _dot_rows(q, q_at, head_dim, rows, pool.elements, key_at, 0, padded, head_dim, scores, 0,
              padded)  # fmt: skip
    for m in range(rows):
        own = position + m // group
        low, high = max(0, own - model.window + 1) - first, own + 1 - first
        totals[m] = softmax(scores, m * padded, low, high, model.scale)
        scores[m * padded + seen - first : m * padded + low] = 0
        scores[m * padded + high : m * padded + count] = 0
    sums[:] = 0
    _add_outer(scores, seen - first, padded, rows, values, key_at, seen - first, count,
               head_dim, sums, 0, head_dim)  # fmt: skip
    for m in range(rows):
        for e in range(head_dim):
            sums[m * head_dim + e] /= totals[m]
        of_row = (tiles.row_A[a] + m // group) * step
        copied(sums, m * head_dim, head_dim, out,
               of_row + (kv_head * group + m % group) * head_dim)  # fmt: skip


@piece
def shrink(
    pool: Any, layer: int, group: int, units: Any, u: int, first: int, count: int,
    x: Any, x_step: int, width: int, out: Any,
) -> None:  # fmt: skip
    """out[t, r] = scale_r · x_t · A_r for the tokens of unit `u` and the ranks [first:first+count]
    of its adapter; fewer where it has fewer."""
    entry, rank = _rows(units, units.segment_U[u], layer, group)
    if first >= rank:
        return
    table = units.table_G7[units.segment_U[u]]
    count = min(count, rank - first)
    start, tokens = units.start_U[u], units.stop_U[u] - units.start_U[u]
    out_at = start * units.rank_max + first
    _dot_rows(x, start * x_step, x_step, tokens, pool.elements, _integers(table[0]),
              entry + first, count, width, out, out_at, units.rank_max)  # fmt: skip
    scale = _floats(table[1])
    for t in range(tokens):
        for r in range(count):
            out[out_at + t * units.rank_max + r] *= scale[entry + first + r]


@piece
def gather(pool: Any, units: Any, u: int, tokens: Any, out: Any) -> None:
    """`shrink` of the input embeddings: the input is a token, out[t, r] = scale_r · A_r[token]."""
    entry, rank = _rows(units, units.segment_U[u], 0, EMBED)
    if rank == 0:
        return
    table = units.table_G7[units.segment_U[u]]
    at, scale = _integers(table[0]), _floats(table[1])
    for t in range(units.start_U[u], units.stop_U[u]):
        for r in range(rank):
            value = element(pool.elements, at[entry + r] + tokens.token_T[t])
            out[t * units.rank_max + r] = value * scale[entry + r]


@piece
def expand(
    pool: Any, layer: int, group: int, units: Any, u: int, low: int, high: int,
    shrunk: Any, y: Any, columns: int,
) -> None:  # fmt: skip
    """y[t, low:high] += shrunk[t, r] · B_r for the tokens of unit `u`, rank rows in order."""
    first, rank = _rows(units, units.segment_U[u], layer, group)
    if rank == 0:
        return
    table = units.table_G7[units.segment_U[u]]
    at, column, width = _integers(table[0]), _integers(table[2]), _integers(table[3])
    start, tokens = units.start_U[u], units.stop_U[u] - units.start_U[u]
    first += rank
    r = 0
    while r < rank:
        begin = column[first + r]
        stop = r + 1
        while stop < rank and column[first + stop] == begin:
            stop += 1
        skipped, end = max(low - begin, 0), min(high - begin, width[first + r])
        if skipped < end:
            _add_outer(
                shrunk, start * units.rank_max + r, units.rank_max, tokens,
                pool.elements[skipped:], at, first + r, first + stop, end - skipped,
                y, start * columns + begin + skipped, columns,
            )  # fmt: skip
        r = stop


@piece
def activate(y: Any, row: int, inner: int, low: int, high: int, out: Any, step: int) -> None:
    """Columns [low, high) of silu(gate) · up of one token."""
    at = row * 2 * inner + low
    silu_times(y, at, at + inner, high - low, out, row * step + low)


@piece
def _rows(units: Any, segment: int, layer: int, group: int) -> Any:
    """Entry of the first row of A, and the rank, 0 where the adapter leaves the group alone."""
    if segment < 0:
        return 0, 0
    table = units.table_G7[segment]
    if layer >= table[6]:
        return 0, 0
    place = layer * GROUPS_COUNT + group
    return _integers(table[4])[place], _integers(table[5])[place]


def _dot_tile(rows: int) -> Any:
    """out[m, n] = x[m] · w[n]; the `count` rows of w begin at w_at[first:]."""

    @piece
    def dot(
        x: Any, x_at: int, x_step: int, w: Any, w_at: Any, first: int, count: int, width: int,
        out: Any, out_at: int, out_step: int,
    ) -> None:  # fmt: skip
        whole = count // TILE * TILE
        for n in range(0, whole, TILE):
            dots(rows, TILE, x, x_at, x_step, w, w_at, first + n, width, out, out_at + n, out_step)
        for n in range(whole, count):
            dots(rows, 1, x, x_at, x_step, w, w_at, first + n, width, out, out_at + n, out_step)

    return dot


def _outer_tile(rows: int) -> Any:
    """out[m, :width] += Σ x[m, k] · w[k, :width]; the rows of w begin at w_at[start:stop], their x
    at x_at."""

    @piece
    def add(
        x: Any, x_at: int, x_step: int, w: Any, w_at: Any, start: int, stop: int, width: int,
        out: Any, out_at: int, out_step: int,
    ) -> None:  # fmt: skip
        for c in range(0, width, WIDE):
            outer(rows, TILE, 1, x, x_at - start, x_step, w[c:], w_at, 0, start, stop, out,
                  out_at + c, out_step, width - c)  # fmt: skip

    return add


def _in_tiles(tile: Callable[[int], Any]) -> Any:
    """What `tile(rows)` does for up to four rows of x and out, for any number of them; `last` is
    its `count` or `stop`."""
    one, two, three, four = map(tile, range(1, 5))

    @piece
    def every(
        x: Any, x_at: int, x_step: int, rows: int, w: Any, w_at: Any, start: int, last: int,
        width: int, out: Any, out_at: int, out_step: int,
    ) -> None:  # fmt: skip
        while rows >= 4:
            four(x, x_at, x_step, w, w_at, start, last, width, out, out_at, out_step)
            x_at, out_at, rows = x_at + 4 * x_step, out_at + 4 * out_step, rows - 4
        if rows == 3:
            three(x, x_at, x_step, w, w_at, start, last, width, out, out_at, out_step)
        elif rows == 2:
            two(x, x_at, x_step, w, w_at, start, last, width, out, out_at, out_step)
        elif rows == 1:
            one(x, x_at, x_step, w, w_at, start, last, width, out, out_at, out_step)

    return every


_dot_rows, _add_outer = _in_tiles(_dot_tile), _in_tiles(_outer_tile)


@piece
def _integers(address: int) -> Any:
    return carray(_int_pointer(address), (2**40,))


@piece
def _floats(address: int) -> Any:
    return carray(_float_pointer(address), (2**40,))


def _pointer_to(kind: Any) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]  # numba has no types
    def pointer(_typing: Any, address: Any) -> tuple[Any, Callable[..., Any]]:
        result = types.CPointer(kind)

        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(result))

        return result(address), generate

    return pointer


_int_pointer, _float_pointer = _pointer_to(types.int64), _pointer_to(types.float32)
