"""A first batch, so that no request waits for a kernel to be compiled.

It has one of each kind of work: a decode, a prefill, an adapter on every target, and a draw.
Kernels are compiled for shapes of the model, never for those of a batch, so this is enough.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch

from gateway.engine.kernels.segments import AttentionSpan, LoraSegment, Work
from gateway.engine.memory.rows import RowLayout, TargetRank
from gateway.engine.messages import EMBEDDINGS, Sampling
from gateway.engine.model.batch import Batch
from gateway.engine.model.compiled_decoder import CompiledDecoder
from gateway.engine.model.decoder import Decoder
from gateway.engine.model.sampling import Draw, Sampler, sample


@torch.inference_mode()
def warm_up(
    decoder: Decoder | CompiledDecoder,
    projections: Mapping[str, tuple[int, int]],
    choose: Sampler = sample,
) -> None:
    """Before anything lies in the pool: uses its first two pages, and leaves them zero."""
    buffer = decoder.buffer
    ranks = dict.fromkeys(storable(decoder, projections), TargetRank(1, 1.0))
    layout = RowLayout.plan(ranks, projections, buffer.shape.page_elements)
    rows_in_zeros = LoraSegment(0, 3, layout, [0] * layout.pages)
    pages = torch.tensor([0, 0, 1], device=buffer.device)
    pages_of_two = 1 if buffer.shape.block_tokens > 1 else 2
    logits_SV = decoder.forward(
        Batch(
            tokens_T=torch.zeros_like(pages),
            positions_T=torch.zeros_like(pages),
            page_T=pages,
            slot_T=torch.zeros_like(pages),
            spans=Work(
                [
                    AttentionSpan(0, 1, 1, pages[:1]),
                    AttentionSpan(1, 3, 2, pages[1 : 1 + pages_of_two]),
                ]
            ),
            lora=Work([rows_in_zeros]),
            embed=Work([rows_in_zeros]),
            head=Work([replace(rows_in_zeros, stop=1)]),
            last_S=pages[:1],
        )
    )
    choose(logits_SV, [Draw(Sampling(), 0)])
    buffer.pages_NP[:2] = 0


def storable(
    decoder: Decoder | CompiledDecoder, projections: Mapping[str, tuple[int, int]]
) -> list[tuple[int, str]]:
    """Layers and targets that an adapter can have; one with a row longer than a page is refused
    when it is read."""
    page_elements = decoder.buffer.shape.page_elements
    return [
        (layer, target)
        for layer in range(decoder.config.layers)
        for target, shape in projections.items()
        if max(shape) <= page_elements and (layer == 0 or target not in EMBEDDINGS)
    ]
