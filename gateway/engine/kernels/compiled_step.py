"""The whole forward pass of the Llama family as one compiled function, run by a team of threads.

There is no Python between two products: one call computes all layers, and threads meet only where
an op needs all of the one before. `model.decoder` is the definition; this gives its logits.
"""

from typing import Any

import numpy as np

from gateway.engine.kernels.compiling import entry, piece
from gateway.engine.kernels.pieces import (
    DOWN,
    EMBED,
    GATE_UP,
    HEAD,
    OUT,
    QKV,
    activate,
    attend,
    embed_row,
    expand,
    gather,
    multiply_panel,
    norm_row,
    rotate_and_store,
    row_step,
    shrink,
)
from gateway.engine.kernels.team import done, take, wait
from gateway.engine.kernels.tiles import PANEL, added

STAGES_OF_LAYER = ("qkv", "rotate", "attend", "o", "add", "gate_up", "activate", "down", "add")
STAGES_AFTER = ("norm", "head", "expand head")
RANKS = 16
"""Rank rows of an item."""
COLUMNS = 256
"""Of an item between gate, up and down, at least."""
FIRST, ONE, HEAD_PANELS = np.int64(0), np.int64(1), np.int64(8)
HEAD_COLUMNS = 4096


def stages(layers: int) -> list[str]:
    """What each phase does."""
    return ["start", "embed", *STAGES_OF_LAYER * layers, *STAGES_AFTER]


@entry
def forward(
    claims: Any, model: Any, pool: Any, tokens: Any, units: Any, sampling: Any,
    attention: Any, scratch: Any,
) -> None:  # fmt: skip
    """Computes the batch: its KV goes to the pool, the logits of the sampling tokens to
    scratch.logits_SV."""
    wait(claims, FIRST, FIRST)
    _embed(claims, ONE, model, pool, tokens, units, scratch)
    rows, phase = len(tokens.token_T), np.int64(2)
    hidden, inner, wide = model.hidden, model.inner, model.heads * model.head_dim
    qkv = wide + 2 * model.kv_heads * model.head_dim
    for layer in range(model.layers):
        at = model.panels_at_L4[layer]
        place = layer, QKV
        _multiply(claims, phase, scratch.input_TD, rows, model.panels, at[0], hidden, qkv, ONE,
                  pool, place, units, scratch, scratch.y_TC)  # fmt: skip
        _rotate(claims, phase + 1, model, pool, layer, tokens, units, scratch)
        _attend(claims, phase + 2, model, pool, layer, attention, scratch)
        place = layer, OUT
        _multiply(claims, phase + 3, scratch.attended_TO, rows, model.panels, at[1], wide, hidden,
                  ONE, pool, place, units, scratch, scratch.y_TC)  # fmt: skip
        _add(claims, phase + 4, model, pool, place, units, scratch,
             model.post_norm_LD, layer)  # fmt: skip
        place = layer, GATE_UP
        _multiply(claims, phase + 5, scratch.input_TD, rows, model.panels, at[2], hidden,
                  2 * inner, ONE, pool, place, units, scratch, scratch.y_TC)  # fmt: skip
        _activate(claims, phase + 6, model, pool, layer, units, scratch)
        place = layer, DOWN
        _multiply(claims, phase + 7, scratch.hidden_TF, rows, model.panels, at[3], inner, hidden,
                  ONE, pool, place, units, scratch, scratch.y_TC)  # fmt: skip
        _add(claims, phase + 8, model, pool, place, units, scratch,
             model.input_norm_LD, layer + 1)  # fmt: skip
        phase += len(STAGES_OF_LAYER)
    _norm_last(claims, phase, model, tokens, scratch)
    _multiply(claims, phase + 1, scratch.input_TD, len(tokens.last_S), model.head, FIRST, hidden,
              model.vocabulary, HEAD_PANELS, pool, (FIRST, HEAD), sampling, scratch,
              scratch.logits_SV)  # fmt: skip
    _expand_head(claims, phase + 2, model, pool, sampling, scratch)


@piece
def _embed(
    claims: Any, phase: int, model: Any, pool: Any, tokens: Any, units: Any,
    scratch: Any,
) -> None:  # fmt: skip
    items, width = len(units.start_U), model.hidden
    step = row_step(scratch.input_TD, width)
    u = take(claims, phase)
    while u < items:
        for t in range(units.start_U[u], units.stop_U[u]):
            embed_row(model.head, model.embed_VD, tokens.token_T[t], width, scratch.x_TD, t * width)
        gather(pool, units, u, tokens, scratch.shrunk_TR)
        expand(pool, FIRST, EMBED, units, u, 0, width, scratch.shrunk_TR, scratch.x_TD, width)
        for t in range(units.start_U[u], units.stop_U[u]):
            norm_row(scratch.x_TD, t * width, width, model.input_norm_LD, 0, model.eps,
                     scratch.input_TD, t * step)  # fmt: skip
        done(claims, phase)
        u = take(claims, phase)
    wait(claims, phase, items)


