"""The compiled decoder gives the logits of `Decoder` over the reference's ops: on tiny models of
every family and of odd sizes, base and adapters on all targets, prompts in chunks and decodes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from gateway.engine.kernels import compiled_step, reference
from gateway.engine.kernels.team import Claims
from gateway.engine.model import weights
from gateway.engine.model.compiled_decoder import CompiledDecoder
from gateway.engine.model.config import ModelConfig
from gateway.engine.model.decoder import Decoder
from gateway.engine.model.rope import Rope
from gateway.engine.model.weights import Weights
from tests.engine.model.random_decoders import (
    buffer_for,
    in_dtype,
    mixed_steps,
    random_weights,
)
from tests.engine.tiny import CONFIGS, save_model

CONTEXT = 64
ODD_SIZES = {
    "hidden_size": 35,
    "intermediate_size": 51,
    "heads": 3,
    "kv_heads": 1,
    "head_dim": 6,
    "vocab_size": 101,
}
"""No whole number of vectors, panels or pairs anywhere."""
ALMOST_EVEN = {
    "hidden_size": 66,
    "intermediate_size": 161,
    "heads": 10,
    "kv_heads": 2,
    "head_dim": 34,
    "vocab_size": 193,
}
"""One column, or two, more than whole vectors and panels have."""


class Case(NamedTuple):
    config: ModelConfig
    weights: Weights
    block_tokens: int


def odd(sizes: dict[str, int], tied: bool, extras: bool, window: int | None) -> ModelConfig:
    return ModelConfig(
        architecture="qwen3",
        layers=3,
        context_tokens=CONTEXT,
        rms_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
        tie_embeddings=tied,
        qkv_bias=extras,
        qk_norm=extras,
        sliding_window=window,
        eos_token_ids=[2],
        bos_token_id=1,
        **sizes,
    )


ODD = {
    "odd": odd(ODD_SIZES, tied=True, extras=True, window=None),
    "odd-untied-window": odd(ODD_SIZES, tied=False, extras=False, window=9),
    "almost-even": odd(ALMOST_EVEN, tied=False, extras=True, window=None),
}


@pytest.fixture(scope="module", params=[*sorted(CONFIGS), *ODD])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    if request.param in ODD:
        return Case(ODD[request.param], random_weights(ODD[request.param]), 5)
    folder: Path = tmp_path_factory.mktemp(request.param)
    save_model(CONFIGS[request.param], folder)
    config, loaded, _ = weights.load(folder, torch.float32)
    return Case(config, loaded, 4)


def by_reference(case: Case, dtype: torch.dtype, rounded: Weights) -> list[Tensor]:
    config = case.config
    buffer = buffer_for(config, case.block_tokens, dtype)
    rope = Rope(config, CONTEXT, "cpu")
    return list(mixed_steps(Decoder(config, in_dtype(rounded, dtype), rope, buffer, reference)))


def compiled(case: Case, dtype: torch.dtype, threads: int) -> list[Tensor]:
    config = case.config
    buffer = buffer_for(config, case.block_tokens, dtype)
    given = in_dtype(case.weights, dtype)
    decoder = CompiledDecoder(config, given, Rope(config, CONTEXT, "cpu"), buffer, threads)
    assert not given.layers  # packed one after another, never twice in memory
    return list(mixed_steps(decoder))


@pytest.mark.parametrize("threads", [1, 3])
def test_float32_logits_are_the_decoders(case: Case, threads: int):
    got, expected = (
        torch.cat(steps)
        for steps in (
            compiled(case, torch.float32, threads),
            by_reference(case, torch.float32, case.weights),
        )
    )
    torch.testing.assert_close(got, expected, atol=2e-4, rtol=0)


def test_bfloat16_logits_are_nearer_to_exact_ones_than_op_by_op(case: Case):
    """Sums, the residual stream, norms and what adapters add stay in float32 here, and so do the
    logits; op by op all of them are rounded. So the mean error must be the smaller one, and the
    largest, of some thousand, not by chance the larger by much."""
    rounded = in_dtype(case.weights, torch.bfloat16)
    exact = torch.cat(by_reference(case, torch.float32, rounded))
    op_by_op = (torch.cat(by_reference(case, torch.bfloat16, rounded)) - exact).abs()
    ours = (torch.cat(compiled(case, torch.bfloat16, 2)) - exact).abs()
    assert ours.mean() <= 0.8 * op_by_op.mean()
    assert ours.max() <= 1.2 * op_by_op.max()


def test_no_batch_is_of_types_of_its_own():
    """Else a request would wait for the compiler."""
    forward: Any = compiled_step.forward
    assert len(forward.signatures) <= 2


def test_a_thread_that_comes_after_a_step_is_done_changes_nothing():
    """It has the arguments of that step, while the next may be at work on the same arrays."""
    config = ODD["odd"]
    buffer = buffer_for(config, 5, torch.float32)
    rope = Rope(config, CONTEXT, "cpu")
    decoder = CompiledDecoder(config, random_weights(config), rope, buffer, 2)
    runs = []
    run = decoder._team.run

    def keep(phases: int, *job: Any) -> Claims:
        claims = run(phases, *job)
        runs.append((claims, job))
        return claims

    late = SimpleNamespace(run=keep, threads=2)
    decoder._team = late  # type: ignore[assignment]
    for _ in mixed_steps(decoder):
        before = buffer.pages_NP.clone(), [array.copy() for array in decoder._scratch]
        for claims, (forward, *arguments) in runs:
            forward(claims, *arguments)
        assert torch.equal(buffer.pages_NP.nan_to_num(6e4), before[0].nan_to_num(6e4))
        for array, was in zip(decoder._scratch, before[1], strict=True):
            assert np.array_equal(array, was, equal_nan=True)
    assert len(runs) == 5
