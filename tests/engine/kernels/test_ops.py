"""The reference ops, and what the CPU's compiled step is made of, against the plainest float64
formulation there is, on random ragged shapes."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from torch import Tensor

from gateway.engine.kernels import reference
from gateway.engine.kernels.segments import AttentionSpan, LoraSegment, Work
from gateway.engine.kernels.tiles import softmax
from gateway.engine.memory.buffer import KvShape, PageBuffer, store
from gateway.engine.memory.rows import GROUPS, RowLayout, TargetRank
from tests.engine.kernels import cpu_ops
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
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
every_ops = pytest.mark.parametrize(
    ("ops", "dtype"),
    [
        *(pytest.param(reference, dtype, id=f"reference-{dtype}") for dtype in (F64, F32, BF16)),
        *(pytest.param(cpu_ops, dtype, id=f"cpu-{dtype}") for dtype in (F32, BF16)),
    ],
)
each_dtype = pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
lengths = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=5)


@every_ops
@settings(deadline=None, max_examples=40)
@given(
    lengths=lengths,
    group=st.sampled_from([1, 3]),
    window=st.sampled_from([None, 1, 5]),
    seed=st.integers(0, 99),
)
def test_paged_attention_equals_contiguous_attention(
    ops: ModuleType,
    dtype: torch.dtype,
    lengths: list[tuple[int, int]],
    group: int,
    window: int | None,
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
    tolerance = {F64: 1e-12, F32: 2e-6, BF16: 2e-2}[dtype]
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
@settings(deadline=None, max_examples=40)
@given(
    adapters=st.lists(
        st.tuples(adapter_ranks.filter(bool), st.sampled_from([1, 2, 5, 31, 32, 40])),
        min_size=1,
        max_size=4,
    ),
    base_tokens=st.integers(0, 3),
    group=st.sampled_from(sorted(GROUPS)),
    seed=st.integers(0, 99),
)
def test_lora_adds_each_adapters_product_to_its_own_tokens(
    ops: ModuleType,
    dtype: torch.dtype,
    adapters: list[tuple[dict[str, TargetRank], int]],
    base_tokens: int,
    group: str,
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
    tolerance = {F64: 2e-5, F32: 2e-5, BF16: 2e-2}[dtype]
    torch.testing.assert_close(y_TC.double(), expected, atol=tolerance * 10, rtol=tolerance)


@each_dtype
@pytest.mark.parametrize("group", ["embed", "head"])
@pytest.mark.parametrize("vocabulary", [4095, 4096, 9001])
def test_the_cpu_ops_on_a_vocabulary_of_any_length(group: str, vocabulary: int, dtype: torch.dtype):
    projections = {"embed_tokens": (40, vocabulary), "lm_head": (vocabulary, 40)}
    adapters = [dict.fromkeys(projections, rank) for rank in (1, 5)]
    case = lora_case(adapters, [(0, 2), (None, 1), (1, 3)], projections, group, 10_000, dtype)
    assert lora_error(cpu_ops, case) <= 1
    before = case.y_TC.clone()
    lora(cpu_ops, case, 2, case.y_TC)
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


@each_dtype
@pytest.mark.parametrize("window", [None, 5, 37])
def test_a_token_has_the_same_bits_alone_in_a_batch_and_however_its_prompt_is_cut(
    window: int | None, dtype: torch.dtype
):
    case = attention_case([(0, 40), (3, 1), (60, 70), (0, 2)], 6, 2, 24, 3, dtype)
    cache = case.buffer.kv_layers[LAYER]
    reference.write_kv(case.k_TKE, case.v_TKE, cache, case.page_T, case.slot_T)
    together = cpu_ops.paged_attention(case.q_THE, cache, case.spans, case.scale, window)
    for span in case.spans:
        for tokens in 1, 2, 7, 64:
            for start in range(span.start, span.stop, tokens):
                stop = min(start + tokens, span.stop)
                part = AttentionSpan(0, stop - start, span.context - span.stop + stop, span.pages)
                alone = cpu_ops.paged_attention(
                    case.q_THE[start:stop], cache, Work([part]), case.scale, window
                )
                assert torch.equal(alone, together[start:stop])


@each_dtype
@pytest.mark.parametrize(
    ("columns", "width"), [(50, 40), (96, 576), (33, 1000), (31, 7), (1, 1), (65, 129)]
)
def test_linear_and_the_bits_of_its_rows(columns: int, width: int, dtype: torch.dtype):
    """Products of bfloat16 are added up in float32, so the result is as near as that of float32."""
    generator = torch.Generator().manual_seed(columns)
    x_TD, weight_CD = (
        torch.randn(rows, width, generator=generator).to(dtype) for rows in (600, columns)
    )
    weight_CD /= width**0.5
    got = cpu_ops.linear(x_TD, weight_CD)
    expected = reference.linear(x_TD.double(), weight_CD.double())
    assert Tolerance.of(F32).share(got, expected) <= 1
    for rows in *range(1, 33), 63, 64, 96, 200, 512:
        assert torch.equal(cpu_ops.linear(x_TD[9 : 9 + rows], weight_CD), got[9 : 9 + rows])


@each_dtype
def test_threads_change_no_bits(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype):
    x_TD, weight_CD = torch.randn(2, 300, 300).to(dtype)
    case = attention_case([(0, 40), (60, 70)], 6, 2, 24, 3, dtype)
    cache = case.buffer.kv_layers[LAYER]
    reference.write_kv(case.k_TKE, case.v_TKE, cache, case.page_T, case.slot_T)
    adapted = lora_case([dict.fromkeys(PROJECTIONS, 40)], [(0, 70)], PROJECTIONS, "o", 128, dtype)
    outputs = []
    for threads in 1, 2, 3, 5:
        monkeypatch.setattr(cpu_ops, "THREADS", threads)
        for _ in range(5):
            attended = cpu_ops.paged_attention(case.q_THE, cache, case.spans, case.scale, None)
            y_TC = adapted.y_TC.float()
            lora(cpu_ops, adapted, LAYER, y_TC)
            outputs.append((cpu_ops.linear(x_TD, weight_CD), attended, y_TC))
    for output in outputs:
        for got, first in zip(output, outputs[0], strict=True):
            assert torch.equal(got, first)


@each_dtype
@pytest.mark.parametrize("group", sorted(GROUPS))
def test_a_tokens_lora_has_the_same_bits_however_many_tokens_the_adapter_has(
    group: str, dtype: torch.dtype
):
    adapters = [dict.fromkeys(PROJECTIONS, 7), {"q_proj": 40, "down_proj": 4}]
    tokens: list[tuple[int | None, int]] = [(None, 3), (0, 70), (1, 20)]
    case = lora_case(adapters, tokens, PROJECTIONS, group, 128, dtype)

    def added(work: Work[LoraSegment], first: int, stop: int) -> Tensor:
        y_TC = case.y_TC[first:stop].float()  # where no rounding hides a difference
        part = case._replace(x_TD=case.x_TD[first:stop], segments=work)
        lora(cpu_ops, part, LAYER, y_TC)
        return y_TC

    together = added(case.segments, 0, len(case.x_TD))
    for segment in case.segments:
        for rows in 1, 2, 3, 5, 16, 31, 32, 33, 64:
            first = max(segment.start, segment.stop - rows)
            alone = Work([LoraSegment(0, segment.stop - first, segment.layout, segment.pages)])
            expected = together[first : segment.stop]
            assert torch.equal(added(alone, first, segment.stop), expected)


@every_ops
def test_silu_times_up(ops: ModuleType, dtype: torch.dtype):
    gate_up_TC = (torch.randn(37, 2 * 1363) * 20).to(dtype)
    gate_up_TC[0, 0], gate_up_TC[1, 0] = torch.nan, torch.inf
    got = ops.silu_times_up(gate_up_TC)
    expected = reference.silu_times_up(gate_up_TC.double())
    assert got.isfinite().logical_not().nonzero().tolist() == [[0, 0], [1, 0]]
    finite = expected.isfinite()
    assert Tolerance.of(dtype).share(got[finite], expected[finite]) <= 1


def test_rows_of_silu_times_up_have_the_same_bits_for_any_number_of_rows():
    """torch's vary where threads cut a row."""
    gate_up_TC = torch.randn(130, 2 * 1368)
    together = cpu_ops.silu_times_up(gate_up_TC)
    for rows in range(1, 129):
        assert torch.equal(cpu_ops.silu_times_up(gate_up_TC[:rows]), together[:rows])


