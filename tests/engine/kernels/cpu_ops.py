"""The pieces of the CPU's compiled step as ops of the reference's names and arguments, so that each
can be tested by itself. As in the step, a team of threads takes item after item.

What products give, and what adapters are added to, is float32 whatever the weights are; so are the
results of `linear`. All else is of the dtype of its input.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gateway.engine.kernels import panels
from gateway.engine.kernels.compiled_step import RANKS
from gateway.engine.kernels.compiling import entry
from gateway.engine.kernels.pieces import (
    activate,
    attend,
    embed_row,
    expand,
    gather,
    multiply_panel,
    norm_row,
    rotate_and_store,
    shrink,
)
from gateway.engine.kernels.segments import AttentionSpan, LoraSegment, Work
from gateway.engine.kernels.step_data import Array, Model, Pool, Tokens, Units, flat
from gateway.engine.kernels.team import done, take, team, wait
from gateway.engine.kernels.tiles import PANEL
from gateway.engine.memory.rows import GROUPS
from gateway.engine.model.step_units import attention_units, lora_units

THREADS = 1
"""Of the team; no result depends on it."""
PHASE = np.int64(0)
AT = 24
"""Elements that lie before a packed matrix."""
WINDOW = 48
"""Columns of an item of `lora_expand`: ends within targets."""


def linear(x_TD: Tensor, weight_CD: Tensor) -> Tensor:
    columns, width = weight_CD.shape
    size = panels.elements(columns, width, weight_CD.dtype)
    packed = torch.full((AT + size,), torch.nan, dtype=weight_CD.dtype)
    panels.pack(weight_CD, packed[AT:])
    out_TC = torch.full((len(x_TD), columns), torch.nan)
    x_TP = _paired(x_TD)
    _run(_products, flat(x_TP), x_TP.shape[1], len(x_TP), flat(packed), AT, columns, flat(out_TC))
    return out_TC


def embedding(tokens_T: Tensor, embed_VD: Tensor, packed: bool) -> Tensor:
    """Rows of the input embeddings, float32; `packed`: taken out of the packed output embeddings,
    which are the same."""
    vocabulary, width = embed_VD.shape
    head = torch.empty(panels.elements(vocabulary, width, embed_VD.dtype), dtype=embed_VD.dtype)
    panels.pack(embed_VD, head)
    out_TD = torch.empty(len(tokens_T), width)
    embed = flat(embed_VD[:0] if packed else embed_VD)
    _run(_embeddings, flat(head), embed, flat(tokens_T), width, flat(out_TD))
    return out_TD


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    rows, width = x_TD.shape
    x, weight = flat(x_TD.float().contiguous()), flat(weight_D.float())
    out_TD = torch.empty_like(x_TD)
    _run(_norms, x, rows, width, weight, np.float32(eps), flat(out_TD))
    return out_TD


def silu_times_up(gate_up_TC: Tensor) -> Tensor:
    rows, width = len(gate_up_TC), gate_up_TC.shape[1] // 2
    out_TF = torch.empty(rows, width, dtype=gate_up_TC.dtype)
    _run(_activations, flat(gate_up_TC.float().contiguous()), rows, width, flat(out_TF))
    return out_TF


def write_kv(
    k_TKE: Tensor, v_TKE: Tensor, cache_N2BKE: Tensor, page_T: Tensor, slot_T: Tensor
) -> None:
    """Without bias, norms and rotation."""
    block_tokens, _, head_dim = cache_N2BKE.shape[2:]
    qkv_TXE = torch.cat((torch.zeros_like(k_TKE), k_TKE, v_TKE), dim=1)
    half = torch.ones(block_tokens, head_dim // 2)
    turn_PE = torch.cat((half, torch.zeros_like(half)), dim=1)
    project_and_store(qkv_TXE, cache_N2BKE, turn_PE, page_T, slot_T)


def project_and_store(
    qkv_TXE: Tensor,
    cache_N2BKE: Tensor,
    turn_PE: Tensor,
    page_T: Tensor,
    position_T: Tensor,
    bias_C: Tensor | None = None,
    q_norm_E: Tensor | None = None,
    k_norm_E: Tensor | None = None,
    eps: float = 0,
) -> Tensor:
    """Bias, norms of heads and rotation; k and v to the cache. Returns q (T, H, E)."""
    pool, layer = _pool(cache_N2BKE)
    kv_heads, head_dim = cache_N2BKE.shape[3:]
    rows, heads = len(qkv_TXE), qkv_TXE.shape[1] - 2 * kv_heads

    def in_layer(values: Tensor | None) -> Array:
        if values is None:
            return np.zeros(0, dtype=np.float32)
        before = torch.full((layer, len(values)), torch.nan)
        return flat(torch.cat((before.flatten(), values.float())))

    model = _model(
        flat(torch.zeros(0, dtype=cache_N2BKE.dtype)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=np.float32(eps),
        qkv_bias_LN=in_layer(bias_C),
        q_norm_LE=in_layer(q_norm_E),
        k_norm_LE=in_layer(k_norm_E),
        turn_PE=flat(turn_PE),
    )
    q_KTGE = torch.empty(kv_heads, rows, heads // kv_heads, head_dim, dtype=cache_N2BKE.dtype)
    none: Array = np.zeros(0, dtype=np.int64)
    tokens = Tokens(np.zeros(rows, dtype=np.int64), flat(position_T), flat(page_T), none)
    y = flat(qkv_TXE.to(torch.float32, copy=True).contiguous())
    _run(_stores, model, pool, layer, tokens, y, flat(q_KTGE))
    return q_KTGE.transpose(0, 1).reshape(rows, heads, head_dim)


def paged_attention(
    q_THE: Tensor,
    cache_N2BKE: Tensor,
    spans: Work[AttentionSpan],
    scale: float,
    window: int | None,
) -> Tensor:
    pool, layer = _pool(cache_N2BKE)
    kv_heads, head_dim = cache_N2BKE.shape[3:]
    rows, heads, _ = q_THE.shape
    model = _model(
        flat(q_THE.new_zeros(0)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=np.float32(scale),
        window=window or 2**62,
    )
    q_KTGE = q_THE.reshape(rows, kv_heads, -1, head_dim).transpose(0, 1).contiguous()
    out_TO = torch.full((rows, heads * head_dim), torch.nan, dtype=q_THE.dtype)
    out_TO = _paired(out_TO)
    tiles = attention_units(spans, rows, heads, kv_heads, pool.block_tokens)
    step = out_TO.shape[1]
    _run(_attentions, model, pool, layer, tiles, flat(q_KTGE), flat(out_TO), step)
    return out_TO[:, : heads * head_dim].reshape(rows, heads, head_dim)


def lora_shrink(
    x_TD: Tensor, pages_NP: Tensor, segments: Work[LoraSegment], layer: int, group: str
) -> Array:
    """(T · R,); tokens without an adapter, and ranks beyond their adapter's, have no values."""
    units = _units(segments, len(x_TD), pages_NP)
    shrunk_TR = np.full(len(x_TD) * units.rank_max, np.nan, dtype=np.float32)
    x_TP = _paired(x_TD)
    place = layer, list(GROUPS).index(group)
    step, width = x_TP.shape[1], x_TD.shape[1]
    _run(_shrinks, _pages(pages_NP), *place, units, flat(x_TP), step, width, shrunk_TR)
    return shrunk_TR


