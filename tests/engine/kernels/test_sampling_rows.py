"""The compiled choice of a token against the torch formulation of `model.sampling`, in float64."""

import itertools
from typing import NamedTuple

import numpy as np
import pytest
import torch
from numba import njit

from gateway.engine.kernels import tiles_sampling
from gateway.engine.kernels.compiled_sampling import NOT_FINITE, draw, greedy, scratch_size
from gateway.engine.kernels.philox import uniform
from gateway.engine.model.sampling import _draw

BORDER = 1e-12
"""Relative. Nearer to a border than this, sums in another order may choose its other side."""
RANDOM_MAX = 1 - 2.0**-53
VOCABULARY = 49152


class Parameters(NamedTuple):
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    random: float = 0.5


def drawn(row: np.ndarray, parameters: Parameters) -> int:
    temperature, top_k, top_p, min_p, random = parameters
    scratch = np.full(scratch_size(len(row)), np.nan)
    token: int = draw(row, 0, len(row), temperature, top_k, top_p, min_p, random, scratch)
    return token


def expected(rows: np.ndarray, parameters: list[Parameters]) -> list[int]:
    table = np.array(parameters, dtype=np.float64)
    table[table[:, 1] == 0, 1] = np.inf
    table_5S = torch.from_numpy(np.ascontiguousarray(table.T))
    return _draw(torch.from_numpy(rows), table_5S).tolist()


def near_a_border(row: np.ndarray, parameters: Parameters, token: int) -> bool:
    """Does the token lie between those of the definition with limits a rounding away?"""
    nudged = [
        parameters._replace(
            top_p=parameters.top_p * (1 + a * BORDER),
            min_p=min(parameters.min_p * (1 + b * BORDER), 1.0),
            random=parameters.random * (1 + c * BORDER),
        )
        for a, b, c in itertools.product([-1, 0, 1], repeat=3)
    ]
    rank = np.argsort(np.argsort(-row, kind="stable"))
    ranks = [rank[expected(row[None], [one])[0]] for one in nudged]
    return bool(min(ranks) <= rank[token] <= max(ranks))


def logits(rng: np.random.Generator, kind: str, width: int) -> np.ndarray:
    row = rng.standard_normal(width)
    if kind == "flat":
        row *= 10.0 ** rng.uniform(-8, -1)
    elif kind == "equal":
        row[:] = row[0]
    elif kind == "spread":
        row *= 10.0 ** rng.uniform(-1, 1.5)
    elif kind == "ties":
        row = np.round(row * 4) / rng.choice([1.0, 4.0])
    elif kind == "peaked":
        row[rng.integers(width)] += rng.uniform(5, 40)
    elif kind == "clumps":
        row = np.round(row) * 3 + row * 1e-5
    elif kind == "huge":
        row *= 1e37
    elif kind == "small":
        row *= 1e-41  # subnormal
    elif kind == "far":
        row = np.where(rng.random(width) < 0.5, -1e4, row)
    return row.astype(np.float32)


KINDS = ["flat", "equal", "spread", "ties", "peaked", "clumps", "huge", "small", "far"]


def any_parameters(rng: np.random.Generator, width: int) -> Parameters:
    return Parameters(
        temperature=rng.choice([10.0 ** rng.uniform(-6, 2), rng.uniform(0.2, 2)]),
        top_k=int(rng.choice([0, 0, 1, 40, int(rng.integers(1, width + 1)), width, 2**31])),
        top_p=rng.choice([1.0, 1.0, rng.random(), 0.9, 10.0 ** rng.uniform(-9, 0), 0.0]),
        min_p=rng.choice([0.0, 0.0, rng.random(), 10.0 ** rng.uniform(-9, 0), 1.0]),
        random=rng.choice([rng.random(), rng.random(), rng.random() * 1e-9, 0.0, RANDOM_MAX]),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("width", "count"), [(1, 40), (2, 100), (16, 150), (257, 250), (3000, 150), (VOCABULARY, 20)]
)
def test_the_token_drawn_is_the_one_of_the_definition(kind: str, width: int, count: int):
    rng = np.random.default_rng([width, KINDS.index(kind)])
    rows = np.stack([logits(rng, kind, width) for _ in range(count)])
    parameters = [any_parameters(rng, width) for _ in range(count)]
    found = [drawn(row, one) for row, one in zip(rows, parameters, strict=True)]
    wanted = expected(rows, parameters)
    others = [i for i in range(count) if found[i] != wanted[i]]
    for i in others:
        assert near_a_border(rows[i], parameters[i], found[i]), parameters[i]
    if kind not in ("equal", "small"):  # whose borders are fractions, where a limit may well lie
        assert len(others) <= count // 50


