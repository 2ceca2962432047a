"""Copies of adapters on a stream of their own, with streams that note what they are told."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from gateway.engine.memory import buffer
from gateway.engine.memory.buffer import KvShape, PageBuffer, Slab
from gateway.engine.memory.costs import Costs
from gateway.engine.memory.pager import AdapterPager
from gateway.engine.memory.pages import Owner, PagePool
from gateway.engine.memory.reclaim import ReclaimOrder
from gateway.engine.memory.rows import TARGETS, RowLayout, TargetRank
from gateway.engine.messages import AdapterRef

SHAPE = KvShape(layers=1, block_tokens=2, kv_heads=1, head_dim=4)
LAYOUT = RowLayout.plan({(0, "o_proj"): TargetRank(4, 1.0)}, dict.fromkeys(TARGETS, (8, 8)), 16)


class Streams:
    """`torch.cuda` as far as copies use it. Each stream's orders, in the order in which they
    were given."""

    def __init__(self) -> None:
        self.orders: list[str] = []
        self.active = "compute"

    def new(self) -> "Stream":
        return Stream(self, "copies")

    def current_stream(self) -> "Stream":
        return Stream(self, self.active)

    @contextmanager
    def stream(self, stream: "Stream") -> Iterator[None]:
        before, self.active = self.active, stream.name
        yield
        self.active = before


class Stream:
    def __init__(self, streams: Streams, name: str) -> None:
        self.streams, self.name = streams, name

    def wait_stream(self, other: "Stream") -> None:
        self.streams.orders.append(f"{self.name}: wait for {other.name}")

    def record_event(self) -> str:
        self.streams.orders.append(f"{self.name}: landed")
        return f"landed on {self.name}"

    def wait_event(self, event: str) -> None:
        self.streams.orders.append(f"{self.name}: wait until {event}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams()
    monkeypatch.setattr(torch.cuda, "Stream", streams.new)
    monkeypatch.setattr(torch.cuda, "current_stream", streams.current_stream)
    monkeypatch.setattr(torch.cuda, "stream", streams.stream)
    load = buffer._Copies.load

    def noted(self: buffer._Copies, *arguments) -> None:
        streams.orders.append(f"{streams.active}: copy")
        load(self, *arguments)

    monkeypatch.setattr(buffer._Copies, "load", noted)
    return streams


def gpu_buffer(pages: int = 8) -> PageBuffer:
    """On the CPU, with the copies of a GPU."""
    made = PageBuffer(pages, SHAPE, torch.float32, "cpu")
    made._copies = buffer._StreamCopies()
    return made


def slab() -> Slab:
    return Slab(LAYOUT, torch.arange(LAYOUT.pages * 16.0).view(-1, 16))


@pytest.mark.parametrize("pages", [[0, 1, 2, 3], [5, 2, 3, 7], [3, 2, 1, 0]])
def test_a_slab_lands_in_its_pages_and_nowhere_else(pages: list[int]):
    made = PageBuffer(9, SHAPE, torch.float32, "cpu")
    made.load(slab(), pages)
    assert torch.equal(made.pages_NP[pages], slab().pages_NP)
    assert not made.pages_NP[[page for page in range(9) if page not in pages]].any()


def test_t5_a_copy_waits_for_what_was_computed_and_only_its_users_wait_for_it(streams: Streams):
    made = gpu_buffer()
    made.load(slab(), [5, 2, 3, 7])
    written = ["copies: wait for compute", "copies: copy", "copies: landed"]
    assert streams.orders == written
    made.settle([0, 1, 4, 6])
    assert streams.orders == written
    made.settle([5, 2, 3, 7])
    made.settle([5, 2, 3, 7])
    assert streams.orders == [*written, "compute: wait until landed on copies"]


def test_pages_are_not_given_back_while_a_copy_may_still_land_in_them(streams: Streams):
    pool = PagePool(8)
    pager = AdapterPager(
        pool, ReclaimOrder(), gpu_buffer(), lambda _: slab(), 2**20, lambda: None, Costs()
    )
    adapter = AdapterRef("1", "")
    pager.want(adapter)
    while not pager.settled:
        pass
    pager.collect()
    pager.lease("1")
    pager.unwant("1")
    pager.release("1")
    pager.evict("1")
    assert streams.orders[-1] == "compute: wait until landed on copies"
    assert len(pool.take(8, Owner("kv", "next"))) == 8
    pager.close()
