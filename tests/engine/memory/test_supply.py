"""What is reclaimed first when pages run out: one order over idle adapters and cached prefixes."""

import random

import pytest
import torch

from gateway.engine.memory.buffer import KvShape, PageBuffer, Slab
from gateway.engine.memory.costs import Costs
from gateway.engine.memory.keys import Root, next_key
from gateway.engine.memory.pager import AdapterPager
from gateway.engine.memory.pages import Owner, PagePool
from gateway.engine.memory.radix import RadixCache
from gateway.engine.memory.reclaim import ReclaimOrder
from gateway.engine.memory.rows import TARGETS, RowLayout, TargetRank
from gateway.engine.memory.supply import PageSupply
from gateway.engine.messages import AdapterRef

SHAPE = KvShape(layers=1, block_tokens=2, kv_heads=1, head_dim=4)
KV = Owner("kv", "r", "t")


class Memory:
    """A pool with adapters of four pages, and prefixes whose blocks take `block_s` to compute."""

    def __init__(self, pages: int, block_s: float = 1.0) -> None:
        self.pool = PagePool(pages)
        self.reclaim = ReclaimOrder()
        self.block_s = block_s
        page = SHAPE.page_elements
        layout = RowLayout.plan(
            {(0, "o_proj"): TargetRank(4, 1.0)}, dict.fromkeys(TARGETS, (8, 8)), page
        )
        assert layout.pages == 4
        slab = Slab(layout, torch.zeros(layout.pages, page))
        self.pager = AdapterPager(
            self.pool,
            self.reclaim,
            PageBuffer(pages, SHAPE, torch.float32, "cpu"),
            lambda ref: slab,
            host_bytes=2**30,
            wake=lambda: None,
            costs=Costs(),
        )
        self.radix = RadixCache(self.pool, self.reclaim, lambda: self.block_s)
        self.supply = PageSupply(self.pool, self.pager, self.radix, self.reclaim)

    def want(self, digest: str) -> None:
        ref = AdapterRef(digest, "")
        self.pager.want(ref)
        while not self.pager.ready(ref):
            self.pager.collect()

    def adapter(self, digest: str) -> None:
        """Used once, then idle."""
        self.want(digest)
        self.pager.lease(digest, "t")
        self.pager.unwant(digest)
        self.pager.release(digest)

    def prefix(self, name: str, blocks: int, uses: int = 1) -> list[bytes]:
        keys = [Root("t", name).key]
        for index in range(blocks):
            keys.append(next_key(keys[-1], (index,)))
        for _ in range(uses):
            path = self.radix.match(keys[1:])
            self.radix.lock(path)
            pages = self.pool.take(blocks - len(path), KV)
            self.radix.insert(path, keys[1 + len(path) :], pages, KV, Root("t", name))
            self.radix.unlock(path)
        return keys[1:]

    def secure(self, pages: int) -> None:
        self.supply.secure(pages, "kv")
        assert self.pool.free >= pages
        self.pool.check()
        self.radix.check()
        self.reclaim.check()

    def has(self, digest: str) -> bool:
        return self.pager.pages_to_lease(digest) == 0


def test_nothing_goes_while_pages_are_free():
    memory = Memory(16)
    memory.adapter("a")
    memory.prefix("p", 3)
    memory.secure(9)
    assert memory.has("a")
    assert len(memory.radix) == 3


@pytest.mark.parametrize(("block_s", "adapter_stays"), [(10.0, False), (1e-9, True)])
def test_what_is_cheaper_to_bring_back_goes_first(block_s: float, adapter_stays: bool):
    memory = Memory(8, block_s)
    memory.adapter("a")
    memory.prefix("p", 4)
    memory.secure(4)
    assert memory.has("a") == adapter_stays
    assert len(memory.radix) == (0 if adapter_stays else 4)


def test_of_equal_prefixes_the_less_used_one_goes():
    memory = Memory(48)
    memory.prefix("others", 40)  # among few, counts fade within a few uses
    often = memory.prefix("often", 4, uses=5)
    seldom = memory.prefix("seldom", 4)
    memory.secure(44)
    assert len(memory.radix.match(often)) == 4
    assert memory.radix.match(seldom) == []


def test_a_prefix_goes_from_its_end_and_only_as_far_as_needed():
    memory = Memory(8)
    keys = memory.prefix("p", 8)
    memory.secure(3)
    assert len(memory.radix.match(keys)) == 5


def test_an_adapter_that_waiting_requests_want_goes_last():
    memory = Memory(12, block_s=10.0)
    memory.adapter("wanted")
    memory.adapter("other")
    memory.prefix("p", 4, uses=9)
    memory.want("wanted")
    memory.secure(8)  # the dear prefix, too, goes before it
    assert memory.has("wanted")
    assert not memory.has("other")
    memory.secure(12)  # but rather it than nothing
    assert not memory.has("wanted")


def test_what_is_leased_pinned_or_read_never_goes():
    memory = Memory(20)
    memory.adapter("leased")
    memory.pager.lease("leased", "t")
    memory.adapter("pinned")
    memory.pager.pin("pinned")
    read = memory.prefix("read", 4)
    memory.radix.lock(memory.radix.match(read))
    memory.adapter("idle")
    assert memory.supply.missing(0, 8) == 0
    assert memory.supply.missing(0, 9) == 1
    memory.secure(8)
    with pytest.raises(AssertionError, match="9 pages asked, 8 free or idle"):
        memory.secure(9)
    assert memory.has("leased")
    assert memory.has("pinned")
    assert len(memory.radix.match(read)) == 4
    memory.pager.unpin("pinned")
    memory.secure(12)
    assert not memory.has("pinned")


def test_a_pin_holds_for_an_adapter_that_is_yet_to_come():
    memory = Memory(8)
    memory.pager.pin("a")
    memory.adapter("a")
    assert memory.supply.missing(0, 5) == 1
    assert memory.supply.kv_roof() == 4


def test_what_missing_promises_can_be_secured_whatever_lies_there():
    chance = random.Random(5)
    for _ in range(40):
        memory = Memory(40)
        for index in range(chance.randint(0, 12)):
            match chance.choice(["adapter", "prefix", "lease", "pin", "lock"]):
                case "adapter" if memory.supply.missing(4, 0) <= 0:
                    memory.secure(4)
                    memory.adapter(str(index))
                case "lease" if memory.supply.missing(4, 0) <= 0:
                    memory.secure(4)
                    memory.adapter(str(index))
                    memory.pager.lease(str(index), "t")
                case "pin" if memory.supply.missing(4, 0) <= 0:
                    memory.pager.pin(str(index))
                    memory.secure(4)
                    memory.adapter(str(index))
                case "prefix" | "lock" as kind if memory.supply.missing(0, 6) <= 0:
                    memory.secure(6)
                    keys = memory.prefix(f"{index % 3}", chance.randint(1, 6))
                    if kind == "lock":
                        memory.radix.lock(memory.radix.match(keys))
        reachable = -memory.supply.missing(0, 0)
        assert reachable == memory.pool.free + memory.pager.idle_pages + memory.radix.idle_pages
        memory.secure(reachable)
        assert memory.supply.missing(0, 0) == -memory.pool.free
        memory.pager.close()
