import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from gateway.engine.memory.buffer import KvShape, PageBuffer, Slab
from gateway.engine.memory.costs import Costs
from gateway.engine.memory.pager import AdapterError, AdapterPager
from gateway.engine.memory.pages import PagePool
from gateway.engine.memory.radix import RadixCache
from gateway.engine.memory.reclaim import ReclaimOrder
from gateway.engine.memory.rows import TARGETS, RowLayout, TargetRank
from gateway.engine.memory.supply import PageSupply
from gateway.engine.messages import AdapterRef

SHAPE = KvShape(layers=1, block_tokens=2, kv_heads=1, head_dim=4)  # 16 elements a page
PAGES_EACH = 4
SLAB_BYTES = PAGES_EACH * SHAPE.page_elements * 4


def make_slab(value: float = 1.0) -> Slab:
    projections = dict.fromkeys(TARGETS, (8, 8))
    layout = RowLayout.plan({(0, "o_proj"): TargetRank(4, 1.0)}, projections, 16)
    assert layout.pages == PAGES_EACH
    return Slab(layout, torch.full((layout.pages, SHAPE.page_elements), value))


class Store:
    """Answers reads when told to, and counts them."""

    def __init__(self) -> None:
        self.reads: list[str] = []
        self.open = threading.Event()
        self.open.set()
        self.error: Exception | None = None

    def __call__(self, ref: AdapterRef) -> Slab:
        self.reads.append(ref.digest)
        assert self.open.wait(5)
        if self.error is not None:
            raise self.error
        return make_slab(float(ref.digest))


def ref(digest: int) -> AdapterRef:
    return AdapterRef(str(digest), "")


class WatchedPager(AdapterPager):
    """A pager over a small pool, with what a test looks at."""

    def __init__(self, store: Store, pages: int, host_slabs: int) -> None:
        self.pool = PagePool(pages)
        self.buffer = PageBuffer(pages, SHAPE, torch.float32, "cpu")
        self.woken = threading.Event()
        self.now = 0.0
        reclaim = ReclaimOrder()
        super().__init__(
            self.pool,
            reclaim,
            self.buffer,
            store,
            host_slabs * SLAB_BYTES,
            self.woken.set,
            Costs(),
            read_s_max=60,
            clock=lambda: self.now,
        )
        radix = RadixCache(self.pool, reclaim, lambda: 1.0)
        self.supply = PageSupply(self.pool, self, radix, reclaim)

    def reclaim(self, pages: int) -> None:
        """Free so many more than are free now."""
        self.supply.secure(self.pool.free + pages, "kv")

    def settle(self, adapter: AdapterRef) -> None:
        assert self.woken.wait(5)
        deadline = time.monotonic() + 5
        while adapter.digest not in self.collect():
            assert time.monotonic() < deadline

    def bring(self, adapter: AdapterRef) -> None:
        self.want(adapter)
        self.settle(adapter)
        self.lease(adapter.digest)
        self.unwant(adapter.digest)


MakePager = Callable[..., WatchedPager]


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def make_pager(store: Store) -> Iterator[MakePager]:
    pagers: list[WatchedPager] = []

    def make(pages: int = 10, host_slabs: int = 10) -> WatchedPager:
        pagers.append(WatchedPager(store, pages, host_slabs))
        return pagers[-1]

    yield make
    store.open.set()
    for pager in pagers:
        pager.pool.check()
        pager.close()


def test_a_leased_adapter_lies_in_the_pool(make_pager: MakePager):
    pager = make_pager()
    pager.bring(ref(7))
    resident = pager.lease("7")
    assert (pager.buffer.pages_NP[resident.pages] == 7).all()
    assert pager.pool.owned("adapter") == PAGES_EACH


def test_l7_a_version_is_told_to_be_in_the_nearest_place_that_has_it(make_pager: MakePager):
    pager = make_pager()
    assert pager.place("7") == "store"
    pager.want(ref(7))
    pager.settle(ref(7))
    assert pager.place("7") == "host"
    pager.lease("7")
    pager.unwant("7")
    assert pager.place("7") == "pool"
    pager.release("7")
    assert pager.place("7") == "pool"
    pager.evict("7")
    assert pager.place("7") == "host"
    pager.unload("7")
    assert pager.place("7") == "store"


def test_one_read_serves_all_who_wait(make_pager: MakePager, store: Store):
    pager = make_pager()
    store.open.clear()
    for _ in range(100):
        pager.want(ref(1))
    assert not pager.ready(ref(1))
    store.open.set()
    pager.settle(ref(1))
    assert pager.ready(ref(1))
    assert store.reads == ["1"]