@each_dtype
@pytest.mark.parametrize("width", [7, 24, 64, 576, 1368])
def test_rows_of_rms_norm_have_the_same_bits_for_any_number_of_rows(width: int, dtype: torch.dtype):
    x_TD, weight_D = torch.randn(600, width).to(dtype), torch.rand(width).to(dtype)
    together = cpu_ops.rms_norm(x_TD, weight_D, 1e-6)
    mean_square = x_TD.double().square().mean(-1, keepdim=True)
    expected = x_TD.double() * (mean_square + 1e-6).rsqrt() * weight_D.double()
    assert Tolerance.of(dtype).share(together, expected) <= 1
    for rows in *range(1, 65), 128, 200, 512:
        alone = cpu_ops.rms_norm(x_TD[9 : 9 + rows], weight_D, 1e-6)
        assert torch.equal(alone, together[9 : 9 + rows])


@each_dtype
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("vocabulary", "width"), [(101, 35), (64, 64), (1, 2)])
def test_an_embedding_is_the_row_of_its_token(
    vocabulary: int, width: int, packed: bool, dtype: torch.dtype
):
    embed_VD = torch.randn(vocabulary, width).to(dtype)
    tokens_T = torch.cat((torch.arange(vocabulary), torch.tensor([vocabulary - 1, 0])))
    got = cpu_ops.embedding(tokens_T, embed_VD, packed)
    assert torch.equal(got, embed_VD[tokens_T].float())