def lora_gather(
    tokens_T: Tensor, pages_NP: Tensor, segments: Work[LoraSegment], layer: int, group: str
) -> Array:
    """What `lora_shrink` gives."""
    assert group == "embed"
    units = _units(segments, len(tokens_T), pages_NP)
    # the embeddings are of layer 0 in a model: let the tables begin with the layer asked for
    units.table_G7[:, 4:6] += layer * len(GROUPS) * np.dtype(np.int64).itemsize
    units.table_G7[:, 6] -= layer
    shrunk_TR = np.full(len(tokens_T) * units.rank_max, np.nan, dtype=np.float32)
    none: Array = np.zeros(0, dtype=np.int64)
    tokens = Tokens(flat(tokens_T), none, none, none)
    _run(_gathers, _pages(pages_NP), units, tokens, shrunk_TR)
    return shrunk_TR


def lora_expand(
    shrunk_TR: Array,
    pages_NP: Tensor,
    segments: Work[LoraSegment],
    layer: int,
    group: str,
    y_TC: Tensor,
) -> None:
    units = _units(segments, len(y_TC), pages_NP)
    sum_TC = y_TC.to(torch.float32, copy=True).contiguous()
    place = layer, list(GROUPS).index(group)
    _run(_expands, _pages(pages_NP), *place, units, shrunk_TR, flat(sum_TC), y_TC.shape[1])
    y_TC.copy_(sum_TC)


def _run(loop: Any, *arguments: Any) -> None:
    team(THREADS).run(1, loop, *arguments)


def _units(segments: Work[LoraSegment], rows: int, pages_NP: Tensor) -> Units:
    return lora_units(segments, rows, THREADS, pages_NP.shape[1])


def _paired(x_TD: Tensor) -> Tensor:
    """Rows made even where they are 16-bit."""
    more = panels.row_elements(x_TD.shape[1], x_TD.dtype) - x_TD.shape[1]
    return torch.nn.functional.pad(x_TD, (0, more)).contiguous()


def _pages(pages_NP: Tensor) -> Pool:
    return Pool(flat(pages_NP), pages_NP.shape[1], 0)


