"""One iteration's input as flat tensors: no padding anywhere (prepacking, arXiv 2404.09529).

The tokens of all slices lie one after another; positions, pages and adapters say which is whose.
T tokens, S sequences whose next token is to be chosen.
"""

from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from gateway.engine.kernels.gpu_upload import upload
from gateway.engine.kernels.segments import AttentionSpan, LoraSegment, Work
from gateway.engine.scheduling.plan import Slice


@dataclass(frozen=True, slots=True)
class Batch:
    tokens_T: Tensor
    positions_T: Tensor
    page_T: Tensor
    """Pool page that takes each token's KV."""
    slot_T: Tensor
    """Its place within that page."""
    spans: Work[AttentionSpan]
    lora: Work[LoraSegment]
    """One per distinct adapter; tokens without an adapter are in none."""
    embed: Work[LoraSegment]
    """`lora` if any of its adapters changes the input embeddings, else empty."""
    head: Work[LoraSegment]
    """The same for the output embeddings, over the S sampling tokens."""
    last_S: Tensor
    """Index of the last token of each sampling slice, in slice order."""

    @classmethod
    def pack(cls, slices: list[Slice], block_tokens: int, device: str) -> "Batch":
        tokens: list[int] = []
        positions: list[int] = []
        pages: list[int] = []
        spans: list[tuple[int, int, int]] = []
        span_pages: list[int] = []
        span_pages_stops: list[int] = []
        last: list[int] = []
        for sequence, count in slices:
            start, stop = sequence.computed, sequence.computed + count
            begin = len(tokens)
            tokens += sequence.tokens[start:stop]
            positions += range(start, stop)
            pages += (sequence.pages[position // block_tokens] for position in range(start, stop))
            span_pages += sequence.pages[: -(-stop // block_tokens)]
            span_pages_stops.append(len(span_pages))
            spans.append((begin, len(tokens), stop))
            if stop == len(sequence.tokens):
                last.append(len(tokens) - 1)
        lengths, samples = [item.length for item in slices], [int(item.samples) for item in slices]
        lora = Work(lora_segments(slices, lengths))
        # one list where all decode, so that what is derived from it serves all groups
        sampling = lora if samples == lengths else Work(lora_segments(slices, samples))
        tokens_T, positions_T, page_T, used, last_S = upload(
            [np.array(each, np.int64) for each in (tokens, positions, pages, span_pages, last)],
            torch.device(device),
        )
        pages_of_spans = used.tensor_split(span_pages_stops[:-1])
        return cls(
            tokens_T=tokens_T,
            positions_T=positions_T,
            page_T=page_T,
            slot_T=positions_T % block_tokens,
            spans=Work(
                [
                    AttentionSpan(*span, its_pages)
                    for span, its_pages in zip(spans, pages_of_spans, strict=True)
                ]
            ),
            lora=lora,
            embed=_if_any(lora, "embed"),
            head=_if_any(sampling, "head"),
            last_S=last_S,
        )


def lora_segments(slices: list[Slice], counts: list[int]) -> list[LoraSegment]:
    """Runs of tokens with the same adapter, `counts` of each slice; the plan has put them side by
    side."""
    segments: list[LoraSegment] = []
    start = 0
    counted = zip(slices, counts, strict=True)
    for digest, group in groupby(counted, key=lambda item: item[0].sequence.digest):
        members = list(group)
        stop = start + sum(count for _, count in members)
        adapter = members[0][0].sequence.adapter
        if digest is not None and start < stop:
            assert adapter is not None, f"adapter {digest} runs without a lease"
            segments.append(LoraSegment(start, stop, adapter.layout, adapter.pages, adapter.tables))
        start = stop
    return segments


def _if_any(segments: Work[LoraSegment], group: str) -> Work[LoraSegment]:
    has_any = any((0, group) in item.layout.groups for item in segments)
    return segments if has_any else Work([])
