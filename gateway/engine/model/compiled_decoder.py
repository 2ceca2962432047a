"""The decoder on a CPU: weights packed once, each step one compiled call on all threads.

T tokens · S sampling tokens · D hidden size · V vocabulary
"""

import numpy as np
import torch
from torch import Tensor

from gateway.engine.kernels import compiled_step, panels
from gateway.engine.kernels.segments import LoraSegment, Work
from gateway.engine.kernels.step_data import Array, Pool, Scratch, Tokens, Units, flat
from gateway.engine.kernels.team import OVER, team
from gateway.engine.memory.buffer import PageBuffer
from gateway.engine.model import packed_weights
from gateway.engine.model.batch import Batch
from gateway.engine.model.config import ModelConfig
from gateway.engine.model.rope import Rope
from gateway.engine.model.step_units import attention_units, lora_units
from gateway.engine.model.weights import Weights


class CompiledDecoder:
    """Does what `Decoder` does, in float32 or bfloat16, with `threads` threads. Takes the layers
    out of `weights`."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        rope: Rope,
        buffer: PageBuffer,
        threads: int,
    ) -> None:
        self.config = config
        self.buffer = buffer
        self._team = team(threads)
        self._model = packed_weights.pack(config, weights, rope)
        self._pool = Pool(
            flat(buffer.pages_NP), buffer.shape.page_elements, buffer.shape.block_tokens
        )
        self._stages = compiled_step.stages(config.layers)
        self._over: Array = np.zeros(len(self._stages), dtype=np.int64)
        self._room = 0, 0, 0
        self._make_room(1, 1, 1)

    def forward(self, batch: Batch) -> Tensor:
        """See `Decoder.forward`. The logits are float32, and good until the next call."""
        rows, samples = len(batch.tokens_T), len(batch.last_S)
        units = self._units(batch.lora, rows)
        sampling = self._units(batch.head, samples if batch.head else 0)
        self._make_room(rows, samples, max(units.rank_max, sampling.rank_max))
        tokens = Tokens(
            flat(batch.tokens_T),
            flat(batch.positions_T),
            flat(batch.page_T),
            flat(batch.last_S),
        )
        attention = attention_units(
            batch.spans,
            rows,
            self.config.heads,
            self.config.kv_heads,
            self.buffer.shape.block_tokens,
        )
        claims = self._team.run(
            len(self._stages),
            compiled_step.forward,
            self._model,
            self._pool,
            tokens,
            units,
            sampling,
            attention,
            self._scratch,
        )
        self._over = claims[:, OVER]
        logits = torch.from_numpy(self._scratch.logits_SV)
        vocabulary = self.config.vocab_size
        return logits[: samples * vocabulary].view(samples, vocabulary)

    def stages(self) -> dict[str, float]:
        """Share of each stage in the time of the last forward pass; what lies between two stages,
        waiting for others included, counts with the second. On x86."""
        spent = np.diff(self._over)
        shares: dict[str, float] = {}
        for name, ticks in zip(self._stages[1:], spent / spent.sum(), strict=True):
            shares[name] = shares.get(name, 0.0) + float(ticks)
        return shares

    def _units(self, segments: Work[LoraSegment], rows: int) -> Units:
        return lora_units(segments, rows, self._team.threads, self._pool.page)

    def _make_room(self, rows: int, samples: int, rank: int) -> None:
        had = self._room
        room = max(had[0], rows), max(had[1], samples), max(had[2], rank)
        if room != self._room:
            self._room = room
            self._scratch = _scratch(self.config, self.buffer.dtype, *room)


def _scratch(
    config: ModelConfig, dtype: torch.dtype, rows: int, samples: int, rank: int
) -> Scratch:
    """Zeros: what fills a row up to whole pairs is read, and never written."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_columns, kv_columns = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def elements(width: int) -> Array:
        return flat(torch.zeros(rows * panels.row_elements(width, dtype), dtype=dtype))

    def floats(size: int) -> Array:
        return np.zeros(size, dtype=np.float32)

    return Scratch(
        x_TD=floats(rows * hidden),
        input_TD=elements(hidden),
        attended_TO=elements(q_columns),
        hidden_TF=elements(inner),
        y_TC=floats(rows * max(q_columns + 2 * kv_columns, 2 * inner, hidden)),
        q_TO=flat(torch.zeros(rows * q_columns, dtype=dtype)),
        shrunk_TR=floats(rows * rank),
        logits_SV=floats(samples * config.vocab_size),
    )