@piece
def _multiply(
    claims: Any, phase: int, x: Any, rows: int, panels: Any, at: int, width: int, columns: int,
    panels_of_item: int, pool: Any, place: Any, units: Any, scratch: Any, out: Any,
) -> None:  # fmt: skip
    """out = x · matrix, and beside it the shrink of the group that reads the same x."""
    layer, group = place
    step = row_step(x, width)
    count = (columns + PANEL - 1) // PANEL
    products = (count + panels_of_item - 1) // panels_of_item
    blocks = (units.rank_max + RANKS - 1) // RANKS
    shrinks = blocks * len(units.start_U)
    items = shrinks + products
    item = take(claims, phase)
    while item < items:
        if item < shrinks:
            shrink(pool, layer, group, units, item // blocks, item % blocks * RANKS,
                   RANKS, x, step, width, scratch.shrunk_TR)  # fmt: skip
        else:
            first = (item - shrinks) * panels_of_item
            for panel in range(first, min(first + panels_of_item, count)):
                multiply_panel(x, step, rows, panels, at, panel, columns, out)
        done(claims, phase)
        item = take(claims, phase)
    wait(claims, phase, items)


@piece
def _rotate(
    claims: Any, phase: int, model: Any, pool: Any, layer: int, tokens: Any,
    units: Any, scratch: Any,
) -> None:  # fmt: skip
    items = len(units.start_U)
    columns = (model.heads + 2 * model.kv_heads) * model.head_dim
    u = take(claims, phase)
    while u < items:
        expand(pool, layer, QKV, units, u, 0, columns, scratch.shrunk_TR, scratch.y_TC,
               columns)  # fmt: skip
        for t in range(units.start_U[u], units.stop_U[u]):
            rotate_and_store(model, pool, layer, t, tokens, scratch.y_TC, scratch.q_TO)
        done(claims, phase)
        u = take(claims, phase)
    wait(claims, phase, items)


@piece
def _attend(
    claims: Any, phase: int, model: Any, pool: Any, layer: int, attention: Any, scratch: Any
) -> None:
    items = len(attention.row_A)
    step = row_step(scratch.attended_TO, model.heads * model.head_dim)
    a = take(claims, phase)
    while a < items:
        attend(model, pool, layer, attention, a, scratch.q_TO, scratch.attended_TO, step)
        done(claims, phase)
        a = take(claims, phase)
    wait(claims, phase, items)


@piece
def _add(
    claims: Any, phase: int, model: Any, pool: Any, place: Any, units: Any,
    scratch: Any, norm_LD: Any, norm_layer: int,
) -> None:  # fmt: skip
    """The product's output joins the residual stream, which is normalised for the next product."""
    layer, group = place
    items, width = len(units.start_U), model.hidden
    step = row_step(scratch.input_TD, width)
    u = take(claims, phase)
    while u < items:
        expand(pool, layer, group, units, u, 0, width, scratch.shrunk_TR, scratch.y_TC,
               width)  # fmt: skip
        for t in range(units.start_U[u], units.stop_U[u]):
            at = t * width
            added(scratch.x_TD, at, scratch.y_TC, at, width, scratch.x_TD, at)
            if norm_layer < model.layers:
                norm_row(scratch.x_TD, at, width, norm_LD, norm_layer * width, model.eps,
                         scratch.input_TD, t * step)  # fmt: skip
        done(claims, phase)
        u = take(claims, phase)
    wait(claims, phase, items)


@piece
def _activate(
    claims: Any, phase: int, model: Any, pool: Any, layer: int, units: Any,
    scratch: Any,
) -> None:  # fmt: skip
    inner = model.inner
    step = row_step(scratch.hidden_TF, inner)
    columns = max(COLUMNS, (inner // units.parts + COLUMNS - 1) // COLUMNS * COLUMNS)
    windows = (inner + columns - 1) // columns
    items = windows * len(units.start_U)
    item = take(claims, phase)
    while item < items:
        u, low = item // windows, item % windows * columns
        high = min(low + columns, inner)
        for first in (0, inner):
            expand(pool, layer, GATE_UP, units, u, first + low, first + high,
                   scratch.shrunk_TR, scratch.y_TC, 2 * inner)  # fmt: skip
        for t in range(units.start_U[u], units.stop_U[u]):
            activate(scratch.y_TC, t, inner, low, high, scratch.hidden_TF, step)
        done(claims, phase)
        item = take(claims, phase)
    wait(claims, phase, items)


@piece
def _norm_last(claims: Any, phase: int, model: Any, tokens: Any, scratch: Any) -> None:
    """The sampling tokens' rows, normalised, one after another."""
    items, width = len(tokens.last_S), model.hidden
    step = row_step(scratch.input_TD, width)
    s = take(claims, phase)
    while s < items:
        norm_row(scratch.x_TD, tokens.last_S[s] * width, width, model.final_norm_D, 0, model.eps,
                 scratch.input_TD, s * step)  # fmt: skip
        done(claims, phase)
        s = take(claims, phase)
    wait(claims, phase, items)


@piece
def _expand_head(
    claims: Any, phase: int, model: Any, pool: Any, sampling: Any, scratch: Any
) -> None:
    columns = model.vocabulary
    windows = (columns + HEAD_COLUMNS - 1) // HEAD_COLUMNS
    items = windows * len(sampling.start_U)
    item = take(claims, phase)
    while item < items:
        low = item % windows * HEAD_COLUMNS
        expand(pool, FIRST, HEAD, sampling, item // windows, low,
               min(low + HEAD_COLUMNS, columns), scratch.shrunk_TR, scratch.logits_SV,
               columns)  # fmt: skip
        done(claims, phase)
        item = take(claims, phase)
    wait(claims, phase, items)
