"""Choosing the next token of every sequence in one pass over a mixed batch.

Each row is drawn from its own parameters with its own random number, made from (seed, position),
so that a request's tokens depend on nothing else in the batch and survive a preemption.
S sequences, V vocabulary.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gateway.engine.kernels.gpu_upload import Table, upload
from gateway.engine.messages import Sampling

NOT_FINITE = -1


class Draw(NamedTuple):
    sampling: Sampling
    position: int
    """Index of the token to be chosen within its sequence."""


Sampler = Callable[[Tensor, Seq[Draw]], list[int | None]]
"""See `sample`."""


def sample(logits_SV: Tensor, draws: Seq[Draw]) -> list[int | None]:
    """The chosen token of each row; None where a row's logits are not finite."""
    finite_S = logits_SV.isfinite().all(-1)
    logits_SV = logits_SV.float().masked_fill(~finite_S[:, None], 0.0)
    chosen_S = logits_SV.argmax(-1)
    random = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
    if random:
        drawn = [draws[row] for row in random]
        rows, parameters_5S = upload([np.array(random), _parameters(drawn)], logits_SV.device)
        chosen_S[rows] = _draw(logits_SV[rows], parameters_5S)
    # the one place where a step waits for the device
    chosen = chosen_S.masked_fill(~finite_S, NOT_FINITE).tolist()
    return [None if token == NOT_FINITE else token for token in chosen]


def _parameters(draws: Seq[Draw]) -> Table:
    """float64 (5, S): temperature, top-k, top-p, min-p, and the random number."""
    rows = [
        (
            draw.sampling.temperature,
            draw.sampling.top_k or np.inf,
            draw.sampling.top_p,
            draw.sampling.min_p,
            _uniform(draw),
        )
        for draw in draws
    ]
    return np.ascontiguousarray(np.array(rows, dtype=np.float64).T)


def _draw(logits_SV: Tensor, parameters_5S: Tensor) -> Tensor:
    """Temperature, then top-k, top-p and min-p on what each left (as Hugging Face's warpers
    applied in that order), then inverse transform sampling along descending probability."""
    temperature, top_k, top_p, min_p, uniform = parameters_5S[:, :, None].unbind()
    sorted_SV, order_SV = (logits_SV.double() / temperature).sort(
        dim=-1, descending=True, stable=True
    )
    rank_V = torch.arange(logits_SV.shape[-1], device=logits_SV.device)
    probability_SV = sorted_SV.masked_fill(rank_V >= top_k, -torch.inf).softmax(-1)
    before_SV = probability_SV.cumsum(-1) - probability_SV
    probability_SV = probability_SV.masked_fill((before_SV >= top_p) & (rank_V > 0), 0.0)
    probability_SV = probability_SV.masked_fill(probability_SV < min_p * probability_SV[:, :1], 0)
    cumulative_SV = probability_SV.cumsum(-1)
    point = uniform * cumulative_SV[:, -1:]
    # right=True: a point that equals a border belongs to the token above it, whose probability
    # is not zero; the border after the last kept token is never reached as uniform < 1.
    index = torch.searchsorted(cumulative_SV, point, right=True)
    kept = (probability_SV > 0).sum(-1, keepdim=True)
    return order_SV.gather(-1, index.clamp(max=kept - 1))[:, 0]


def _uniform(draw: Draw) -> float:
    """In [0, 1), a pure function of (seed, position): a counter-based generator (Philox)."""
    key = draw.sampling.seed % 2**64
    return float(np.random.Generator(np.random.Philox(key=key, counter=draw.position)).random())
