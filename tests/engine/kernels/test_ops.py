"""The reference ops and their CPU twins against the plainest float64 formulation there is, on
random ragged shapes."""

from types import ModuleType
from typing import Any

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from torch import Tensor

from gateway.engine.kernels import cpu, reference
from gateway.engine.kernels.segments import AttentionSpan, LoraSegment, Work
from gateway.engine.kernels.tiles import softmax
from gateway.engine.memory.buffer import KvShape, PageBuffer, store
from gateway.engine.memory.rows import GROUPS, RowLayout, TargetRank
from tests.engine.kernels.cases import (
    LAYER,
    Tolerance,
    attention_case,
    lora,
    lora_case,
    lora_error,
)

BLOCK, KV_HEADS, HEAD_DIM = 4, 2, 8
SHAPE = KvShape(layers=2, block_tokens=BLOCK, kv_heads=KV_HEADS, head_dim=HEAD_DIM)
every_ops = pytest.mark.parametrize("ops", [reference, cpu], ids=["reference", "cpu"])
lengths = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=5)


@every_ops
@settings(deadline=None, max_examples=60)
@given(
    lengths=lengths,
    group=st.sampled_from([1, 3]),
    window=st.sampled_from([None, 1, 5]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_paged_attention_equals_contiguous_attention(
    ops: ModuleType,
    lengths: list[tuple[int, int]],
    group: int,
    window: int | None,
    dtype: torch.dtype,
    seed: int,
):
    """Each sequence has `past` tokens in its pages and computes `new` more."""
    generator = torch.Generator().manual_seed(seed)
    heads = KV_HEADS * group
    total = sum(new for _, new in lengths)
    pages_needed = [-(-(past + new) // BLOCK) for past, new in lengths]
    buffer = PageBuffer(sum(pages_needed) + 2, SHAPE, dtype, "cpu")
    buffer.pages_NP.fill_(torch.nan)  # what no sequence wrote must never be read
    free = torch.randperm(sum(pages_needed) + 2, generator=generator).tolist()
    q_THE = torch.randn(total, heads, HEAD_DIM, generator=generator).to(dtype)
    spans, expected, start = [], [], 0
    for (past, new), count in zip(lengths, pages_needed, strict=True):
        pages = torch.tensor([free.pop() for _ in range(count)])
        kv = torch.randn(2, past + new, KV_HEADS, HEAD_DIM, generator=generator).to(dtype)
        position = torch.arange(past + new)
        ops.write_kv(kv[0], kv[1], buffer.kv_layers[1], pages[position // BLOCK], position % BLOCK)
        spans.append(AttentionSpan(start, start + new, past + new, pages))
        query = q_THE[start : start + new]
        expected.append(_attention(query.double(), kv[0].double(), kv[1].double(), window))
        start += new
    out_THE = ops.paged_attention(q_THE, buffer.kv_layers[1], Work(spans), 0.3, window)
    assert out_THE.dtype == dtype
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(
        out_THE.double(), torch.cat(expected), atol=tolerance, rtol=tolerance
    )
    assert buffer.kv_layers[0].isnan().all()


def _attention(q_THE: Tensor, k_LKE: Tensor, v_LKE: Tensor, window: int | None) -> Tensor:
    """One query position and head at a time."""
    count, context = len(q_THE), len(k_LKE)
    out_THE = torch.empty_like(q_THE)
    for t in range(count):
        position = context - count + t
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(q_THE.shape[1]):
            kv_head = head // (q_THE.shape[1] // KV_HEADS)
            scores = 0.3 * k_LKE[first : position + 1, kv_head] @ q_THE[t, head]
            out_THE[t, head] = scores.softmax(0) @ v_LKE[first : position + 1, kv_head]
    return out_THE


PROJECTIONS = {
    "q_proj": (24, 16),
    "k_proj": (8, 16),
    "v_proj": (8, 16),
    "o_proj": (16, 24),
    "gate_proj": (40, 16),
    "up_proj": (40, 16),
    "down_proj": (16, 40),
    "embed_tokens": (16, 100),
    "lm_head": (100, 16),
}
adapter_ranks = st.dictionaries(
    st.sampled_from(sorted(PROJECTIONS)),
    st.builds(TargetRank, st.sampled_from([1, 3, 4, 12, 40]), st.sampled_from([0.5, 2.0])),
)


@every_ops
@settings(deadline=None, max_examples=60)
@given(
    adapters=st.lists(
        st.tuples(adapter_ranks.filter(bool), st.sampled_from([1, 2, 5, 31, 32, 40])),
        min_size=1,
        max_size=4,
    ),
    base_tokens=st.integers(0, 3),
    group=st.sampled_from(sorted(GROUPS)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_lora_adds_each_adapters_product_to_its_own_tokens(
    ops: ModuleType,
    adapters: list[tuple[dict[str, TargetRank], int]],
    base_tokens: int,
    group: str,
    dtype: torch.dtype,
    seed: int,
):
    """Ranks, targets and tokens differ by adapter; the first tokens have none. The input of
    `embed` are tokens: vectors with a 1 at one place."""
    generator = torch.Generator().manual_seed(seed)
    page_elements = 128
    total = base_tokens + sum(count for _, count in adapters)
    in_features = PROJECTIONS[GROUPS[group][0]][1]
    x_TD = torch.randn(total, in_features, generator=generator).to(dtype)
    shrink, inputs = ops.lora_shrink, x_TD
    if group == "embed":
        shrink, inputs = ops.lora_gather, torch.randint(in_features, (total,), generator=generator)
        x_TD = torch.nn.functional.one_hot(inputs, in_features)
    out_features = sum(PROJECTIONS[target][0] for target in GROUPS[group])
    y_TC = torch.randn(total, out_features, generator=generator).to(dtype)
    expected = y_TC.double()
    pages_NP = torch.full((900, page_elements), torch.nan, dtype=dtype)
    free = torch.randperm(900, generator=generator).tolist()
    segments, start = [], base_tokens
    for targets, count in adapters:
        layout = RowLayout.plan(
            {(1, target): item for target, item in targets.items()}, PROJECTIONS, page_elements
        )
        pages = [free.pop() for _ in range(layout.pages)]
        tokens = slice(start, start + count)
        for rows in layout.groups.values():
            a_RD = torch.randn(rows.rank, rows.shrink.width, generator=generator).to(dtype)
            store(pages_NP, pages, rows.shrink, a_RD)
            for part in rows.expand:
                b_RC = torch.randn(
                    part.ranks.stop - part.ranks.start, part.rows.width, generator=generator
                ).to(dtype)
                store(pages_NP, pages, part.rows, b_RC)
                if part.target in GROUPS[group]:
                    h = x_TD[tokens].double() @ a_RD[part.ranks].double().T
                    expected[tokens, part.columns] += targets[part.target].scale * (
                        h @ b_RC.double()
                    )
        segments.append(LoraSegment(start, start + count, layout, pages))
        start += count
    base_before = y_TC[:base_tokens].clone()
    work = Work(segments)
    shrunk = shrink(inputs, pages_NP, work, 1, group)
    ops.lora_expand(shrunk, pages_NP, work, 1, group, y_TC)
    assert torch.equal(y_TC[:base_tokens], base_before)
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(y_TC.double(), expected, atol=tolerance * 10, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", ["embed", "head"])
@pytest.mark.parametrize("vocabulary", [4095, 4096, 9001])
def test_the_cpu_ops_on_a_vocabulary_of_any_length(group: str, vocabulary: int, dtype: torch.dtype):
    projections = {"embed_tokens": (40, vocabulary), "lm_head": (vocabulary, 40)}
    adapters = [dict.fromkeys(projections, rank) for rank in (1, 5)]
    case = lora_case(adapters, [(0, 2), (None, 1), (1, 3)], projections, group, 10_000, dtype)
    assert lora_error(cpu, case) <= 1
    before = case.y_TC.clone()
    lora(cpu, case, 2, case.y_TC)
    assert torch.equal(case.y_TC, before)


def test_rms_norm_is_computed_in_float32():
    x = torch.tensor([[300.0, -400.0]], dtype=torch.float16)  # squares overflow float16
    weight = torch.tensor([1.0, 2.0], dtype=torch.float16)
    out = reference.rms_norm(x, weight, 1e-6)
    root = (125000.0) ** 0.5
    expected = torch.tensor([[300 / root, -800 / root]])
    torch.testing.assert_close(out.float(), expected, atol=2e-3, rtol=0)


@pytest.mark.parametrize("head_dim", [2, 8, 64])
def test_rotate_turns_pairs_of_half_heads(head_dim: int):
    angles = torch.rand(5, head_dim // 2, dtype=torch.float64) * 6
    both = torch.cat((angles, angles), dim=-1)
    x = torch.randn(5, 3, head_dim, dtype=torch.float64)
    turned = reference.rotate(x, both.cos(), both.sin())
    half = head_dim // 2
    as_complex = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angles)[:, None]
    torch.testing.assert_close(turned, torch.cat((as_complex.real, as_complex.imag), dim=-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 5, 37])
def test_a_token_has_the_same_bits_alone_in_a_batch_and_however_its_prompt_is_cut(
    window: int | None, dtype: torch.dtype
):
    case = attention_case([(0, 40), (3, 1), (60, 70), (0, 2)], 6, 2, 24, 3, dtype)
    cache = case.buffer.kv_layers[LAYER]
    reference.write_kv(case.k_TKE, case.v_TKE, cache, case.page_T, case.slot_T)
    together = cpu.paged_attention(case.q_THE, cache, case.spans, case.scale, window)
    for span in case.spans:
        for tokens in 1, 2, 7, 64:
            for start in range(span.start, span.stop, tokens):
                stop = min(start + tokens, span.stop)
                part = AttentionSpan(0, stop - start, span.context - span.stop + stop, span.pages)
                alone = cpu.paged_attention(
                    case.q_THE[start:stop], cache, Work([part]), case.scale, window
                )
                assert torch.equal(alone, together[start:stop])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("columns", "width"), [(50, 40), (96, 576), (33, 1000)])
def test_linear_and_the_bits_of_its_rows(columns: int, width: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(columns)
    x_TD, weight_CD = (
        torch.randn(rows, width, generator=generator).to(dtype) for rows in (600, columns)
    )
    weight_CD /= width**0.5
    for bias_C in weight_CD[:, 0].clone(), None:
        got = cpu.linear(x_TD, weight_CD, bias_C)
        wide = None if bias_C is None else bias_C.double()
        expected = reference.linear(x_TD.double(), weight_CD.double(), wide)
        assert Tolerance.of(dtype).share(got, expected) <= 1
        for rows in *range(1, 65), 96, 128, 200, 256, 512:
            assert torch.equal(cpu.linear(x_TD[9 : 9 + rows], weight_CD, bias_C), got[9 : 9 + rows])


def test_threads_change_no_bits():
    x_TD, weight_CD = torch.randn(2, 300, 300)
    case = attention_case([(0, 40), (60, 70)], 6, 2, 24, 3, torch.float32)
    cache = case.buffer.kv_layers[LAYER]
    reference.write_kv(case.k_TKE, case.v_TKE, cache, case.page_T, case.slot_T)
    before, outputs = numba.get_num_threads(), []
    for threads in range(1, numba.config.NUMBA_NUM_THREADS + 1):
        numba.set_num_threads(threads)
        spans = Work(list(case.spans))
        attended = cpu.paged_attention(case.q_THE, cache, spans, case.scale, None)
        outputs.append((cpu.linear(x_TD, weight_CD), attended))
    numba.set_num_threads(before)
    for product, attended in outputs:
        assert torch.equal(product, outputs[0][0])
        assert torch.equal(attended, outputs[0][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", sorted(GROUPS))
def test_a_tokens_lora_has_the_same_bits_however_many_tokens_the_adapter_has(
    group: str, dtype: torch.dtype
):
    adapters = [dict.fromkeys(PROJECTIONS, 7), {"q_proj": 40, "down_proj": 4}]
    tokens: list[tuple[int | None, int]] = [(None, 3), (0, 70), (1, 20)]
    case = lora_case(adapters, tokens, PROJECTIONS, group, 128, dtype)

    def added(work: Work[LoraSegment], first: int, stop: int) -> Tensor:
        y_TC = case.y_TC[first:stop].clone()
        part = case._replace(x_TD=case.x_TD[first:stop], segments=work)
        lora(cpu, part, LAYER, y_TC)
        return y_TC

    together = added(case.segments, 0, len(case.x_TD))
    for segment in case.segments:
        for rows in 1, 2, 3, 5, 16, 31, 32, 33, 64:
            first = max(segment.start, segment.stop - rows)
            alone = Work([LoraSegment(0, segment.stop - first, segment.layout, segment.pages)])
            expected = together[first : segment.stop]
            assert torch.equal(added(alone, first, segment.stop), expected)


@every_ops
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_times_up(ops: ModuleType, dtype: torch.dtype):
    gate_up_TC = (torch.randn(37, 2 * 1368) * 20).to(dtype)
    gate_up_TC[0, 0], gate_up_TC[1, 0] = torch.nan, torch.inf
    got = ops.silu_times_up(gate_up_TC)
    expected = reference.silu_times_up(gate_up_TC.double())
    assert got.isfinite().logical_not().nonzero().tolist() == [[0, 0], [1, 0]]
    finite = expected.isfinite()
    assert Tolerance.of(dtype).share(got[finite], expected[finite]) <= 1


def test_rows_of_silu_times_up_have_the_same_bits_for_any_number_of_rows():
    """torch's vary where threads cut a row: at 127 rows of 1368 with two, for example."""
    gate_up_TC = torch.randn(130, 2 * 1368)
    together = cpu.silu_times_up(gate_up_TC)
    for rows in range(1, 129):
        assert torch.equal(cpu.silu_times_up(gate_up_TC[:rows]), together[:rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [24, 64, 576, 1368])
def test_rows_of_rms_norm_have_the_same_bits_for_any_number_of_rows(width: int, dtype: torch.dtype):
    x_TD, weight_D = torch.randn(600, width).to(dtype), torch.rand(width).to(dtype)
    together = cpu.rms_norm(x_TD, weight_D, 1e-6)
    for rows in *range(1, 65), 128, 200, 512:
        alone = cpu.rms_norm(x_TD[9 : 9 + rows], weight_D, 1e-6)
        assert torch.equal(alone, together[9 : 9 + rows])


def test_exp_of_the_softmax_is_within_two_ulp():
    @njit  # type: ignore[untyped-decorator]  # numba has no types
    def run(row: Any) -> float:
        return softmax(row, 0, 0, len(row))  # type: ignore[no-any-return]

    exponents = np.linspace(-85.9, 0, 100_000, dtype=np.float32)
    weights = exponents.copy()
    total = run(weights)
    exact = np.exp(exponents.astype(np.float64))
    assert (np.abs(weights - exact) / np.spacing(exact.astype(np.float32))).max() <= 2
    assert total == pytest.approx(exact.sum(), rel=1e-6)


def test_the_cpu_ops_carry_nan_and_inf_through():
    """The sampler looks for them, to fail the request that they belong to."""
    layout = RowLayout.plan({(0, "o_proj"): TargetRank(1, 1.0)}, PROJECTIONS, 128)
    of_tokens = RowLayout.plan({(0, "embed_tokens"): TargetRank(1, 1.0)}, PROJECTIONS, 128)
    embed = Work([LoraSegment(0, 1, of_tokens, [0, 1])])
    for bad in (torch.nan, torch.inf):
        pages_NP = torch.ones(2, 128)
        pages_NP[0, 3] = bad
        work = Work([LoraSegment(0, 1, layout, [0, 1])])
        y_TC = torch.zeros(1, 16)
        shrunk = cpu.lora_shrink(torch.ones(1, 24), pages_NP, work, 0, "o")
        cpu.lora_expand(shrunk, pages_NP, work, 0, "o", y_TC)
        assert not y_TC.isfinite().any()
        gathered = cpu.lora_gather(torch.tensor([3]), pages_NP, embed, 0, "embed")
        y_TC = torch.zeros(1, 16)
        cpu.lora_expand(gathered, pages_NP, embed, 0, "embed", y_TC)
        assert not y_TC.isfinite().any()
        buffer = PageBuffer(1, SHAPE, torch.float32, "cpu")
        buffer.pages_NP.fill_(bad)
        span = AttentionSpan(0, 1, 2, torch.tensor([0]))
        out = cpu.paged_attention(
            torch.ones(1, 2, HEAD_DIM), buffer.kv_layers[0], Work([span]), 1, None
        )
        assert not out.isfinite().any()
