"""Reads of adapters from the store, on threads of their own, in turn between tenants.

A tenant that asks for a thousand adapters gets every other read while another one asks for one.
Reads begin only as far ahead as host memory allows, and one that hangs holds up no others: it keeps
its thread, but does not count any more.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from gateway.engine.memory.buffer import Slab
from gateway.engine.memory.costs import Costs
from gateway.engine.messages import AdapterRef

READERS = 4
"""Reads at a time."""
HUNG_MAX = 28
"""Reads that hang until the store is taken for dead."""


class _Read(NamedTuple):
    future: Future[Slab]
    deadline: float


class AdapterReader:
    """`read_s_max`: seconds after which a read is given up. `wake` is called from the reading
    threads, the rest by the step loop."""

    def __init__(
        self,
        read: Callable[[AdapterRef], Slab],
        wake: Callable[[], None],
        costs: Costs,
        read_s_max: float,
        clock: Callable[[], float],
    ) -> None:
        self._read = read
        self._wake = wake
        self._costs = costs
        self._read_s_max = read_s_max
        self._clock = clock
        self._threads = ThreadPoolExecutor(READERS + HUNG_MAX, thread_name_prefix="adapter-reader")
        self._asked: dict[str, AdapterRef] = {}
        self._lines: OrderedDict[str, OrderedDict[str, None]] = OrderedDict()
        """What each tenant asked for, in order; the tenant whose turn it is first."""
        self._reading: OrderedDict[str, _Read] = OrderedDict()  # the next deadline first
        self._given_up: dict[str, _Read] = {}  # those whose deadline is past
        self._finished: deque[str] = deque()  # appended to by the reading threads
        self._largest = 0
        self.reads = 0

    def __contains__(self, digest: str) -> bool:
        """Whether it is asked for or being read, however long that takes."""
        return digest in self._asked or digest in self._reading or digest in self._given_up

    def gave_up(self, digest: str) -> bool:
        """Whether it is being read for too long already."""
        return digest in self._given_up

    @property
    def reading(self) -> bool:
        """Whether a read is under way that may still come in time."""
        return bool(self._reading)

    def ask(self, ref: AdapterRef, tenant: str) -> None:
        """Have it read when it is the tenant's turn."""
        if ref.digest not in self._reading and ref.digest not in self._given_up:
            self._asked[ref.digest] = ref
            self._lines.setdefault(tenant, OrderedDict())[ref.digest] = None

    def withdraw(self, digest: str) -> None:
        """Nobody wants it any more. A read that has begun goes on."""
        self._asked.pop(digest, None)

    def begin(self, bytes_free: int) -> None:
        """Begin reads while what they may bring fits `bytes_free`."""
        while self._lines and len(self._reading) < READERS:
            if (len(self._reading) + 1) * self._largest > bytes_free:
                return
            self.begin_one()

    def begin_one(self) -> None:
        """Begin the next read, of the tenant whose turn it is."""
        while self._lines:
            tenant, line = next(iter(self._lines.items()))
            digest, _ = line.popitem(last=False)
            self._lines.move_to_end(tenant)
            if not line:
                del self._lines[tenant]
            ref = self._asked.pop(digest, None)
            if ref is not None:  # else it was withdrawn, or read for another tenant
                self._begin(ref)
                return

    def finished(self) -> list[tuple[str, Future[Slab]]]:
        """Reads that are over, each told once."""
        found = []
        while self._finished:
            digest = self._finished.popleft()
            future = (self._reading.pop(digest, None) or self._given_up.pop(digest)).future
            if future.exception() is None:
                self._largest = max(self._largest, future.result().bytes)
            found.append((digest, future))
        return found

    def overdue(self) -> list[str]:
        """Reads that take too long, each told once; if the store is dead, all that were asked
        for."""
        late = []
        while self._late():
            digest, read = self._reading.popitem(last=False)
            self._given_up[digest] = read
            late.append(digest)
        if self._dead():
            late += self._asked
            self._asked.clear()
            self._lines.clear()
        return late

    @property
    def has_news(self) -> bool:
        """Whether `finished` or `overdue` would have something to say."""
        return bool(self._finished) or self._late() or (self._dead() and bool(self._asked))

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self, ref: AdapterRef) -> None:
        self.reads += 1
        future = self._threads.submit(self._timed_read, ref)
        self._reading[ref.digest] = _Read(future, self._clock() + self._read_s_max)
        future.add_done_callback(lambda _: self._report(ref.digest))

    def _timed_read(self, ref: AdapterRef) -> Slab:
        started = time.perf_counter()
        slab = self._read(ref)
        self._costs.read.measured(slab.bytes, time.perf_counter() - started)
        return slab

    def _report(self, digest: str) -> None:
        """On a reading thread, mostly."""
        self._finished.append(digest)
        self._wake()

    def _late(self) -> bool:
        first = next(iter(self._reading.values()), None)
        return first is not None and self._clock() > first.deadline

    def _dead(self) -> bool:
        return len(self._given_up) >= HUNG_MAX
