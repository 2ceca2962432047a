"""LoRA of many adapters in one launch, in Triton.

A program takes up to 16 tokens of one adapter. It finds the adapter's rank rows through its row
table (`gpu_adapters.py`), whose address is in the work list, so that neither a launch nor a
compiled kernel depends on which adapters, how many, or of what rank they are. Inputs wider than
SPLIT_INPUTS are summed in splits of that size; `lora_expand` adds the splits up in order.

T tokens of a tile · D input width · R rank rows of a tile · C output columns of a tile · S splits
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton has no stubs, and what a kernel's arguments are is Triton's to say.

import torch
import triton
import triton.language as tl
from torch import Tensor

from gateway.engine.kernels.gpu_adapters import (
    GROUP_ENTRIES,
    GROUP_INDEX,
    ITEM_ENTRIES,
    TILE_COLUMNS,
    TILE_ENTRIES,
    TILE_RANKS,
    TILE_TOKENS,
    Segments,
)
from gateway.engine.kernels.segments import LoraSegment, Work
from gateway.engine.memory.rows import ALIGNMENT

SPLIT_INPUTS = 1024
TILE_INPUTS = 128
PROGRAMS = 1024
"""Of a recorded launch, see `gpu_attention.PROGRAMS`; these programs are smaller."""

ITEM = tl.constexpr(ITEM_ENTRIES)
TILE = tl.constexpr(TILE_ENTRIES)
ENTRIES = tl.constexpr(GROUP_ENTRIES)
GROUP_COUNT = tl.constexpr(len(GROUP_INDEX))
ALIGN = tl.constexpr(ALIGNMENT)


def lora_shrink(
    x_TD: Tensor, pages_NP: Tensor, segments: Work[LoraSegment], layer: int, group: str
) -> Tensor:
    """scale · x Aᵀ of every segment, float32: (S, elements), to be summed over S. Within
    `elements` the work list's items have their (tokens, rank) one after another."""
    width = x_TD.shape[1]
    work = segments.derive(Segments).work(group, pages_NP)
    splits = triton.cdiv(width, SPLIT_INPUTS)
    shrunk = x_TD.new_empty(splits, work.elements, dtype=torch.float32)
    if not work.shrink.rows_max:
        return shrunk
    _shrink[work.shrink.programs(splits, PROGRAMS), splits](
        x_TD,
        pages_NP,
        work.shrink.head,
        shrunk,
        x_TD.stride(0),
        work.elements,
        layer,
        GROUP=GROUP_INDEX[group],
        D=width,
        SPLIT=SPLIT_INPUTS,
        ALIGNED=work.aligned,
        BLOCK_T=TILE_TOKENS,
        BLOCK_R=TILE_RANKS,
        BLOCK_D=TILE_INPUTS,
        num_warps=2,
        num_stages=2 if x_TD.dtype == torch.float32 else 4,
    )
    return shrunk


def lora_gather(
    tokens_T: Tensor, pages_NP: Tensor, segments: Work[LoraSegment], layer: int, group: str
) -> Tensor:
    """scale · column `token` of A, as `lora_shrink` returns it; there is nothing to sum."""
    work = segments.derive(Segments).work(group, pages_NP)
    gathered = pages_NP.new_empty(1, work.elements, dtype=torch.float32)
    if not work.shrink.rows_max:
        return gathered
    _gather[(work.shrink.programs(1, PROGRAMS),)](
        tokens_T,
        pages_NP,
        work.shrink.head,
        gathered,
        layer,
        GROUP=GROUP_INDEX[group],
        BLOCK_T=TILE_TOKENS,
        BLOCK_R=TILE_RANKS,
        num_warps=1,
    )
    return gathered


