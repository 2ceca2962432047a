"""Ops on single rows (tokens or heads) in Triton.

T tokens · D width of a row · H heads · E head dimension · F half of it
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton has no stubs, and what a kernel's arguments are is Triton's to say.

import torch
import triton
import triton.language as tl
from torch import Tensor


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last dimension, in float32 inside. Also takes (T, H, D)."""
    x_THD = x_TD if x_TD.ndim == 3 else x_TD[:, None]
    tokens, heads, width = x_THD.shape
    out_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    block = triton.next_power_of_2(width)
    _rms_norm[tokens, heads](
        x_THD,
        weight_D,
        out_TD,
        eps,
        x_THD.stride(0),
        x_THD.stride(1) if heads > 1 else width,
        D=width,
        BLOCK_D=block,
        num_warps=min(8, max(1, block // 512)),
    )
    return out_TD


@triton.jit
def _rms_norm(
    x, weight, out, eps, stride_token, stride_head, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    live = d < D
    row_D = tl.load(x + token * stride_token + head * stride_head + d, mask=live, other=0.0)
    x_D = row_D.to(tl.float32)
    x_D = x_D * tl.rsqrt(tl.sum(x_D * x_D, axis=0) / D + eps)
    weight_D = tl.load(weight + d, mask=live, other=0.0)
    y_D = weight_D.to(tl.float32) * x_D.to(row_D.dtype).to(tl.float32)
    tl.store(out + (token * tl.num_programs(1) + head) * D + d, y_D.to(row_D.dtype), mask=live)


def rotate(x_THE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Rotary position embedding on half-split pairs (i, i + E/2), as Hugging Face orders them."""
    tokens, heads, head_dim = x_THE.shape
    out_THE = torch.empty_like(x_THE, memory_format=torch.contiguous_format)
    _rotate[(tokens,)](
        x_THE,
        cos_TE,
        sin_TE,
        out_THE,
        x_THE.stride(0),
        x_THE.stride(1),
        H=heads,
        F=head_dim // 2,
        BLOCK_H=triton.next_power_of_2(heads),
        BLOCK_F=triton.next_power_of_2(head_dim // 2),
    )
    return out_THE


@triton.jit
def _rotate(
    x,
    cos,
    sin,
    out,
    stride_token,
    stride_head,
    H: tl.constexpr,
    F: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head, f = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_F)[None, :]
    live_F = f < F
    live_HF = (head < H) & live_F
    at_HF = x + token * stride_token + head * stride_head + f
    low_HF = tl.load(at_HF, mask=live_HF, other=0.0)
    high_HF = tl.load(at_HF + F, mask=live_HF, other=0.0)
    # The two halves of cos differ from each other only if a caller made them so.
    angle = token * 2 * F + f
    cos_low, cos_high = _pair(cos + angle, F, live_F)
    sin_low, sin_high = _pair(sin + angle, F, live_F)
    low, high = low_HF.to(tl.float32), high_HF.to(tl.float32)
    to_HF = out + (token * H + head) * 2 * F + f
    tl.store(to_HF, (low * cos_low - high * sin_low).to(low_HF.dtype), mask=live_HF)
    tl.store(to_HF + F, (high * cos_high + low * sin_high).to(low_HF.dtype), mask=live_HF)


@triton.jit
def _pair(at, F: tl.constexpr, live):
    low = tl.load(at, mask=live, other=0.0).to(tl.float32)
    return low, tl.load(at + F, mask=live, other=0.0).to(tl.float32)
