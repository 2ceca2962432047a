"""CUDA graphs of decoding: a step of one token per sequence is launched as a whole.

Without them a step costs the Python of every launch of every layer. A graph keeps what its launches
were recorded with, so a batch is padded to the next of a few sizes, and all that varies (sequences,
adapters, ranks, lengths) lies in tables that are filled anew for each step
(`gateway.engine.kernels.gpu_fixed`). There are two graphs of each size, with adapters and without,
whatever adapters there are or will be.
"""

from functools import partial

import torch
from torch import Tensor

from gateway.engine.kernels.gpu_fixed import Decode, FixedTables
from gateway.engine.kernels.gpu_graphs import Record, Run
from gateway.engine.kernels.segments import LoraSegment, Work
from gateway.engine.model.batch import Batch, lora_segments
from gateway.engine.model.decoder import Decoder
from gateway.engine.scheduling.plan import Slice


class NoGraphs:
    def forward(self, slices: list[Slice]) -> Tensor | None:
        return None


class DecodeGraphs:
    def __init__(self, decoder: Decoder, tables: FixedTables, rows_max: int) -> None:
        """None is recorded yet. `rows_max`: sequences of the largest batch."""
        self._decoder = decoder
        self._tables = tables
        self.sizes = sizes(rows_max)
        self._replays: dict[tuple[int, bool], Run] = {}

    def record(self, record: Record) -> None:
        """The largest first: the smaller ones fit into the memory that it took."""
        for rows in reversed(self.sizes):
            for adapted in True, False:
                forward = partial(self._decoder.forward, self._batch(rows, adapted))
                self._replays[rows, adapted] = record(forward)

    def forward(self, slices: list[Slice]) -> Tensor | None:
        """The logits (S, V) of a batch that only decodes, good until the next call; None for a
        batch that does not, or has more work than was recorded."""
        if len(slices) > self.sizes[-1] or any(item.sequence.pending != 1 for item in slices):
            return None
        rows = next(size for size in self.sizes if size >= len(slices))
        segments = lora_segments(slices, [1] * len(slices))
        if not self._tables.fill(rows, [self._decode(item) for item in slices], segments):
            return None
        return self._replays[rows, bool(segments)]()[: len(slices)]

    def _decode(self, item: Slice) -> Decode:
        position = item.sequence.computed
        pages = position // self._decoder.buffer.shape.block_tokens + 1
        return Decode(item.sequence.tokens[position], position, item.sequence.pages[:pages])

    def _batch(self, rows: int, adapted: bool) -> Batch:
        tokens_T, positions_T, page_T, slot_T = self._tables.step(rows)
        nothing: Work[LoraSegment] = Work([])
        lora = self._tables.lora(rows) if adapted else nothing
        return Batch(
            tokens_T=tokens_T,
            positions_T=positions_T,
            page_T=page_T,
            slot_T=slot_T,
            spans=self._tables.spans(rows),
            lora=lora,
            embed=lora,  # launched in any case; no adapter of a batch may have this group
            head=lora,
            last_S=torch.arange(rows, device=tokens_T.device),
        )


def sizes(rows_max: int) -> list[int]:
    """Powers of two, and the largest batch itself."""
    powers = [2**power for power in range((rows_max - 1).bit_length())]
    return [*powers, rows_max]
