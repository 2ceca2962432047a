"""Every op of the engine in plain torch. This file is what the ops mean; the fast twins of a
device have the same names and arguments and are tested against it.

T tokens of the batch · D input width · C output columns · R rank rows · N pages · P page elements
B block tokens · H query heads · K KV heads · E head dimension · V vocabulary
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from gateway.engine.kernels.segments import AttentionSpan, LoraSegment, Work
from gateway.engine.memory.buffer import matrix


def linear(x_TD: Tensor, weight_CD: Tensor, bias_C: Tensor | None = None) -> Tensor:
    """x Wᵀ + bias."""
    return F.linear(x_TD, weight_CD, bias_C)


def write_kv(
    k_TKE: Tensor, v_TKE: Tensor, cache_N2BKE: Tensor, page_T: Tensor, slot_T: Tensor
) -> None:
    """Store the keys and values of each token in its page and slot."""
    cache_N2BKE[page_T, 0, slot_T] = k_TKE
    cache_N2BKE[page_T, 1, slot_T] = v_TKE


def paged_attention(
    q_THE: Tensor,
    cache_N2BKE: Tensor,
    spans: Work[AttentionSpan],
    scale: float,
    window: int | None,
) -> Tensor:
    """Causal attention of each span's tokens over all KV of its sequence (PagedAttention,
    arXiv 2309.06180, section 4.1), prefill and decode alike. Returns (T, H, E).

    `window`: a token sees itself and the `window - 1` tokens before it; None: all.
    """
    out_THE = torch.empty_like(q_THE)
    for span in spans:
        attend(q_THE, cache_N2BKE, span, scale, window, out_THE)
    return out_THE


def attend(
    q_THE: Tensor,
    cache_N2BKE: Tensor,
    span: AttentionSpan,
    scale: float,
    window: int | None,
    out_THE: Tensor,
) -> None:
    """One span of `paged_attention`, into its rows of `out_THE`."""
    kv_2LKE = cache_N2BKE[span.pages].transpose(0, 1).flatten(1, 2)[:, : span.context]
    k_KLE, v_KLE = kv_2LKE[0].transpose(0, 1), kv_2LKE[1].transpose(0, 1)
    q_HtE = q_THE[span.start : span.stop].transpose(0, 1)
    out_HtE = F.scaled_dot_product_attention(
        q_HtE[None],
        k_KLE[None],
        v_KLE[None],
        attn_mask=_mask(span.stop - span.start, span.context, window, q_THE.device),
        scale=scale,
        enable_gqa=q_HtE.shape[0] != k_KLE.shape[0],
    )[0]
    out_THE[span.start : span.stop] = out_HtE.transpose(0, 1)


def _mask(count: int, context: int, window: int | None, device: torch.device) -> Tensor | None:
    """(count, context): which keys each of the last `count` positions sees; None: all of them."""
    if count == 1 and (window is None or context <= window):
        return None
    query = torch.arange(context - count, context, device=device)[:, None]
    key = torch.arange(context, device=device)[None, :]
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def lora_shrink(
    x_TD: Tensor, pages_NP: Tensor, segments: Work[LoraSegment], layer: int, group: str
) -> list[Tensor | None]:
    """scale · x Aᵀ per segment, float32 (tokens of the segment, R of its adapter).

    All targets of the group in one pass over x. None where the adapter leaves the group alone.
    The intermediate of rank width is float32 whatever the weights are.
    """
    out: list[Tensor | None] = []
    for segment in segments:
        rows = segment.layout.groups.get((layer, group))
        if rows is None:
            out.append(None)
            continue
        a_RD = matrix(pages_NP, segment.pages, rows.shrink)
        x = x_TD[segment.start : segment.stop]
        scale_R = torch.tensor(rows.scales, device=x.device)
        out.append((x.float() @ a_RD.float().T) * scale_R)
    return out


def lora_gather(
    tokens_T: Tensor, pages_NP: Tensor, segments: Work[LoraSegment], layer: int, group: str
) -> list[Tensor | None]:
    """`lora_shrink` where the input is a token, not a vector: scale · column `token` of A."""
    out: list[Tensor | None] = []
    for segment in segments:
        rows = segment.layout.groups.get((layer, group))
        if rows is None:
            out.append(None)
            continue
        a_RV = matrix(pages_NP, segment.pages, rows.shrink)
        tokens = tokens_T[segment.start : segment.stop]
        scale_R = torch.tensor(rows.scales, device=tokens.device)
        out.append(a_RV.T[tokens].float() * scale_R)
    return out


def lora_expand(
    shrunk: Sequence[Tensor | None],
    pages_NP: Tensor,
    segments: Work[LoraSegment],
    layer: int,
    group: str,
    y_TC: Tensor,
) -> None:
    """Add (shrunk Bᵀ) to the group's fused output, in place. Accumulates in float32."""
    for segment, h_tR in zip(segments, shrunk, strict=True):
        if h_tR is None:
            continue
        y = y_TC[segment.start : segment.stop]
        for part in segment.layout.groups[layer, group].expand:
            b_RC = matrix(pages_NP, segment.pages, part.rows)
            y[:, part.columns] += (h_tR[:, part.ranks] @ b_RC.float()).to(y.dtype)


def silu_times_up(gate_up_TC: Tensor) -> Tensor:
    """silu(gate) · up, the halves of each row (SwiGLU, arXiv 2002.05202)."""
    gate_TF, up_TF = gate_up_TC.chunk(2, dim=-1)
    return F.silu(gate_TF) * up_TF


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last dimension, in float32 inside."""
    x = x_TD.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return weight_D * x.to(x_TD.dtype)


def rotate(x_THE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Rotary position embedding on half-split pairs (i, i + E/2), as Hugging Face orders them."""
    half = x_THE.shape[-1] // 2
    turned = torch.cat((-x_THE[..., half:], x_THE[..., :half]), dim=-1)
    return x_THE * cos_TE[:, None] + turned * sin_TE[:, None]
