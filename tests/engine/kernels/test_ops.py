"""The reference ops and their CPU twins against the plainest float64 formulation there is, on
random ragged shapes."""

from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gateway.engine.kernels import cpu, reference
from gateway.engine.kernels.segments import AttentionSpan, LoraSegment, Work
from gateway.engine.memory.buffer import KvShape, PageBuffer, store
from gateway.engine.memory.rows import GROUPS, RowLayout, TargetRank
from tests.engine.kernels.cases import lora, lora_case, lora_error

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
def test_a_decoding_row_of_the_cpu_ops_has_the_same_bits_in_any_batch(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(1)
    buffer = PageBuffer(40, SHAPE, dtype, "cpu")
    buffer.pages_NP.copy_(torch.randn(buffer.pages_NP.shape, generator=generator))
    q_THE = torch.randn(5, 6, HEAD_DIM, generator=generator).to(dtype)
    pages = torch.randperm(40, generator=generator)
    spans = [AttentionSpan(i, i + 1, 3 + 5 * i, pages[8 * i : 8 * i + 8]) for i in range(5)]
    layer = buffer.kv_layers[0]
    together = cpu.paged_attention(q_THE, layer, Work(spans), 0.3, None)
    for i, span in enumerate(spans):
        alone = span._replace(start=0, stop=1)
        out = cpu.paged_attention(q_THE[i : i + 1], layer, Work([alone]), 0.3, None)
        assert torch.equal(out[0], together[i])


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
