"""The sampler's distribution against transformers' logits warpers, and its independence."""

import itertools

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from gateway.engine.messages import Sampling
from gateway.engine.model.sampling import Draw, sample

VOCABULARY = 50
DRAWS = 4000
PARAMETERS = [
    Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature, top_k, top_p, min_p in itertools.product(
        [0.5, 1.3], [0, 7], [1.0, 0.8], [0.0, 0.1]
    )
]


def logits(seed: int, rows: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, VOCABULARY, generator=generator) * 2


def expected(row: torch.Tensor, sampling: Sampling) -> np.ndarray:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return (
        warpers(torch.LongTensor([[0]]), torch.FloatTensor(row[None]))
        .softmax(-1)[0]
        .double()
        .numpy()
    )


@pytest.mark.parametrize("sampling", PARAMETERS, ids=str)
def test_the_distribution_is_that_of_transformers(sampling: Sampling):
    row = logits(3)[0]
    draws = [Draw(sampling, position) for position in range(DRAWS)]
    chosen = sample(row.expand(DRAWS, -1), draws)
    counts = np.bincount(np.array(chosen, dtype=int), minlength=VOCABULARY)
    probability = expected(row, sampling)
    assert not counts[probability == 0].any(), "a token that the warpers rule out was drawn"
    kept = probability > 0
    chi_squared = (
        (counts[kept] - DRAWS * probability[kept]) ** 2 / (DRAWS * probability[kept])
    ).sum()
    freedom = kept.sum() - 1
    # mean + 5 standard deviations of the chi-squared distribution; the draws are fixed
    assert chi_squared <= freedom + 5 * (2 * freedom) ** 0.5


def test_temperature_zero_is_greedy():
    rows = logits(1, rows=6)
    chosen = sample(rows, [Draw(Sampling(temperature=0, seed=s), 9) for s in range(6)])
    assert chosen == rows.argmax(-1).tolist()


def test_a_row_depends_on_its_own_seed_and_position_only():
    rows = logits(2, rows=8)
    draws = [Draw(PARAMETERS[i % len(PARAMETERS)], 10 + i) for i in range(8)]
    together = sample(rows, draws)
    alone = [sample(rows[i : i + 1], [draws[i]])[0] for i in range(8)]
    assert together == alone
    assert sample(rows.flip(0), draws[::-1])[::-1] == together


def test_other_seeds_and_positions_draw_other_tokens():
    row = torch.zeros(1, VOCABULARY)
    by_seed = {sample(row, [Draw(Sampling(seed=seed), 5)])[0] for seed in range(200)}
    by_position = {sample(row, [Draw(Sampling(seed=5), p)])[0] for p in range(200)}
    assert len(by_seed) > VOCABULARY * 0.8
    assert len(by_position) > VOCABULARY * 0.8


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**63 - 1])
def test_any_64_bit_seed_is_taken(seed: int):
    assert sample(logits(0), [Draw(Sampling(seed=seed), 0)])[0] is not None


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_fails_alone(bad: float):
    rows = logits(4, rows=3)
    rows[1, 7] = bad
    greedy, warm = Sampling(temperature=0), Sampling()
    for sampling in (greedy, warm):
        chosen = sample(rows, [Draw(sampling, 1)] * 3)
        assert chosen[1] is None
        assert chosen[0] is not None
        assert chosen[2] is not None


@pytest.mark.parametrize("top_p", [1e-9, 0.0])
def test_the_most_likely_token_always_remains(top_p: float):
    rows = logits(5, rows=2)
    sampling = Sampling(top_p=top_p, min_p=1.0)
    assert sample(rows, [Draw(sampling, 0)] * 2) == rows.argmax(-1).tolist()