@each_dtype
@pytest.mark.parametrize("extras", [False, True])
@pytest.mark.parametrize(("heads", "head_dim"), [(6, 24), (2, 2), (4, 64), (2, 34)])
def test_what_is_stored_has_bias_norm_and_rotation(
    heads: int, head_dim: int, extras: bool, dtype: torch.dtype
):
    case = attention_case([(0, 9), (7, 5), (60, 1)], heads, 2, head_dim, 3, dtype)
    generator = torch.Generator().manual_seed(head_dim)
    bias_C, q_norm_E, k_norm_E = (
        torch.randn(width, generator=generator) if extras else None
        for width in ((heads + 4) * head_dim, head_dim, head_dim)
    )
    angles = torch.rand(70, head_dim // 2, generator=generator) * 6
    position_T = torch.cat(
        [torch.arange(s.context - s.stop + s.start, s.context) for s in case.spans]
    )
    qkv_TXE = torch.cat((case.q_THE, case.k_TKE, case.v_TKE), dim=1)
    before = case.buffer.pages_NP.clone()
    got = cpu_ops.project_and_store(
        qkv_TXE,
        case.buffer.kv_layers[LAYER],
        torch.cat((angles.cos(), angles.sin()), dim=1),
        case.page_T,
        position_T,
        bias_C,
        q_norm_E,
        k_norm_E,
        1e-5,
    )
    q_k_v = qkv_TXE.double()
    if bias_C is not None:
        q_k_v = q_k_v + bias_C.double().view(1, -1, head_dim)
    q, k, v = q_k_v.tensor_split([heads, heads + 2], dim=1)
    if q_norm_E is not None and k_norm_E is not None:
        q, k = (
            x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
            for x, weight in ((q, q_norm_E), (k, k_norm_E))
        )
    both = torch.cat((angles, angles), dim=-1).double()[position_T]
    q, k = (reference.rotate(x, both.cos(), both.sin()) for x in (q, k))
    expected = before.double().view(case.buffer.pages_NP.shape)
    shape = case.buffer.shape
    kv = expected.view(-1, shape.layers, 2, shape.block_tokens, shape.kv_heads, shape.head_dim)
    reference.write_kv(k, v, kv[:, LAYER], case.page_T, case.slot_T)
    share = Tolerance.of(dtype).share
    assert share(got, q) <= 1
    written = before.isnan() & ~case.buffer.pages_NP.isnan()
    assert written.sum() == k.numel() + v.numel()
    assert share(case.buffer.pages_NP.nan_to_num(6e4), expected.nan_to_num(6e4)) <= 1


@each_dtype
def test_a_value_is_rounded_as_torch_rounds(dtype: torch.dtype):
    """Ties to even, and NaN stays NaN, whatever its bits."""
    bits = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x7FFFFFFF, 0x7F800001, 0xFF7FFFFF])
    value = bits.to(torch.int32).view(torch.float32).view(-1, 1, 1).repeat(1, 2, HEAD_DIM)
    buffer = PageBuffer(2, SHAPE, dtype, "cpu")
    page_T, slot_T = torch.tensor([0, 0, 0, 0, 1, 1]), torch.tensor([0, 1, 2, 3, 0, 1])
    cpu_ops.write_kv(torch.ones_like(value), value, buffer.kv_layers[1], page_T, slot_T)
    stored = buffer.kv_layers[1][page_T, 1, slot_T]
    assert torch.equal(stored.nan_to_num(5), value.to(dtype).nan_to_num(5))


