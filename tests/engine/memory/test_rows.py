import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.engine.memory.buffer import matrix, store
from gateway.engine.memory.rows import GROUPS, TARGETS, RowLayout, RowLayoutError, TargetRank

PROJECTIONS = {
    "q_proj": (8, 8),
    "k_proj": (4, 8),
    "v_proj": (4, 8),
    "o_proj": (8, 8),
    "gate_proj": (12, 8),
    "up_proj": (12, 8),
    "down_proj": (8, 12),
    "embed_tokens": (8, 11),
    "lm_head": (11, 8),
}
ranks = st.dictionaries(
    st.tuples(st.integers(0, 2), st.sampled_from(TARGETS)),
    st.builds(TargetRank, st.sampled_from([1, 3, 4, 12, 24, 100]), st.floats(0.25, 4)),
    min_size=1,
)


@settings(deadline=None)
@given(ranks=ranks, page_elements=st.integers(12, 300), seed=st.integers(0, 9))
def test_every_matrix_reads_back_from_any_pages(
    ranks: dict[tuple[int, str], TargetRank], page_elements: int, seed: int
):
    layout = RowLayout.plan(ranks, PROJECTIONS, page_elements)
    generator = torch.Generator().manual_seed(seed)
    pages_NP = torch.full((layout.pages + 3, page_elements), torch.nan)
    pages = torch.randperm(layout.pages + 3, generator=generator)[: layout.pages].tolist()
    written = []
    for rows in layout.groups.values():
        for part in (rows.shrink, *(item.rows for item in rows.expand)):
            count = sum(run.rows for run in part.runs)
            values = torch.randn(count, part.width, generator=generator)
            store(pages_NP, pages, part, values)
            written.append((part, values))
    for part, values in written:
        assert torch.equal(matrix(pages_NP, pages, part), values)
    assert int(pages_NP.isfinite().sum()) == layout.elements


@given(ranks=ranks)
def test_the_layout_holds_exactly_the_adapters_elements(ranks: dict[tuple[int, str], TargetRank]):
    layout = RowLayout.plan(ranks, PROJECTIONS, 300)
    expected = sum(item.rank * sum(PROJECTIONS[target]) for (_, target), item in ranks.items())
    assert layout.elements == expected
    assert layout.pages * 300 >= expected


def test_a_group_shares_one_shrink_and_keeps_columns_and_scales_of_its_targets():
    layout = RowLayout.plan(
        {(0, "q_proj"): TargetRank(2, 0.5), (0, "v_proj"): TargetRank(3, 2.0)}, PROJECTIONS, 100
    )
    (key, rows), *others = layout.groups.items()
    assert key == (0, "qkv")
    assert not others
    assert rows.rank == 5
    assert rows.scales == (0.5, 0.5, 2.0, 2.0, 2.0)
    assert [(item.target, item.ranks, item.columns) for item in rows.expand] == [
        ("q_proj", slice(0, 2), slice(0, 8)),
        ("v_proj", slice(2, 5), slice(12, 16)),
    ]


def test_a_row_longer_than_a_page_is_refused():
    with pytest.raises(RowLayoutError, match="row of 12 elements"):
        RowLayout.plan({(0, "down_proj"): TargetRank(1, 1.0)}, PROJECTIONS, 11)


def test_every_target_is_in_one_group():
    assert sorted(target for targets in GROUPS.values() for target in targets) == sorted(
        PROJECTIONS
    )