@pytest.mark.parametrize("random", [0.0, 0.3, 0.9, 0.99, 0.999, 0.9999, 1 - 1e-9])
@pytest.mark.parametrize("top_k", [0, 1, 50, 5000])
@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 2.0])
def test_a_token_far_down_is_found(temperature: float, top_k: int, random: float):
    row = logits(np.random.default_rng(7), "spread", VOCABULARY)
    parameters = Parameters(temperature=temperature, top_k=top_k, random=random)
    assert [drawn(row, parameters)] == expected(row[None], [parameters])


@pytest.mark.parametrize("random", [0.0, 0.25, 0.5, 0.75])
def test_a_point_on_a_border_belongs_to_the_token_above_it(random: float):
    row, parameters = np.zeros(4, dtype=np.float32), Parameters(random=random)
    assert drawn(row, parameters) == 4 * random
    assert [drawn(row, parameters)] == expected(row[None], [parameters])


def test_a_row_is_drawn_alike_wherever_it_lies_and_whatever_was_drawn_before():
    rng = np.random.default_rng(3)
    width = 1001
    rows = np.stack([logits(rng, kind, width) for kind in KINDS])
    scratch = np.empty(scratch_size(4 * width))
    for parameters in [any_parameters(rng, width) for _ in range(30)]:
        alone = [drawn(row, parameters) for row in rows]
        temperature, top_k, top_p, min_p, random = parameters
        together = [
            draw(rows.ravel(), i * width, width, temperature, top_k, top_p, min_p, random, scratch)
            for i in range(len(rows))
        ]
        assert together == alone


@pytest.mark.parametrize("width", [1, 15, 16, 17, 63, 64, 65, 130, 1000])
def test_greedy_is_the_first_of_the_largest(width: int):
    rng = np.random.default_rng(width)
    for _ in range(200):
        row = rng.integers(-4, 4, width + 3).astype(np.float32)
        row[row == 0] *= rng.choice([-1, 1])  # zeros of both signs are equal
        assert greedy(row, 3, width) == np.argmax(row[3:])


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("width", [1, 17, 64, 100])
def test_a_row_with_anything_not_finite_gives_no_token(width: int, bad: float):
    for place in range(width):
        row = np.zeros(width + 1, dtype=np.float32)
        row[place] = bad
        assert greedy(row, 0, width) == NOT_FINITE
        assert drawn(row[:width], Parameters()) == NOT_FINITE
    # what lies behind the row is not its own
    row = np.zeros(width + 1, dtype=np.float32)
    row[width] = bad
    assert greedy(row, 0, width) == 0


def test_collecting_lane_by_lane_writes_the_same(monkeypatch: pytest.MonkeyPatch):
    row = logits(np.random.default_rng(1), "spread", 1000)

    def collected() -> list[np.ndarray]:
        @njit
        def collect(row, low, top, tokens, weights, buckets):
            return tiles_sampling.collect(
                row, 0, len(row), low, top, 0.7, 20.0, 511.0, tokens, weights, buckets
            )

        columns = [np.zeros(len(row) + 16, dtype) for dtype in (np.int32, np.float64, np.int32)]
        count = collect(row, np.float32(0), float(row.max()), *columns)
        return [column[:count] for column in columns]

    usual = collected()
    monkeypatch.setattr(tiles_sampling, "COMPRESSES", not tiles_sampling.COMPRESSES)
    for a, b in zip(usual, collected(), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(usual[0], np.flatnonzero(row >= 0))


def test_a_weight_is_within_two_ulp_of_exp():
    @njit
    def collect(row, temperature, tokens, weights, buckets):
        return tiles_sampling.collect(
            row, 0, len(row), row[-1], 0.0, temperature, 1.0, 511.0, tokens, weights, buckets
        )

    row = np.linspace(0, -52, 5000, dtype=np.float32)
    columns = [np.zeros(len(row) + 16, dtype) for dtype in (np.int32, np.float64, np.int32)]
    assert collect(row, 1.0, *columns) == len(row)
    exact = np.exp(row.astype(np.longdouble))
    error = np.abs(columns[1][: len(row)] - exact) / np.spacing(exact.astype(np.float64))
    assert error.max() <= 2


SEEDS = [0, 1, 42, -1, -(2**63), 2**63 - 1, 2**63, 2**64 - 1]


@pytest.mark.parametrize("position", [0, 1, 2, 1000, 2**31, 2**62])
def test_random_numbers_are_numpys(position: int):
    more = np.random.default_rng(position).integers(-(2**63), 2**63 - 1, 200).tolist()
    for seed in SEEDS + more:
        key = seed % 2**64
        theirs = np.random.Generator(np.random.Philox(key=key, counter=position)).random()
        assert uniform(np.uint64(key), position) == theirs
        if -(2**63) <= seed < 2**63:
            assert uniform(seed, position) == theirs