def lora_expand(
    shrunk: Tensor,
    pages_NP: Tensor,
    segments: Work[LoraSegment],
    layer: int,
    group: str,
    y_TC: Tensor,
) -> None:
    """Add (shrunk Bᵀ) to the group's fused output, in place. Accumulates in float32."""
    work = segments.derive(Segments).work(group, pages_NP)
    if not work.expand.rows_max:
        return
    _expand[work.expand.programs(len(work.tiles), PROGRAMS), len(work.tiles)](
        shrunk,
        pages_NP,
        work.expand.head,
        work.tiles,
        y_TC,
        y_TC.stride(0),
        work.elements,
        layer,
        GROUP=GROUP_INDEX[group],
        SPLITS=len(shrunk),
        ALIGNED=work.aligned,
        # 16-bit weights are exact in tf32, and three parts of it hold the float32 intermediate
        PRECISION="ieee" if y_TC.dtype == torch.float32 else "tf32x3",
        BLOCK_T=TILE_TOKENS,
        BLOCK_R=TILE_RANKS,
        BLOCK_C=TILE_COLUMNS,
        num_warps=4,
        num_stages=1 if y_TC.dtype == torch.float32 else 2,
    )


@triton.jit
def _group(table, layer, GROUP: tl.constexpr):
    """Where the group's entries lie, and its rank: 0 in a layer that the adapter leaves alone."""
    entries = table + 1 + (layer * GROUP_COUNT + GROUP) * ENTRIES
    return entries, tl.load(entries, mask=layer < tl.load(table), other=0)


