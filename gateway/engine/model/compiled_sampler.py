"""`sampling.sample` on a CPU: the same tokens, without sorting a vocabulary.

S sequences, V vocabulary.
"""

from collections.abc import Sequence as Seq

import numpy as np
from torch import Tensor

from gateway.engine.kernels import compiled_choice
from gateway.engine.kernels.compiled_sampling import NOT_FINITE, scratch_size
from gateway.engine.kernels.team import team
from gateway.engine.model.sampling import Draw

SEEDS = 2**64


class CompiledSampler:
    def __init__(self, vocab_size: int, threads: int) -> None:
        self._team = team(threads)
        self._width = vocab_size
        self._scratch_MX = np.empty((threads, scratch_size(vocab_size)))

    def sample(self, logits_SV: Tensor, draws: Seq[Draw]) -> list[int | None]:
        """See `sampling.sample`; the logits are float32."""
        limits = [
            (each.temperature, each.top_k, each.top_p, each.min_p)
            for each in (draw.sampling for draw in draws)
        ]
        seeds = [(draw.sampling.seed % SEEDS, draw.position) for draw in draws]
        chosen_S = np.empty(len(draws), dtype=np.int64)
        self._team.run(
            compiled_choice.PHASES,
            compiled_choice.choose,
            logits_SV.numpy().reshape(-1),
            self._width,
            np.array(limits, dtype=np.float64).reshape(-1, 4),
            np.array(seeds, dtype=np.uint64).reshape(-1, 2),
            self._scratch_MX,
            chosen_S,
        )
        return [None if token == NOT_FINITE else token for token in chosen_S.tolist()]
