import random
from collections import Counter

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


def test_a_page_that_is_read_can_not_be_given_back():
    pool = PagePool(2)
    (page,) = pool.take(1, A)
    pool.share(page)
    pool.share(page)
    pool.unshare(page)
    with pytest.raises(AssertionError, match="still read"):
        pool.give([page], A)
    pool.unshare(page)
    pool.give([page], A)
    with pytest.raises(AssertionError, match="no readers"):
        pool.unshare(page)
    with pytest.raises(AssertionError, match="is free"):
        pool.share(page)


def test_a_transfer_keeps_the_readers_and_moves_the_account():
    pool = PagePool(2)
    prefix = Owner("prefix", "", "t")
    (page,) = pool.take(1, A)
    pool.share(page)
    pool.transfer(page, A, prefix)
    assert pool.snapshot().ledger == {("prefix", "t"): 1}
    with pytest.raises(AssertionError, match="is not"):
        pool.transfer(page, A, prefix)
    with pytest.raises(AssertionError, match="still read"):
        pool.give([page], prefix)


def test_a_snapshot_is_not_changed_by_what_comes_after():
    pool = PagePool(3)
    pages = pool.take(2, Owner("kv", "r", "t"))
    before = pool.snapshot()
    pool.give(pages, Owner("kv", "r", "t"))
    assert before.ledger == {("kv", "t"): 2}
    assert (before.total, before.free) == (3, 1)
    assert [before.kinds[page] for page in pages] == ["kv", "kv"]
    assert before.kinds.count(None) == 1


def test_only_takes_that_took_are_counted():
    pool = PagePool(3)
    pool.take(0, A)
    pool.take(2, A)
    assert pool.takes == 1


def test_the_ledger_by_kind_and_tenant_sums_to_the_total_after_10_000_operations():
    chance = random.Random(13)
    pool = PagePool(64)
    owners = [
        Owner(kind, f"{kind}-{tenant}-{key}", tenant)
        for kind in ("kv", "prefix", "adapter")
        for tenant in ("t1", "t2", "")
        for key in range(3)
    ]
    held: dict[int, Owner] = {}
    readers: Counter[int] = Counter()
    for _ in range(10_000):
        page = chance.choice(list(held)) if held else None
        match chance.choice(["take", "take", "give", "give", "transfer", "share", "unshare"]):
            case "take":
                owner = chance.choice(owners)
                taken = pool.take(chance.randint(0, min(5, pool.free)), owner)
                assert not held.keys() & set(taken), "a page was given out twice"
                held |= dict.fromkeys(taken, owner)
            case "give" if page is not None and not readers[page]:
                mine = [p for p, o in held.items() if o == held[page] and not readers[p]]
                given_back = chance.sample(mine, chance.randint(1, len(mine)))
                pool.give(given_back, held[page])
                for each in given_back:
                    del held[each]
            case "transfer" if page is not None:
                new = chance.choice(owners)
                pool.transfer(page, held[page], new)
                held[page] = new
            case "share" if page is not None:
                pool.share(page)
                readers[page] += 1
            case "unshare" if page is not None and readers[page]:
                pool.unshare(page)
                readers[page] -= 1
        pool.check()
        snapshot = pool.snapshot()
        assert snapshot.free + sum(snapshot.ledger.values()) == 64
        assert snapshot.ledger == Counter((owner.kind, owner.tenant) for owner in held.values())
        assert pool.free == snapshot.free == 64 - len(held)
        assert pool.owned("kv") == sum(owner.kind == "kv" for owner in held.values())
