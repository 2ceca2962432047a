"""Every op of `gpu` against the reference on random ragged shapes, under Triton's interpreter.

Not collected with the other tests: `test_gpu.py` runs this file in a process of its own, as the
interpreter must be chosen before Triton is imported.
"""

import random
from collections.abc import Sequence
from itertools import pairwise
from types import ModuleType

import pytest
import torch

from tests.engine.kernels.interpreter import use_interpreter

use_interpreter()

from gateway.engine.kernels import gpu, gpu_invariant, reference  # noqa: E402
from gateway.engine.kernels.segments import AttentionSpan, LoraSegment, Work  # noqa: E402
from gateway.engine.memory.rows import GROUPS  # noqa: E402
from tests.engine.kernels.cases import (  # noqa: E402
    Ranks,
    Tolerance,
    attention_case,
    attention_error,
    lora_case,
    lora_error,
)
from tests.engine.kernels.tiny_decoder import decoder_with, mixed_steps  # noqa: E402

RANKS = [1, 3, 4, 12, 40]
DTYPES = [torch.float32, torch.bfloat16]
RAGGED = {
    "q_proj": (24, 40),
    "k_proj": (8, 40),
    "v_proj": (8, 40),
    "o_proj": (40, 24),
    "gate_proj": (56, 40),
    "up_proj": (56, 40),
    "down_proj": (40, 56),
    "embed_tokens": (40, 150),
    "lm_head": (150, 40),
}
ALIGNED = {
    "q_proj": (192, 160),
    "k_proj": (64, 160),
    "v_proj": (64, 160),
    "o_proj": (160, 192),
    "gate_proj": (1040, 160),
    "up_proj": (1040, 160),
    "down_proj": (160, 1040),
    "embed_tokens": (160, 1280),
    "lm_head": (1280, 160),
}
"""`down` reads more than one split of its input."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("group", [1, 3, 4])
def test_attention_of_prefill_and_decode_mixed(group: int, window: int | None, dtype: torch.dtype):
    lengths = [(0, 1), (129, 1), (7, 2), (60, 23), (3, 1)]
    case = attention_case(lengths, 2 * group, 2, 16, 8, dtype, seed=group)
    assert attention_error(gpu, case, window) <= 1


def test_in_a_window_of_one_a_token_sees_itself_alone():
    case = attention_case([(0, 3), (70, 2), (130, 1)], 2, 1, 16, 8, torch.float32)
    assert attention_error(gpu, case, 1) <= 1


@pytest.mark.parametrize("head_dim", [8, 24, 128])
def test_attention_with_heads_of_any_size(head_dim: int):
    case = attention_case([(33, 1), (5, 9)], 4, 2, head_dim, 4, torch.float32)
    assert attention_error(gpu, case, None) <= 1


@pytest.mark.parametrize("seed", range(4))
def test_attention_of_random_batches(seed: int):
    draw = random.Random(seed)
    lengths = [
        (draw.randrange(100), draw.choice([1, 1, draw.randint(1, 30)]))
        for _ in range(draw.randint(1, 6))
    ]
    case = attention_case(lengths, 6, 2, 16, draw.choice([1, 3, 16]), torch.float32, seed=seed)
    assert attention_error(gpu, case, draw.choice([None, 9])) <= 1


def test_attention_joins_the_splits_of_long_contexts():
    lengths = [(600, 1), (255, 1), (256, 1), (250, 12), (4300, 1)]
    case = attention_case(lengths, 2, 1, 16, 16, torch.float32)
    assert attention_error(gpu, case, None) <= 1
    assert attention_error(gpu, case, 300) <= 1
    case = attention_case([(2040, 20)], 2, 1, 16, 16, torch.bfloat16)
    assert attention_error(gpu, case, None) <= 1


def test_a_sequence_has_the_same_bits_alone_and_in_a_batch_and_however_its_prompt_is_cut():
    whole = attention_case([(0, 40), (300, 1), (250, 12)], 2, 1, 16, 8, torch.float32)
    cache = whole.buffer.kv_layers[1]
    gpu.write_kv(whole.k_TKE, whole.v_TKE, cache, whole.page_T, whole.slot_T)
    together = gpu.paged_attention(whole.q_THE, cache, whole.spans, whole.scale, None)
    for span in whole.spans:
        length = span.stop - span.start
        cuts = [0, length] if length == 1 else [0, 2, length]
        for first, last in pairwise(cuts):
            context = span.context - length + last
            part = type(span)(0, last - first, context, span.pages)
            tokens = slice(span.start + first, span.start + last)
            alone = gpu.paged_attention(
                whole.q_THE[tokens], cache, type(whole.spans)([part]), whole.scale, None
            )
            assert torch.equal(alone, together[tokens])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 300])
def test_one_tile_attention(window: int | None, dtype: torch.dtype):
    case = attention_case([(600, 1), (0, 20), (520, 70)], 6, 2, 16, 16, dtype)
    assert attention_error(gpu_invariant, case, window) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 300])
def test_a_token_has_the_same_bits_however_many_are_computed_with_it(
    window: int | None, dtype: torch.dtype
):
    """Over a window the first split of keys is not the same for all tokens of a tile."""
    case = attention_case([(530, 64)], 4, 2, 16, 16, dtype)
    (whole,) = case.spans
    cache = case.buffer.kv_layers[1]
    reference.write_kv(case.k_TKE, case.v_TKE, cache, case.page_T, case.slot_T)
    attend = gpu_invariant.paged_attention
    expected = attend(case.q_THE, cache, case.spans, case.scale, window)
    for tokens in 1, 2, 3, 7:
        for start in range(0, 64 - tokens, 9):
            span = AttentionSpan(0, tokens, 530 + start + tokens, whole.pages)
            q_THE = case.q_THE[start : start + tokens]
            got = attend(q_THE, cache, Work([span]), case.scale, window)
            assert torch.equal(got, expected[start : start + tokens])


def test_splits_are_joined_in_the_same_order_wherever_a_window_begins():
    """The last tokens see the keys from split 1 on alone, from split 0 on in a tile with the
    first; with 18 splits, more than are joined at a time, that would show."""
    case = attention_case([(4350, 8)], 2, 1, 16, 16, torch.float32)
    (whole,) = case.spans
    cache = case.buffer.kv_layers[1]
    reference.write_kv(case.k_TKE, case.v_TKE, cache, case.page_T, case.slot_T)
    attend = gpu_invariant.paged_attention
    expected = attend(case.q_THE, cache, case.spans, case.scale, 4100)
    alone = Work([AttentionSpan(0, 1, 4358, whole.pages)])
    assert torch.equal(attend(case.q_THE[7:], cache, alone, case.scale, 4100), expected[7:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "width"), [(50, 40), (160, 192), (8, 1000)])
def test_linear(columns: int, width: int, dtype: torch.dtype):
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((70, width), (columns, width),
                                                                   (columns,)))  # fmt: skip
    weight /= width**0.5
    for given in bias, None:
        got = gpu_invariant.linear(x, weight, given)
        wide = None if given is None else given.double()
        expected = reference.linear(x.double(), weight.double(), wide)
        assert got.dtype == dtype
        assert Tolerance.of(dtype).share(got, expected) <= 1
        for rows in 1, 2, 3, 7, 64:
            alone = gpu_invariant.linear(x[3 : 3 + rows], weight, given)
            assert torch.equal(alone, got[3 : 3 + rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_lora_and_norm_have_the_same_bits_for_any_number_of_rows(dtype: torch.dtype):
    case = lora_case(
        [dict.fromkeys(RAGGED, 12), {"q_proj": 40}], [(0, 64), (1, 3)], RAGGED, "qkv", 1280, dtype
    )
    (segment, _), pages_NP = list(case.segments), case.pages_NP

    def outputs(
        x_TD: torch.Tensor, y_TC: torch.Tensor, work: Work[LoraSegment]
    ) -> list[torch.Tensor]:
        place, y_TC = (pages_NP, work, 1, "qkv"), y_TC.clone()
        gpu_invariant.lora_expand(gpu_invariant.lora_shrink(x_TD, *place), *place, y_TC)
        return [y_TC, gpu_invariant.rms_norm(x_TD, x_TD[0], 1e-6)]

    expected = outputs(case.x_TD, case.y_TC, case.segments)
    for rows in 1, 2, 3, 7, 64:
        alone = Work([type(segment)(0, rows, segment.layout, segment.pages)])
        got = outputs(case.x_TD[:rows], case.y_TC[:rows], alone)
        assert all(torch.equal(a, b[:rows]) for a, b in zip(got, expected, strict=True))


def adapters_of(ranks: Sequence[int], targets: Sequence[Sequence[str]]) -> list[Ranks]:
    return [dict.fromkeys(names, rank) for rank, names in zip(ranks, targets, strict=True)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("projections", [RAGGED, ALIGNED], ids=["ragged", "aligned"])
@pytest.mark.parametrize("group", list(GROUPS))
def test_lora_of_ragged_ranks(
    group: str, projections: dict[str, tuple[int, int]], dtype: torch.dtype
):
    names = list(projections)
    targets = [names, names, ["q_proj", "v_proj", "o_proj", "up_proj"], names, ["k_proj", *names]]
    adapters = adapters_of(RANKS, targets)
    # base-only rows, an adapter twice, a segment without tokens, one longer than a tile
    tokens = [(None, 3), (0, 1), (1, 2), (4, 1), (None, 1), (2, 0), (3, 18), (2, 1), (0, 1)]
    case = lora_case(adapters, tokens, projections, group, 1280, dtype)
    assert lora_error(gpu, case) <= 1
    assert lora_error(gpu, case, layer=0) <= 1
    assert lora_error(gpu, case, layer=2) == 0


@pytest.mark.parametrize("seed", range(4))
def test_lora_of_random_adapters(seed: int):
    draw = random.Random(seed)
    adapters = [
        {
            name: draw.choice(RANKS)
            for name in draw.sample(list(RAGGED), draw.randint(0, len(RAGGED)))
        }
        for _ in range(4)
    ]
    tokens = [(draw.choice([None, 0, 1, 2, 3]), draw.randint(0, 4)) for _ in range(7)]
    for group in GROUPS:
        case = lora_case(adapters, [*tokens, (None, 1)], RAGGED, group, 200, torch.float32)
        assert lora_error(gpu, case) <= 1


def test_lora_without_segments_changes_nothing():
    case = lora_case([], [(None, 3)], RAGGED, "qkv", 200, torch.float32)
    assert lora_error(gpu, case) == 0


def test_the_rank_intermediate_is_float32():
    case = lora_case([{"q_proj": 4}], [(0, 2)], RAGGED, "qkv", 200, torch.bfloat16)
    shrunk = gpu.lora_shrink(case.x_TD, case.pages_NP, case.segments, 1, "qkv")
    expected = reference.lora_shrink(case.x_TD, case.pages_NP, case.segments, 1, "qkv")[0]
    assert shrunk.dtype == torch.float32
    assert expected is not None
    torch.testing.assert_close(shrunk.sum(0).view(2, 4), expected, atol=1e-5, rtol=1e-5)


def test_nan_in_one_adapters_input_stays_in_its_rows():
    case = lora_case([{"q_proj": 4}, {"q_proj": 4}], [(0, 2), (1, 2)], RAGGED, "qkv", 200,
                     torch.float32)  # fmt: skip
    case.x_TD[1] = torch.nan
    place = case.pages_NP, case.segments, 1, "qkv"
    gpu.lora_expand(gpu.lora_shrink(case.x_TD, *place), *place, case.y_TC)
    assert case.y_TC.isnan().any(1).tolist() == [False, True, False, False]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 40), (2, 64), (4, 1536), (2, 3, 24)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype):
    fused = torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype)
    x, weight = fused[..., : shape[-1]], torch.rand(shape[-1]).to(dtype)
    x = x if len(shape) == 3 else x.contiguous()
    got, expected = gpu.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6)
    assert got.shape == expected.shape
    assert Tolerance.of(dtype).share(got, expected) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 2), (3, 24), (4, 128)])
def test_rotate(heads: int, head_dim: int, dtype: torch.dtype):
    qkv = torch.randn(5, heads + 2, head_dim).to(dtype)
    cos, sin = torch.randn(2, 5, head_dim).to(dtype)
    got = gpu.rotate(qkv[:, 1 : heads + 1], cos, sin)
    expected = reference.rotate(qkv[:, 1 : heads + 1].double(), cos.double(), sin.double())
    assert Tolerance.of(dtype).share(got, expected) <= 1


def test_no_rows_at_all():
    assert gpu.rms_norm(torch.empty(0, 8), torch.ones(8), 1e-6).shape == (0, 8)


@pytest.mark.parametrize("ops", [gpu, gpu_invariant], ids=["gpu", "gpu_invariant"])
def test_the_decoder_gives_the_reference_logits(ops: ModuleType):
    expected, got = (list(mixed_steps(decoder_with(each))) for each in (reference, ops))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