def test_exp_of_the_softmax_is_within_two_ulp():
    @njit  # type: ignore[untyped-decorator]  # numba has no types
    def run(row: Any) -> float:
        return softmax(row, 0, 0, len(row), np.float32(1))  # type: ignore[no-any-return]

    exponents = np.linspace(-85.9, 0, 100_000, dtype=np.float32)
    weights = exponents.copy()
    total = run(weights)
    exact = np.exp(exponents.astype(np.float64))
    assert (np.abs(weights - exact) / np.spacing(exact.astype(np.float32))).max() <= 2
    assert total == pytest.approx(exact.sum(), rel=1e-6)


@each_dtype
def test_the_cpu_ops_carry_nan_and_inf_through(dtype: torch.dtype):
    """The sampler looks for them, to fail the request that they belong to."""
    layout = RowLayout.plan({(0, "o_proj"): TargetRank(1, 1.0)}, PROJECTIONS, 128)
    of_tokens = RowLayout.plan({(0, "embed_tokens"): TargetRank(1, 1.0)}, PROJECTIONS, 128)
    embed = Work([LoraSegment(0, 1, of_tokens, [0, 1])])
    for bad in (torch.nan, torch.inf):
        pages_NP = torch.ones(2, 128, dtype=dtype)
        pages_NP[0, 3] = bad
        work = Work([LoraSegment(0, 1, layout, [0, 1])])
        y_TC = torch.zeros(1, 16)
        shrunk = cpu_ops.lora_shrink(torch.ones(1, 24, dtype=dtype), pages_NP, work, 0, "o")
        cpu_ops.lora_expand(shrunk, pages_NP, work, 0, "o", y_TC)
        assert not y_TC.isfinite().any()
        gathered = cpu_ops.lora_gather(torch.tensor([3]), pages_NP, embed, 0, "embed")
        y_TC = torch.zeros(1, 16)
        cpu_ops.lora_expand(gathered, pages_NP, embed, 0, "embed", y_TC)
        assert not y_TC.isfinite().any()
        buffer = PageBuffer(1, SHAPE, dtype, "cpu")
        buffer.pages_NP.fill_(bad)
        span = AttentionSpan(0, 1, 2, torch.tensor([0]))
        out = cpu_ops.paged_attention(
            torch.ones(1, 2, HEAD_DIM, dtype=dtype), buffer.kv_layers[0], Work([span]), 1, None
        )
        assert not out.isfinite().any()
        x_TD, weight_CD = torch.ones(2, 3, 5, dtype=dtype)
        x_TD[1, 2] = bad
        finite = cpu_ops.linear(x_TD, weight_CD).isfinite().any(-1)
        assert finite.tolist() == [True, False, True]
        finite = cpu_ops.rms_norm(x_TD, weight_CD[0], 1e-6).isfinite().all(-1)
        assert finite.tolist() == [True, False, True]