def _pool(cache_N2BKE: Tensor) -> tuple[Pool, int]:
    """The whole pool, and which layer of it this is."""
    size = cache_N2BKE.untyped_storage().nbytes() // cache_N2BKE.itemsize
    whole = torch.as_strided(cache_N2BKE, (size,), (1,), 0)
    layer = int(cache_N2BKE.storage_offset()) // cache_N2BKE[0].numel()
    return Pool(flat(whole), cache_N2BKE.stride(0), cache_N2BKE.shape[2]), layer


def _model(elements: Array, **given: Any) -> Model:
    """Of no layers: all numbers 0 and all arrays empty but those given; `elements` stands for the
    weights' type."""
    floats: Array = np.zeros(0, dtype=np.float32)
    kinds = Model.__annotations__
    values: dict[str, Any] = {name: floats if kind is Array else 0 for name, kind in kinds.items()}
    values |= {"panels": elements, "head": elements, "embed_VD": elements}
    values |= {"panels_at_L4": np.zeros((0, 4), dtype=np.int64)}
    values |= {"eps": np.float32(0), "scale": np.float32(0)}
    return Model(**values | given)


@entry
def _products(
    claims: Any, x: Any, step: int, rows: int, packed: Any, at: int, columns: int, out: Any
) -> None:
    items = (columns + PANEL - 1) // PANEL
    item = take(claims, PHASE)
    while item < items:
        multiply_panel(x, step, rows, packed, at, item, columns, out)
        done(claims, PHASE)
        item = take(claims, PHASE)
    wait(claims, PHASE, items)


@entry
def _embeddings(claims: Any, head: Any, embed: Any, tokens: Any, width: int, out: Any) -> None:
    items = len(tokens)
    t = take(claims, PHASE)
    while t < items:
        embed_row(head, embed, tokens[t], width, out, t * width)
        done(claims, PHASE)
        t = take(claims, PHASE)
    wait(claims, PHASE, items)


@entry
def _norms(claims: Any, x: Any, rows: int, width: int, weight: Any, eps: Any, out: Any) -> None:
    t = take(claims, PHASE)
    while t < rows:
        norm_row(x, t * width, width, weight, 0, eps, out, t * width)
        done(claims, PHASE)
        t = take(claims, PHASE)
    wait(claims, PHASE, rows)


@entry
def _activations(claims: Any, y: Any, rows: int, inner: int, out: Any) -> None:
    windows = (inner + WINDOW - 1) // WINDOW
    items = rows * windows
    item = take(claims, PHASE)
    while item < items:
        low = item % windows * WINDOW
        activate(y, item // windows, inner, low, min(low + WINDOW, inner), out, inner)
        done(claims, PHASE)
        item = take(claims, PHASE)
    wait(claims, PHASE, items)


@entry
def _stores(claims: Any, model: Any, pool: Any, layer: int, tokens: Any, y: Any, q: Any) -> None:
    items = len(tokens.token_T)
    t = take(claims, PHASE)
    while t < items:
        rotate_and_store(model, pool, layer, t, tokens, y, q)
        done(claims, PHASE)
        t = take(claims, PHASE)
    wait(claims, PHASE, items)


@entry
def _attentions(
    claims: Any, model: Any, pool: Any, layer: int, tiles: Any, q: Any, out: Any, step: int
) -> None:
    items = len(tiles.row_A)
    a = take(claims, PHASE)
    while a < items:
        attend(model, pool, layer, tiles, a, q, out, step)
        done(claims, PHASE)
        a = take(claims, PHASE)
    wait(claims, PHASE, items)


@entry
def _shrinks(
    claims: Any, pool: Any, layer: int, group: int, units: Any, x: Any, step: int, width: int,
    out: Any,
) -> None:  # fmt: skip
    blocks = (units.rank_max + RANKS - 1) // RANKS
    items = blocks * len(units.start_U)
    item = take(claims, PHASE)
    while item < items:
        first = item % blocks * RANKS
        shrink(pool, layer, group, units, item // blocks, first, RANKS, x, step, width, out)
        done(claims, PHASE)
        item = take(claims, PHASE)
    wait(claims, PHASE, items)


@entry
def _gathers(claims: Any, pool: Any, units: Any, tokens: Any, out: Any) -> None:
    items = len(units.start_U)
    u = take(claims, PHASE)
    while u < items:
        gather(pool, units, u, tokens, out)
        done(claims, PHASE)
        u = take(claims, PHASE)
    wait(claims, PHASE, items)


@entry
def _expands(
    claims: Any, pool: Any, layer: int, group: int, units: Any, shrunk: Any, y: Any, columns: int
) -> None:
    windows = (columns + WINDOW - 1) // WINDOW
    items = windows * len(units.start_U)
    item = take(claims, PHASE)
    while item < items:
        low = item % windows * WINDOW
        high = min(low + WINDOW, columns)
        expand(pool, layer, group, units, item // windows, low, high, shrunk, y, columns)
        done(claims, PHASE)
        item = take(claims, PHASE)
    wait(claims, PHASE, items)