@triton.jit(do_not_specialize=["elements", "layer"])
def _shrink(
    x,
    pool,
    items,
    out,
    stride_x,
    elements,
    layer,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    SPLIT: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    split = tl.program_id(1)
    count, work = tl.load(items).to(tl.int32), items + tl.load(items + 1)
    for item in range(tl.program_id(0), count, tl.num_programs(0)):
        at = work + item * ITEM
        table = tl.load(at).to(tl.pointer_type(tl.int64))
        scales = tl.load(at + 1).to(tl.pointer_type(tl.float32))
        token, tokens = tl.load(at + 2), tl.load(at + 3)
        to, stride_to, first_rank = tl.load(at + 4), tl.load(at + 5), tl.load(at + 6)
        entries, rank = _group(table, layer, GROUP)
        if first_rank < rank:
            t, r = tl.arange(0, BLOCK_T), first_rank + tl.arange(0, BLOCK_R)
            live_T, live_R = t < tokens, r < rank
            row = tl.load(entries + 1) + r
            offset_R = tl.load(table + row, mask=live_R, other=0)
            if ALIGNED:
                offset_R = tl.multiple_of(offset_R, ALIGN)
            sum_TR = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
            for start in range(0, SPLIT, BLOCK_D):
                d = split * SPLIT + start + tl.arange(0, BLOCK_D)
                live_D = (d < D)[None, :]
                x_at = x + (token + t)[:, None] * stride_x + d[None, :]
                x_TD = tl.load(x_at, mask=live_T[:, None] & live_D, other=0.0)
                a_at = pool + offset_R[:, None] + d[None, :]
                a_RD = tl.load(a_at, mask=live_R[:, None] & live_D, other=0.0)
                sum_TR = tl.dot(x_TD, tl.trans(a_RD), sum_TR, input_precision="ieee")
            scale_R = tl.load(scales + row, mask=live_R, other=0.0)
            to_TR = out + split * elements.to(tl.int64) + to + t[:, None] * stride_to + r[None, :]
            live_TR = live_T[:, None] & live_R[None, :]
            tl.store(to_TR, sum_TR * scale_R[None, :], mask=live_TR)


@triton.jit(do_not_specialize=["layer"])
def _gather(
    tokens,
    pool,
    items,
    out,
    layer,
    GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    count, work = tl.load(items).to(tl.int32), items + tl.load(items + 1)
    for item in range(tl.program_id(0), count, tl.num_programs(0)):
        at = work + item * ITEM
        table = tl.load(at).to(tl.pointer_type(tl.int64))
        scales = tl.load(at + 1).to(tl.pointer_type(tl.float32))
        first, live = tl.load(at + 2), tl.load(at + 3)
        to, stride_to, first_rank = tl.load(at + 4), tl.load(at + 5), tl.load(at + 6)
        entries, rank = _group(table, layer, GROUP)
        if first_rank < rank:
            t, r = tl.arange(0, BLOCK_T), first_rank + tl.arange(0, BLOCK_R)
            live_T, live_R = t < live, r < rank
            row = tl.load(entries + 1) + r
            offset_R = tl.load(table + row, mask=live_R, other=0)
            scale_R = tl.load(scales + row, mask=live_R, other=0.0)
            token_T = tl.load(tokens + first + t, mask=live_T, other=0)
            live_TR = live_T[:, None] & live_R[None, :]
            a_TR = tl.load(pool + offset_R[None, :] + token_T[:, None], mask=live_TR, other=0.0)
            to_TR = out + to + t[:, None] * stride_to + r[None, :]
            tl.store(to_TR, a_TR.to(tl.float32) * scale_R[None, :], mask=live_TR)


@triton.jit(do_not_specialize=["elements", "layer"])
def _expand(
    shrunk,
    pool,
    items,
    tiles,
    y,
    stride_y,
    elements,
    layer,
    GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    tile = tiles + tl.program_id(1) * TILE
    slot, target, width, column = (
        tl.load(tile),
        tl.load(tile + 1),
        tl.load(tile + 2),
        tl.load(tile + 3),
    )
    column = tl.multiple_of(column, BLOCK_C)
    if ALIGNED:
        target, width = tl.multiple_of(target, ALIGN), tl.multiple_of(width, ALIGN)
    c = column + tl.arange(0, BLOCK_C)
    live_C = c < width
    count, work = tl.load(items).to(tl.int32), items + tl.load(items + 1)
    for item in range(tl.program_id(0), count, tl.num_programs(0)):
        at = work + item * ITEM
        table = tl.load(at).to(tl.pointer_type(tl.int64))
        token, tokens = tl.load(at + 2), tl.load(at + 3)
        from_, stride_from = tl.load(at + 4), tl.load(at + 5)
        entries, rank = _group(table, layer, GROUP)
        start = tl.load(entries + 2 + 2 * slot, mask=rank > 0, other=0)
        stop = tl.load(entries + 3 + 2 * slot, mask=rank > 0, other=0)
        if start < stop:
            t = tl.arange(0, BLOCK_T)
            live_T = t < tokens
            rows = table + tl.load(entries + 1) + rank  # those of Bᵀ come after those of A
            h_at = shrunk + from_ + t[:, None] * stride_from
            sum_TC = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
            for first in range(start.to(tl.int32), stop.to(tl.int32), BLOCK_R):
                r = first + tl.arange(0, BLOCK_R)
                live_R = r < stop
                offset_R = tl.load(rows + r, mask=live_R, other=0)
                if ALIGNED:
                    offset_R = tl.multiple_of(offset_R, ALIGN)
                b_at = pool + offset_R[:, None] + c[None, :]
                b_RC = tl.load(b_at, mask=live_R[:, None] & live_C[None, :], other=0.0)
                live_TR = live_T[:, None] & live_R[None, :]
                h_TR = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
                for split in tl.static_range(SPLITS):
                    part = h_at + split * elements.to(tl.int64) + r[None, :]
                    h_TR += tl.load(part, mask=live_TR, other=0.0)
                sum_TC = tl.dot(h_TR, b_RC.to(tl.float32), sum_TC, input_precision=PRECISION)
            y_at = y + (token + t)[:, None] * stride_y + (target + c)[None, :]
            live_TC = live_T[:, None] & live_C[None, :]
            y_TC = tl.load(y_at, mask=live_TC, other=0.0)
            tl.store(y_at, (y_TC.to(tl.float32) + sum_TC).to(y_TC.dtype), mask=live_TC)
