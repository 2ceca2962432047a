"""The matrix product with the weights in Triton, for when a row's bits must not depend on the
batch: one size of tiles for any number of rows, and no split of the inputs. Libraries choose both
by the number of rows, which is faster.

T tokens of a tile · D inputs of a tile · C output columns of a tile
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton has no stubs, and what a kernel's arguments are is Triton's to say.

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Tile(NamedTuple):
    tokens: int
    columns: int
    inputs: int
    stages: int
    """Tiles of inputs that are on their way at a time."""


BITS16 = Tile(64, 128, 64, 4)
FLOAT32 = Tile(16, 64, 32, 2)


def linear(x_TD: Tensor, weight_CD: Tensor, bias_C: Tensor | None = None) -> Tensor:
    """x Wᵀ + bias. Accumulates in float32."""
    x_TD = x_TD.contiguous()
    tokens, (columns, width) = len(x_TD), weight_CD.shape
    tile = FLOAT32 if x_TD.dtype == torch.float32 else BITS16
    out_TC = x_TD.new_empty(tokens, columns)
    _linear[triton.cdiv(columns, tile.columns), triton.cdiv(tokens, tile.tokens)](
        x_TD,
        weight_CD,
        weight_CD if bias_C is None else bias_C,
        out_TC,
        tokens,
        D=width,
        C=columns,
        BIAS=bias_C is not None,
        BLOCK_T=tile.tokens,
        BLOCK_C=tile.columns,
        BLOCK_D=tile.inputs,
        num_warps=4,
        num_stages=tile.stages,
    )
    return out_TC


@triton.jit(do_not_specialize=["tokens"])
def _linear(
    x,
    weight,
    bias,
    out,
    tokens,
    D: tl.constexpr,
    C: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    c = tl.program_id(0).to(tl.int64) * BLOCK_C + tl.arange(0, BLOCK_C)
    t = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    live_T, live_C = t < tokens, c < C
    sum_TC = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        live_D = (d < D)[None, :]
        x_at, w_at = x + t[:, None] * D + d[None, :], weight + c[:, None] * D + d[None, :]
        x_TD = tl.load(x_at, mask=live_T[:, None] & live_D, other=0.0)
        w_CD = tl.load(w_at, mask=live_C[:, None] & live_D, other=0.0)
        sum_TC = tl.dot(x_TD, tl.trans(w_CD), sum_TC, input_precision="ieee")
    if BIAS:
        bias_C = tl.load(bias + c, mask=live_C, other=0.0)
        sum_TC += bias_C.to(tl.float32)[None, :]
    to = out + t[:, None] * C + c[None, :]
    tl.store(to, sum_TC.to(out.dtype.element_ty), mask=live_T[:, None] & live_C[None, :])
