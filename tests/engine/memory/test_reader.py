import threading
from collections.abc import Iterator

import pytest
import torch

from gateway.engine.memory.buffer import Slab
from gateway.engine.memory.costs import Costs
from gateway.engine.memory.reader import HUNG_MAX, READERS, AdapterReader
from gateway.engine.memory.rows import RowLayout
from gateway.engine.messages import AdapterRef

SLAB_BYTES = 64


def ref(digest: str) -> AdapterRef:
    return AdapterRef(digest, "")


class Store:
    """Reads of digests that are `held` end when told to; the others at once."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.held: dict[str, threading.Event] = {}

    def hold(self, *digests: str) -> None:
        self.held |= {digest: threading.Event() for digest in digests}

    def __call__(self, ref: AdapterRef) -> Slab:
        self.begun.append(ref.digest)
        if ref.digest in self.held:
            assert self.held[ref.digest].wait(20)
        return Slab(RowLayout.plan({}, {}, 16), torch.zeros(1, SLAB_BYTES // 4))


class Watched(AdapterReader):
    def __init__(self, store: Store) -> None:
        self.store = store
        self.now = 0.0
        self.woken = threading.Semaphore(0)
        super().__init__(store, self.woken.release, Costs(), 60.0, lambda: self.now)

    def wait(self, count: int) -> list[str]:
        """Until so many more reads are over."""
        found: list[str] = []
        while len(found) < count:
            assert self.woken.acquire(timeout=10)
            found += [digest for digest, _ in self.finished()]
        return found


@pytest.fixture
def reader() -> Iterator[Watched]:
    reader = Watched(Store())
    yield reader
    for event in reader.store.held.values():
        event.set()
    reader.close()


def test_a_tenant_that_asks_for_hundreds_gets_every_other_read(reader: Watched):
    for index in range(200):
        reader.ask(ref(f"many-{index}"), "flood")
    for index in range(3):
        reader.ask(ref(f"few-{index}"), "modest")
    order: list[str] = []
    while len(order) < 6:
        reader.begin_one()
        order += reader.wait(1)
    assert order == ["many-0", "few-0", "many-1", "few-1", "many-2", "few-2"]


def test_so_many_reads_at_a_time_and_no_more(reader: Watched):
    reader.store.hold(*map(str, range(9)))
    for index in range(9):
        reader.ask(ref(str(index)), "tenant")
    reader.begin(10**9)
    reader.store.held["1"].set()
    assert reader.wait(1) == ["1"]
    reader.begin(10**9)
    assert reader.reads == READERS + 1


def test_reads_go_only_as_far_ahead_as_there_is_room(reader: Watched):
    reader.ask(ref("first"), "tenant")
    reader.begin_one()
    reader.wait(1)  # from here on it knows how large an adapter is
    reader.store.hold("0", "1", "2")
    for index in range(3):
        reader.ask(ref(str(index)), "tenant")
    reader.begin(2 * SLAB_BYTES)
    assert reader.reads == 1 + 2
    reader.begin(2 * SLAB_BYTES)
    assert reader.reads == 1 + 2


def test_what_nobody_wants_any_more_is_not_read(reader: Watched):
    for name in ("a", "b"):
        reader.ask(ref(name), "tenant")
    reader.withdraw("a")
    assert "a" not in reader
    reader.begin(10**9)
    assert reader.wait(1) == ["b"]
    assert reader.store.begun == ["b"]


def test_two_tenants_ask_for_the_same_and_it_is_read_once(reader: Watched):
    for tenant in ("one", "other"):
        reader.ask(ref("same"), tenant)
    reader.ask(ref("next"), "other")
    reader.begin(10**9)
    assert sorted(reader.wait(2)) == ["next", "same"]
    assert reader.reads == 2


def test_reads_that_hang_are_given_up_and_hold_up_no_others(reader: Watched):
    hanging = [f"hanging-{index}" for index in range(READERS)]
    reader.store.hold(*hanging)
    for name in hanging:
        reader.ask(ref(name), "tenant")
    reader.begin(10**9)
    reader.ask(ref("sound"), "other")
    reader.begin(10**9)
    assert reader.reads == READERS
    reader.now = 61
    assert reader.has_news
    assert reader.overdue() == hanging
    assert all(reader.gave_up(name) for name in hanging)
    assert reader.overdue() == []
    reader.begin(10**9)
    assert reader.wait(1) == ["sound"]


def test_a_store_that_answers_nothing_any_more_is_taken_for_dead(reader: Watched):
    names = [f"hanging-{index}" for index in range(HUNG_MAX + 5)]
    reader.store.hold(*names)
    for name in names:
        reader.ask(ref(name), "tenant")
    told: list[str] = []
    for turn in range(HUNG_MAX // READERS):
        reader.begin(10**9)
        reader.now = 61.0 * (turn + 1) + turn
        told += reader.overdue()
    assert sorted(told) == sorted(names)
    assert reader.reads == HUNG_MAX
    reader.store.held[names[0]].set()  # one answers after all
    assert reader.wait(1) == [names[0]]
    reader.ask(ref("again"), "tenant")
    reader.begin(10**9)
    assert reader.wait(1) == ["again"]
