"""What the compiled forward pass reads and writes: flat arrays, and where things lie in them.

Elements of weights, pool and inputs of products are all float32, or all bfloat16 as uint16; all
else is float32. Of a 16-bit row whose length is odd, one zero follows, so that it is made of pairs.

L layers · D hidden size · O columns of q · N of q, k and v · F inner size · V vocabulary · E head
T tokens · S sampling tokens · U units · G segments (adapters) · A attention units · Y their pages
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]


class Model(NamedTuple):
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    eps: Any
    """float32."""
    scale: Any
    """float32: of the attention's scores."""
    window: int
    panels: Array
    """The matrices of all layers, packed, see `tiles.product`."""
    panels_at_L4: Array
    """int64: where qkv, o, gate and up, and down of a layer begin."""
    head: Array
    """The output embeddings, packed."""
    embed_VD: Array
    """The input embeddings, row by row; empty if they are `head`."""
    input_norm_LD: Array
    post_norm_LD: Array
    final_norm_D: Array
    qkv_bias_LN: Array
    """Empty if there are none; so are the next two."""
    q_norm_LE: Array
    k_norm_LE: Array
    turn_PE: Array
    """Of each position the cosines of E / 2 angles, then their sines."""


class Pool(NamedTuple):
    elements: Array
    page: int
    """Elements of a page."""
    block_tokens: int


class Units(NamedTuple):
    """Tiles of rows: tokens one after another that have the same adapter, or none."""

    start_U: Array
    stop_U: Array
    segment_U: Array
    """-1: no adapter."""
    table_G7: Array
    """int64, of each adapter: addresses of its rows' places in the pool, their scales, columns and
    widths; of (layer, group) the first entry and the rank; and the number of layers. See
    memory.rows.RowTable."""
    rank_max: int
    parts: int
    """Into which the columns of a unit are cut where threads would not have enough units."""


class Attention(NamedTuple):
    """Tiles of tokens of one sequence that follow one another, with the query heads of one KV
    head."""

    rows: int
    """Tokens of the batch."""
    row_A: Array
    tokens_A: Array
    position_A: Array
    first_page_A: Array
    """Where the sequence's pages begin in `page_Y`."""
    kv_head_A: Array
    page_Y: Array


class Tokens(NamedTuple):
    token_T: Array
    position_T: Array
    page_T: Array
    last_S: Array


class Scratch(NamedTuple):
    """Flat, of at least as many rows as the batch has."""

    x_TD: Array
    """The residual stream."""
    input_TD: Array
    """Normalised, as the next product reads it; rows of D elements, made even where they are
    16-bit, as the next two."""
    attended_TO: Array
    hidden_TF: Array
    y_TC: Array
    """What a product gives."""
    q_TO: Array
    """[KV head][token][query heads of it][E], as the pool's elements."""
    shrunk_TR: Array
    logits_SV: Array


def flat(tensor: Tensor) -> Array:
    """The contiguous tensor's memory as numpy sees it; bfloat16, which it does not know, as
    uint16."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    assert tensor.is_contiguous(), "a copy would be written to, and lost"
    array: Any = tensor.numpy().reshape(-1)
    found: Array = array
    return found