def test_a_failed_read_is_told_to_all_who_wait_and_tried_again_for_the_next(
    make_pager: MakePager, store: Store
):
    pager = make_pager()
    store.error = AdapterError("torn file")
    pager.want(ref(1))
    pager.want(ref(1))
    pager.settle(ref(1))
    for _ in range(2):
        assert not pager.ready(ref(1))
        assert "torn file" in str(pager.failure("1"))
        pager.unwant("1")
    store.error = None
    pager.bring(ref(1))
    assert store.reads == ["1", "1"]


def test_an_unforeseen_error_of_the_store_does_not_reach_the_tenant(
    make_pager: MakePager, store: Store
):
    pager = make_pager()
    store.error = RuntimeError("secret path")
    pager.want(ref(1))
    pager.settle(ref(1))
    assert not pager.ready(ref(1))
    assert str(pager.failure("1")) == "it could not be read from the adapter store"


def test_reclaim_evicts_the_least_recently_used_idle_adapter(make_pager: MakePager):
    pager = make_pager()
    for digest in (1, 2):
        pager.bring(ref(digest))
    pager.release("1")
    pager.release("2")
    pager.lease("1")
    pager.release("1")
    pager.reclaim(1)
    assert pager.pages_to_lease("1") == 0
    assert pager.pages_to_lease("2") == PAGES_EACH


def test_a_leased_adapter_is_never_reclaimed(make_pager: MakePager):
    pager = make_pager()
    pager.bring(ref(1))
    assert (pager.idle_pages, pager.held_pages) == (0, PAGES_EACH)
    with pytest.raises(AssertionError, match="10 pages asked, 6 free or idle"):
        pager.reclaim(4)


def test_an_evicted_adapter_comes_back_from_host_memory_without_a_read(
    make_pager: MakePager, store: Store
):
    pager = make_pager()
    pager.bring(ref(1))
    pager.release("1")
    pager.reclaim(4)
    pager.lease("1")
    assert store.reads == ["1"]
    assert pager.loads == 2


def test_host_memory_keeps_to_its_bytes(make_pager: MakePager):
    pager = make_pager(pages=30, host_slabs=2)
    for digest in range(5):
        pager.bring(ref(digest))
    assert pager.host_count == 2


def test_an_adapter_gone_from_pool_and_host_is_read_again_for_one_who_waited_all_along(
    make_pager: MakePager, store: Store
):
    pager = make_pager(host_slabs=1)
    pager.bring(ref(1))
    pager.release("1")
    pager.bring(ref(2))  # 1 leaves host memory
    pager.want(ref(1))  # at hand: it is in the pool
    pager.reclaim(4)  # and now it is not
    assert not pager.ready(ref(1))
    pager.settle(ref(1))
    assert pager.ready(ref(1))
    assert store.reads == ["1", "2", "1"]


def test_unload_waits_for_the_last_lease(make_pager: MakePager):
    pager = make_pager()
    pager.bring(ref(1))
    pager.unload("1")
    assert pager.resident_count == 1
    pager.release("1")
    assert (pager.resident_count, pager.host_count, pager.pool.free) == (0, 0, 10)


def test_unload_during_the_read_drops_what_was_read(make_pager: MakePager, store: Store):
    pager = make_pager()
    store.open.clear()
    pager.want(ref(1))
    pager.unwant("1")
    pager.unload("1")
    store.open.set()
    pager.settle(ref(1))
    assert pager.host_count == 0


def test_m2_host_memory_keeps_to_its_bytes_while_hundreds_wait(make_pager: MakePager, store: Store):
    """Reads run ahead of the leases only as far as there is room, and go on as they are taken."""
    pager = make_pager(host_slabs=5)
    for digest in range(100):
        pager.want(ref(digest), "tenant")
    most = 0
    for digest in range(100):
        while not pager.ready(ref(digest), "tenant"):
            assert pager.woken.wait(5)
            pager.woken.clear()
            pager.collect()
        most = max(most, pager.host_count)
        pager.lease(str(digest))
        pager.unwant(str(digest))
        pager.release(str(digest))
        pager.reclaim(0 if pager.pool.free >= PAGES_EACH else PAGES_EACH)
    assert store.reads == [str(digest) for digest in range(100)]
    assert most <= 5 + 1  # one may be on its way when the first tells how large they are
