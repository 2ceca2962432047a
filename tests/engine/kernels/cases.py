"""Random inputs of the kernels, and how far an implementation is from the reference on them.

Needs torch alone, so that a machine with a GPU can check its kernels with these.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from gateway.engine.kernels import reference
from gateway.engine.kernels.segments import AttentionSpan, LoraSegment, Work
from gateway.engine.memory.buffer import KvShape, PageBuffer, store
from gateway.engine.memory.rows import GROUPS, RowLayout, TargetRank

LAYER = 1
SPARE_PAGES = 3
Ranks = dict[str, int]
"""Rank by target."""


class Tolerance(NamedTuple):
    absolute: float
    relative: float

    @classmethod
    def of(cls, dtype: torch.dtype) -> "Tolerance":
        return cls(2e-5, 2e-5) if dtype == torch.float32 else cls(2e-2, 2e-2)

    def share(self, got: Tensor, expected: Tensor) -> float:
        """The largest error as a share of what is allowed; NaN where any value is NaN."""
        error = (got.double() - expected.double()).abs()
        return float((error / (self.absolute + self.relative * expected.double().abs())).max())


class AttentionCase(NamedTuple):
    q_THE: Tensor
    k_TKE: Tensor
    v_TKE: Tensor
    buffer: PageBuffer
    spans: Work[AttentionSpan]
    page_T: Tensor
    slot_T: Tensor
    scale: float


def attention_case(
    lengths: Sequence[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_tokens: int,
    dtype: torch.dtype,
    device: str = "cpu",
    seed: int = 0,
) -> AttentionCase:
    """Sequences with KV of (past) tokens in their pages and (new) ones to compute. What no
    sequence wrote is NaN, and no sequence's pages are in order."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    needed = [-(-(past + new) // block_tokens) for past, new in lengths]
    shape = KvShape(2, block_tokens, kv_heads, head_dim)
    buffer = PageBuffer(sum(needed) + SPARE_PAGES, shape, dtype, device)
    buffer.pages_NP.fill_(torch.nan)
    order = torch.randperm(sum(needed) + SPARE_PAGES, generator=generator, device=device)
    spans, pages_of_new, slots_of_new, start = [], [], [], 0
    for (past, new), pages in zip(lengths, order.split([*needed, SPARE_PAGES]), strict=False):
        position = torch.arange(past + new, device=device)
        page, slot = pages[position // block_tokens], position % block_tokens
        cache = buffer.kv_layers[LAYER]
        cache[page[:past], 0, slot[:past]] = random(past, kv_heads, head_dim)
        cache[page[:past], 1, slot[:past]] = random(past, kv_heads, head_dim)
        spans.append(AttentionSpan(start, start + new, past + new, pages))
        pages_of_new.append(page[past:])
        slots_of_new.append(slot[past:])
        start += new
    # as the decoder makes them: slices of one fused projection
    qkv = random(start, heads + 2 * kv_heads, head_dim)
    q_THE, k_TKE, v_TKE = qkv.tensor_split([heads, heads + kv_heads], dim=1)
    page_T, slot_T = torch.cat(pages_of_new), torch.cat(slots_of_new)
    return AttentionCase(q_THE, k_TKE, v_TKE, buffer, Work(spans), page_T, slot_T, head_dim**-0.5)


def attention_error(kernels: ModuleType, case: AttentionCase, window: int | None) -> float:
    """Of `write_kv`, then `paged_attention`, against the reference in float64."""
    pages_NP = case.buffer.pages_NP.clone()
    cache = case.buffer.kv_layers[LAYER]
    reference.write_kv(case.k_TKE, case.v_TKE, cache, case.page_T, case.slot_T)
    expected_NP = case.buffer.pages_NP.clone()
    expected = reference.paged_attention(
        case.q_THE.double(), cache.double(), case.spans, case.scale, window
    )
    case.buffer.pages_NP.copy_(pages_NP)
    kernels.write_kv(case.k_TKE, case.v_TKE, cache, case.page_T, case.slot_T)
    if not torch.equal(case.buffer.pages_NP.nan_to_num(6e4), expected_NP.nan_to_num(6e4)):
        return float("inf")
    got = kernels.paged_attention(case.q_THE, cache, case.spans, case.scale, window)
    return Tolerance.of(got.dtype).share(got, expected)


class LoraCase(NamedTuple):
    x_TD: Tensor
    """Of the group `embed` the tokens, (T,)."""
    y_TC: Tensor
    pages_NP: Tensor
    segments: Work[LoraSegment]
    group: str


def lora_case(
    adapters: Sequence[Ranks],
    tokens: Sequence[tuple[int | None, int]],
    projections: dict[str, tuple[int, int]],
    group: str,
    page_elements: int,
    dtype: torch.dtype,
    device: str = "cpu",
    seed: int = 0,
) -> LoraCase:
    """`tokens`: runs of (index of the adapter or None, tokens). Layer 0 of each adapter has only
    its first target, so that layers differ. What no adapter wrote is NaN."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    layouts = [_layout(ranks, projections, page_elements) for ranks in adapters]
    total = sum(layout.pages for layout in layouts)
    pages_NP = torch.full(
        (total + SPARE_PAGES, page_elements), torch.nan, dtype=dtype, device=device
    )
    order = torch.randperm(total + SPARE_PAGES, generator=generator, device=device).tolist()
    placed: list[tuple[RowLayout, list[int], dict[str, object]]] = []
    for layout in layouts:
        pages = [order.pop() for _ in range(layout.pages)]
        for rows in layout.groups.values():
            # divided so that outputs are of the size of the inputs
            a_RD = random(rows.rank, rows.shrink.width) / rows.shrink.width**0.5
            store(pages_NP, pages, rows.shrink, a_RD)
            for part in rows.expand:
                rank = part.ranks.stop - part.ranks.start
                store(pages_NP, pages, part.rows, random(rank, part.rows.width) / rank**0.5)
        placed.append((layout, pages, {}))
    segments, start = [], 0
    for index, count in tokens:
        if index is not None:
            segments.append(LoraSegment(start, start + count, *placed[index]))
        start += count
    inputs = projections[GROUPS[group][0]][1]
    outputs = sum(projections[target][0] for target in GROUPS[group])
    if group == "embed":
        x_TD = torch.randint(inputs, (start,), generator=generator, device=device)
    else:
        x_TD = random(start, inputs)
    return LoraCase(x_TD, random(start, outputs), pages_NP, Work(segments), group)


def _layout(ranks: Ranks, projections: dict[str, tuple[int, int]], page_elements: int) -> RowLayout:
    of_layers = {(LAYER, target): TargetRank(rank, 2.0 / rank) for target, rank in ranks.items()}
    if ranks:
        first, rank = next(iter(ranks.items()))
        of_layers[0, first] = TargetRank(rank, 0.5)
    return RowLayout.plan(of_layers, projections, page_elements)


def lora_error(kernels: ModuleType, case: LoraCase, layer: int = LAYER) -> float:
    """Of `lora_shrink` or `lora_gather`, then `lora_expand`, against the reference."""
    expected, got = case.y_TC.double(), case.y_TC.clone()
    lora(reference, case, layer, expected)
    lora(kernels, case, layer, got)
    return Tolerance.of(got.dtype).share(got, expected)


def lora(kernels: ModuleType, case: LoraCase, layer: int, y_TC: Tensor) -> None:
    """Both halves of a group, added to `y_TC`."""
    place = case.pages_NP, case.segments, layer, case.group
    first = kernels.lora_gather if case.group == "embed" else kernels.lora_shrink
    kernels.lora_expand(first(case.x_TD, *place), *place, y_TC)
