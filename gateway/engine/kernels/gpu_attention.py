"""Attention over paged KV in Triton.

Two passes. `_attend` takes a tile of a sequence's tokens, all query heads of one KV head, and one
split of the keys, with an online softmax (FlashAttention, arXiv 2205.14135; split over keys as in
FlashDecoding); `_merge` joins a token's splits. Tiles and splits of keys begin at fixed positions
of the sequence, so the order in which a token's keys are summed does not depend on what else is in
the batch, nor on how its prompt was cut into chunks. (In 16 bits `paged_attention` sums a prompt's
token that is computed alone in the shorter splits of decoding; `one_tile_attention` does not.)

    keys of a sequence   │ split 0          │ split 1          │ split 2 …
    tile of tokens                                    ■■■■■■■■■■
    items                  (tile, split 0)    (tile, split 1: up to each token's own position)

I items · T tokens · H query heads · K KV heads · G query heads of a KV head · E head dimension
M rows of a tile: tokens × G · N keys of a tile · S splits · B block tokens
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton has no stubs, and what a kernel's arguments are is Triton's to say.

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gateway.engine.kernels.gpu_spans import (
    ITEM_ENTRIES,
    MERGE_ENTRIES,
    Spans,
    SpanWork,
    Tiling,
)
from gateway.engine.kernels.segments import AttentionSpan, Work


class Tile(NamedTuple):
    rows: int
    """Tokens times the query heads of a KV head; more if those heads alone are more."""
    keys: int
    split_keys: int
    stages: int
    """Tiles of keys that are on their way at a time."""


PREFILL = Tile(64, 64, 2048, 3)
DECODE = Tile(16, 64, 256, 3)
FLOAT32 = Tile(16, 16, 256, 2)
"""For prefill and decode alike: exactness is what float32 is for, and larger tiles of it don't
fit the registers."""
ONE = Tile(64, 64, 256, 3)
"""For prefill and decode alike in 16 bits: its splits are short, so that a decode keeps many
multiprocessors busy; a prompt pays for them with more to merge."""
MERGE_SPLITS = 16
PROGRAMS = 512
"""Of a recorded launch, whose items are counted on the device: a few for each multiprocessor.
More would be waited for where there is no work for them, fewer would leave some idle."""

ITEM = tl.constexpr(ITEM_ENTRIES)
MERGE = tl.constexpr(MERGE_ENTRIES)


def write_kv(
    k_TKE: Tensor, v_TKE: Tensor, cache_N2BKE: Tensor, page_T: Tensor, slot_T: Tensor
) -> None:
    """Store the keys and values of each token in its page and slot; of page -1, nowhere."""
    _, _, block_tokens, kv_heads, head_dim = cache_N2BKE.shape
    _write_kv[(len(k_TKE),)](
        k_TKE,
        v_TKE,
        cache_N2BKE,
        page_T,
        slot_T,
        k_TKE.stride(0),
        k_TKE.stride(1),
        v_TKE.stride(0),
        v_TKE.stride(1),
        cache_N2BKE.stride(0),
        B=block_tokens,
        K=kv_heads,
        E=head_dim,
        BLOCK_K=triton.next_power_of_2(kv_heads),
        BLOCK_E=triton.next_power_of_2(head_dim),
    )


@triton.jit
def _write_kv(
    k,
    v,
    cache,
    pages,
    slots,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_page,
    B: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head, e = tl.arange(0, BLOCK_K)[:, None], tl.arange(0, BLOCK_E)[None, :]
    page = tl.load(pages + token)
    live = (head < K) & (e < E) & (page >= 0)
    k_KE = tl.load(k + token * stride_k_token + head * stride_k_head + e, mask=live)
    v_KE = tl.load(v + token * stride_v_token + head * stride_v_head + e, mask=live)
    to = cache + page * stride_page + tl.load(slots + token) * K * E
    tl.store(to + head * E + e, k_KE, mask=live)
    tl.store(to + B * K * E + head * E + e, v_KE, mask=live)


def paged_attention(
    q_THE: Tensor,
    cache_N2BKE: Tensor,
    spans: Work[AttentionSpan],
    scale: float,
    window: int | None,
) -> Tensor:
    """Causal attention of each span's tokens over all KV of its sequence. Returns (T, H, E)."""
    prefill, decode = (FLOAT32, FLOAT32) if q_THE.dtype == torch.float32 else (PREFILL, DECODE)
    return _attention(q_THE, cache_N2BKE, spans, scale, window, prefill, decode)


