import pytest

from benchmarks.peers.loads import BLOCKS, KINDS, Load, loads_of, select
from benchmarks.peers.targets import target_of


def test_a_kind_stands_for_all_its_concurrencies():
    assert [load.name for load in select(["base"])] == ["base/c1", "base/c8", "base/c32"]
    assert [load.name for load in select(["static"])] == ["static/c8", "static/c32"]


def test_loads_are_measured_in_one_order_however_they_are_named():
    assert select(["static/c8", "base/c8"]) == [Load("base", 8), Load("static", 8)]


def test_a_load_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match="static/c1"):
        select(["base", "static/c1"])


def test_every_load_is_in_one_block_and_has_a_target():
    assert sorted(kind for block in BLOCKS for kind in block) == sorted(KINDS)
    for load in select(KINDS):
        target = target_of(load)
        assert target.stretch.ratio >= target.needed.ratio or (
            target.stretch.peers != target.needed.peers
        )


def test_a_static_batch_has_an_adapter_for_each_request():
    for load in loads_of("static"):
        assert load.concurrency <= KINDS["static"]


def test_no_cell_repeats_the_requests_of_another():
    seeds = [load.seed(round) for load in select(KINDS) for round in range(5)]
    assert len(set(seeds)) == len(seeds)
    assert Load("base", 8).seed(1) == Load("base", 8).seed(1)
