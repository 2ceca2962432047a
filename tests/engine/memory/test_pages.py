import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.engine.memory.pages import Owner, PagePool

A, B = Owner("kv", "a"), Owner("adapter", "b")


def test_a_page_freed_by_kv_can_hold_an_adapter():
    pool = PagePool(3)
    pages = pool.take(3, A)
    pool.give(pages[1:2], A)
    assert pool.take(1, B) == pages[1:2]
    assert (pool.free, pool.owned("kv"), pool.owned("adapter")) == (0, 2, 1)
    pool.check()


def test_taking_more_than_is_free_is_caught():
    pool = PagePool(2)
    with pytest.raises(AssertionError, match="3 pages asked, 2 free"):
        pool.take(3, A)


def test_giving_another_owners_page_is_caught():
    pool = PagePool(2)
    pages = pool.take(1, A)
    with pytest.raises(AssertionError, match="is not"):
        pool.give(pages, B)


def test_giving_a_page_twice_is_caught():
    pool = PagePool(2)
    pages = pool.take(1, A)
    pool.give(pages, A)
    with pytest.raises(AssertionError, match="is not"):
        pool.give(pages, A)


@given(st.lists(st.tuples(st.sampled_from([A, B]), st.integers(-4, 4)), max_size=60))
def test_pages_are_conserved(steps: list[tuple[Owner, int]]):
    pool = PagePool(12)
    held: dict[Owner, list[int]] = {A: [], B: []}
    for owner, change in steps:
        if change > 0:
            held[owner] += pool.take(min(change, pool.free), owner)
        else:
            given_back = held[owner][:-change]
            held[owner] = held[owner][-change:]
            pool.give(given_back, owner)
        pool.check()
        assert pool.free == 12 - len(held[A]) - len(held[B])
        assert not set(held[A]) & set(held[B])