def one_tile_attention(
    q_THE: Tensor,
    cache_N2BKE: Tensor,
    spans: Work[AttentionSpan],
    scale: float,
    window: int | None,
) -> Tensor:
    """The same; a token's bits don't depend on which tokens are computed with it."""
    tile = FLOAT32 if q_THE.dtype == torch.float32 else ONE
    return _attention(q_THE, cache_N2BKE, spans, scale, window, tile, tile)


def _attention(
    q_THE: Tensor,
    cache_N2BKE: Tensor,
    spans: Work[AttentionSpan],
    scale: float,
    window: int | None,
    prefill: Tile,
    decode: Tile,
) -> Tensor:
    group = q_THE.shape[1] // cache_N2BKE.shape[3]
    prefill, decode = _holding(group, prefill), _holding(group, decode)
    work = spans.derive(Spans).work(
        window,
        Tiling(prefill.rows // group, prefill.split_keys),
        Tiling(1, decode.split_keys),
    )
    out_THE = torch.empty_like(q_THE, memory_format=torch.contiguous_format)
    for part, tile in ((work.prefill, prefill), (work.decode, decode)):
        if part.items.rows_max:
            _launch(q_THE, cache_N2BKE, work.pages, part, tile, scale, window, out_THE)
    return out_THE


def _holding(group: int, tile: Tile) -> Tile:
    return tile._replace(rows=max(tile.rows, triton.next_power_of_2(group)))


def _launch(
    q_THE: Tensor,
    cache_N2BKE: Tensor,
    pages: Tensor,
    work: SpanWork,
    tile: Tile,
    scale: float,
    window: int | None,
    out_THE: Tensor,
) -> None:
    heads, head_dim = q_THE.shape[1:]
    block_tokens, kv_heads = cache_N2BKE.shape[2:4]
    block_e = max(16, triton.next_power_of_2(head_dim))
    items, kv_programs = work.items.rows_max, work.items.programs(kv_heads, PROGRAMS)
    sums_IKME = q_THE.new_empty(items, kv_heads, tile.rows, head_dim, dtype=torch.float32)
    stats_IKM2 = q_THE.new_empty(items, kv_heads, tile.rows, 2, dtype=torch.float32)
    _attend[kv_programs, kv_heads](
        q_THE,
        cache_N2BKE,
        pages,
        work.items.head,
        sums_IKME,
        stats_IKM2,
        q_THE.stride(0),
        q_THE.stride(1),
        cache_N2BKE.stride(0),
        scale * math.log2(math.e),
        WINDOW=window or 0,
        SPLIT=tile.split_keys,
        B=block_tokens,
        G=heads // kv_heads,
        E=head_dim,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.keys,
        BLOCK_E=block_e,
        num_warps=4,
        num_stages=tile.stages,
    )
    _merge[work.merges.programs(heads, PROGRAMS), heads](
        sums_IKME,
        stats_IKM2,
        work.merges.head,
        out_THE,
        G=heads // kv_heads,
        E=head_dim,
        M=tile.rows,
        BLOCK_S=MERGE_SPLITS,
        BLOCK_E=block_e,
        num_warps=4,
    )


@triton.jit
def _attend(
    q,
    cache,
    pages,
    items,
    sums,
    stats,
    stride_q_token,
    stride_q_head,
    stride_page,
    scale,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    B: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Softmax over one split, unnormalised: weighted sums of values, and (maximum, denominator).
    `scale` includes log2(e), as powers are of two. WINDOW 0: no window."""
    kv_head, kv_heads = tl.program_id(1), tl.num_programs(1)
    count, rows = tl.load(items).to(tl.int32), items + tl.load(items + 1)
    for item in range(tl.program_id(0), count, tl.num_programs(0)):
        at = rows + item * ITEM
        first, tokens, position = tl.load(at), tl.load(at + 1), tl.load(at + 2).to(tl.int32)
        table, split = pages + tl.load(at + 3), tl.load(at + 4).to(tl.int32)

        m, e = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_E)
        token_M, head_M = m // G, kv_head * G + m % G
        live_M, live_E = token_M < tokens, e < E
        q_at = q + (first + token_M) * stride_q_token + head_M * stride_q_head
        q_ME = tl.load(
            q_at[:, None] + e[None, :], mask=live_M[:, None] & live_E[None, :], other=0.0
        )
        position_M = position + token_M

        stop = tl.minimum((split + 1) * SPLIT, position + tokens.to(tl.int32))
        start = split * SPLIT
        if WINDOW:
            start = tl.maximum(start, (position - WINDOW + 1) // BLOCK_N * BLOCK_N)
        max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
        sum_M = tl.zeros([BLOCK_M], tl.float32)
        sum_ME = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
        for key in range(start, stop, BLOCK_N):
            key_N = key + tl.arange(0, BLOCK_N)
            live_N = key_N < stop
            page_N = tl.load(table + key_N // B, mask=live_N, other=0)
            row_N = page_N * stride_page + (key_N % B * kv_heads + kv_head) * E
            kv_at = cache + row_N[:, None] + e[None, :]
            live_NE = live_N[:, None] & live_E[None, :]
            k_NE = tl.load(kv_at, mask=live_NE, other=0.0)
            score_MN = tl.dot(q_ME, tl.trans(k_NE), input_precision="ieee") * scale
            seen_MN = (key_N[None, :] <= position_M[:, None]) & live_N[None, :]
            if WINDOW:
                seen_MN = seen_MN & (key_N[None, :] > position_M[:, None] - WINDOW)
            score_MN = tl.where(seen_MN, score_MN, float("-inf"))
            new_max_M = tl.maximum(max_M, tl.max(score_MN, axis=1))
            # a row that has seen nothing yet has no maximum to subtract
            base_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
            weight_MN = tl.exp2(score_MN - base_M[:, None])
            shrink_M = tl.exp2(max_M - base_M)
            v_NE = tl.load(kv_at + B * kv_heads * E, mask=live_NE, other=0.0)
            sum_M = sum_M * shrink_M + tl.sum(weight_MN, axis=1)
            sum_ME = tl.dot(
                weight_MN.to(v_NE.dtype), v_NE, sum_ME * shrink_M[:, None], input_precision="ieee"
            )
            max_M = new_max_M

        row_M = (item * kv_heads + kv_head) * BLOCK_M + m
        tl.store(stats + row_M * 2, max_M, mask=live_M)
        tl.store(stats + row_M * 2 + 1, sum_M, mask=live_M)
        to = sums + row_M[:, None].to(tl.int64) * E + e[None, :]
        tl.store(to, sum_ME, mask=live_M[:, None] & live_E[None, :])


@triton.jit
def _merge(
    sums,
    stats,
    merges,
    out,
    G: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """One head of one token: its splits, each weighted by its share of the denominator. Which
    splits are added up together depends on their places in the sequence only."""
    head, kv_heads = tl.program_id(1), tl.num_programs(1) // G
    count, rows = tl.load(merges).to(tl.int32), merges + tl.load(merges + 1)
    for merge in range(tl.program_id(0), count, tl.num_programs(0)):
        at = rows + merge * MERGE
        token, base, row = tl.load(at), tl.load(at + 1), tl.load(at + 4)
        first, stop = tl.load(at + 2).to(tl.int32), tl.load(at + 3).to(tl.int32)
        e = tl.arange(0, BLOCK_E)
        max_ = tl.full([], float("-inf"), tl.float32)
        denominator = tl.zeros([], tl.float32)
        sum_E = tl.zeros([BLOCK_E], tl.float32)
        for split in range(first // BLOCK_S * BLOCK_S, stop, BLOCK_S):
            split_S = split + tl.arange(0, BLOCK_S)
            live_S = (split_S >= first) & (split_S < stop)
            row_S = ((base + split_S) * kv_heads + head // G) * M + row * G + head % G
            max_S = tl.load(stats + row_S * 2, mask=live_S, other=float("-inf"))
            sum_S = tl.load(stats + row_S * 2 + 1, mask=live_S, other=0.0)
            sums_SE = tl.load(
                sums + row_S[:, None] * E + e[None, :],
                mask=live_S[:, None] & (e < E)[None, :],
                other=0.0,
            )
            new_max = tl.maximum(max_, tl.max(max_S, axis=0))
            origin = tl.where(new_max == float("-inf"), 0.0, new_max)
            weight_S = tl.exp2(max_S - origin)
            shrink = tl.exp2(max_ - origin)
            denominator = denominator * shrink + tl.sum(weight_S * sum_S, axis=0)
            sum_E = sum_E * shrink + tl.sum(weight_S[:, None] * sums_SE, axis=0)
            max_ = new_max
        value_E = (sum_E / denominator).to(out.dtype.element_ty)
        tl.store(out + (token * tl.num_programs(1) + head) * E + e, value_E, mask=e < E)
