"""Adapters between their three tiers: store → host memory → pool.

Reading a version from the store (file work, casting, page formatting) runs on threads of its
own, begun when a request for it arrives; the step loop only ever copies ready pages. A hundred
requests for one version cause one read. A read that fails, or that the store does not answer in
time, fails the requests that wait for it, and no others.
"""

import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from gateway.engine.memory.buffer import PageBuffer, Slab
from gateway.engine.memory.costs import Costs
from gateway.engine.memory.pages import Owner, PagePool
from gateway.engine.memory.reclaim import ReclaimOrder
from gateway.engine.memory.rows import RowLayout
from gateway.engine.messages import AdapterRef

log = logging.getLogger(__name__)

READERS = 4
"""Reads at a time. One that hangs must not hold up the others."""


class AdapterError(Exception):
    """This adapter version can't be loaded; the message is fit for its tenant."""


class Resident:
    """An adapter whose pages are in the pool."""

    __slots__ = ("layout", "leases", "owner", "pages", "tables")

    def __init__(self, layout: RowLayout, pages: list[int], owner: Owner) -> None:
        self.layout = layout
        self.pages = pages
        self.owner = owner
        self.leases = 0
        self.tables: dict[str, Any] = {}
        """What kernels derive from layout and pages."""


class _Deadline(NamedTuple):
    """When a read is given up; it may be over by then."""

    at: float
    digest: str
    future: Future[Slab]


class AdapterPager:
    """One thread calls this: the step loop. `wake` is called from the reading threads.

    `read_s_max`: seconds after which those who wait for a read are told that it failed.
    """

    def __init__(
        self,
        pool: PagePool,
        reclaim: ReclaimOrder,
        buffer: PageBuffer,
        read: Callable[[AdapterRef], Slab],
        host_bytes: int,
        wake: Callable[[], None],
        costs: Costs,
        read_s_max: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._reclaim = reclaim
        self._buffer = buffer
        self._read = read
        self._host_bytes = host_bytes
        self._wake = wake
        self._costs = costs
        self._read_s_max = read_s_max
        self._clock = clock
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="adapter-reader")
        self._reading: dict[str, Future[Slab]] = {}
        self._given_up: set[str] = set()  # of those, the ones that take too long
        self._finished: deque[str] = deque()  # appended to by the reading threads
        self._deadlines: deque[_Deadline] = deque()  # the next one first
        self._failed: dict[str, AdapterError] = {}
        self._host: OrderedDict[str, Slab] = OrderedDict()  # least recently used first
        self._host_used = 0
        self._resident: dict[str, Resident] = {}
        self._wanted: Counter[str] = Counter()
        self._retired: set[str] = set()
        self._pinned: set[str] = set()
        self.idle_pages = 0
        """Pages of adapters that nobody leases, and that are not pinned."""
        self.held_pages = 0
        """Pages of all other adapters in the pool."""
        self.reads = 0
        self.loads = 0
        self.bytes_loaded = 0

    @property
    def wanted(self) -> Mapping[str, int]:
        """How many requests wait for each version."""
        return self._wanted

    # --- a request waits for a version ----------------------------------------------------------

    def want(self, ref: AdapterRef) -> None:
        """A request waits for this version: begin to read it unless it is at hand."""
        self._wanted[ref.digest] += 1
        self._fetch(ref)

    def unwant(self, digest: str) -> None:
        """The request has its lease, or is gone."""
        self._wanted[digest] -= 1
        if self._wanted[digest]:
            return
        del self._wanted[digest]
        self._failed.pop(digest, None)  # all who waited were told; a later request tries again
        self._drop_if_retired(digest)

    def ready(self, ref: AdapterRef) -> bool:
        """True if the version can be leased; if not, it is being read, or `failure` has the
        reason why it is not."""
        if ref.digest in self._resident or ref.digest in self._host:
            return True
        self._fetch(ref)
        return False

    def failure(self, digest: str) -> AdapterError | None:
        """Why a wanted version can't be read."""
        return self._failed.get(digest)

    def collect(self) -> list[str]:
        """Take over what the reading threads have finished, once per iteration. Returns the
        versions that are no longer being read: they are ready, or `failure` says why not."""
        settled = []
        while self._finished:
            digest = self._finished.popleft()
            self._given_up.discard(digest)
            self._take_over(digest, self._reading.pop(digest))
            settled.append(digest)
        return settled + self._give_up()

    @property
    def settled(self) -> bool:
        """Whether `collect` would have something to say."""
        return bool(self._finished) or self._late()

    def _fetch(self, ref: AdapterRef) -> None:
        digest = ref.digest
        if digest in self._resident or digest in self._host or digest in self._failed:
            return
        if digest in self._reading:
            if digest in self._given_up:
                self._failed[digest] = _no_answer()
            return
        self.reads += 1
        future = self._reading[digest] = self._threads.submit(self._timed_read, ref)
        self._deadlines.append(_Deadline(self._clock() + self._read_s_max, digest, future))
        future.add_done_callback(lambda _: self._report(digest))

    def _report(self, digest: str) -> None:
        """On a reading thread, mostly."""
        self._finished.append(digest)
        self._wake()

    def _timed_read(self, ref: AdapterRef) -> Slab:
        started = time.perf_counter()
        slab = self._read(ref)
        self._costs.read.measured(slab.bytes, time.perf_counter() - started)
        return slab

    def _take_over(self, digest: str, future: Future[Slab]) -> None:
        error = future.exception()
        if error is None:
            self._failed.pop(digest, None)  # it came after its deadline, but it came
            if digest in self._wanted or digest not in self._retired:
                self._host[digest] = future.result()
                self._host_used += future.result().bytes
                self._trim_host(keep=digest)
        elif digest in self._wanted:
            self._failed[digest] = _for_tenant(digest, error)
        self._drop_if_retired(digest)

    def _give_up(self) -> list[str]:
        """Wanted versions whose reading takes too long, and whose requests don't know yet."""
        late = []
        while self._late():
            _, digest, future = self._deadlines.popleft()
            if self._reading.get(digest) is not future:
                continue
            self._given_up.add(digest)
            if digest in self._wanted:
                self._failed[digest] = _no_answer()
                late.append(digest)
        return late

    def _late(self) -> bool:
        return bool(self._deadlines) and self._clock() > self._deadlines[0].at

    # --- leases ---------------------------------------------------------------------------------

    def pages_to_lease(self, digest: str) -> int:
        """Pages that leasing this ready version would take from the pool now."""
        return 0 if digest in self._resident else self._host[digest].layout.pages

    def idle_pages_of(self, digest: str) -> int:
        """Pages of this version that `idle_pages` counts."""
        resident = self._resident.get(digest)
        return len(resident.pages) if resident and self._is_idle(digest, resident) else 0

    def leased(self, digest: str) -> bool:
        resident = self._resident.get(digest)
        return resident is not None and resident.leases > 0

    def lease(self, digest: str, tenant: str = "") -> Resident:
        """Keep a ready version in the pool until `release`. The caller has seen that it fits."""
        resident = self._resident.get(digest)
        if resident is None:
            resident = self._load(digest, tenant)
        elif self._is_idle(digest, resident):
            self.idle_pages -= len(resident.pages)
            self.held_pages += len(resident.pages)
        resident.leases += 1
        size_bytes = len(resident.pages) * self._buffer.page_bytes
        at_hand = digest in self._host
        if at_hand:
            self._host.move_to_end(digest)
        self._reclaim.use(digest, len(resident.pages), self._costs.adapter_s(size_bytes, at_hand))
        return resident

    def release(self, digest: str) -> None:
        resident = self._resident[digest]
        assert resident.leases > 0, f"adapter {digest} released more often than leased"
        resident.leases -= 1
        if not resident.leases:
            self._reclaim.idle(digest)
        self._count_if_idle(digest, resident)
        self._drop_if_retired(digest)

    def _load(self, digest: str, tenant: str) -> Resident:
        slab = self._host[digest]
        owner = Owner("adapter", digest, tenant)
        pages = self._pool.take(slab.layout.pages, owner)
        started = time.perf_counter()
        self._buffer.load(slab, pages)
        self._costs.copy.measured(slab.bytes, time.perf_counter() - started)
        self.loads += 1
        self.bytes_loaded += slab.bytes
        self.held_pages += len(pages)
        resident = self._resident[digest] = Resident(slab.layout, pages, owner)
        return resident

    # --- staying and going ----------------------------------------------------------------------

    def pin(self, digest: str) -> None:
        """Once in the pool, stay there."""
        if digest in self._pinned:
            return
        idle = self.idle_pages_of(digest)
        self.idle_pages -= idle
        self.held_pages += idle
        self._pinned.add(digest)
        self._reclaim.pin(digest)

    def unpin(self, digest: str) -> None:
        if digest not in self._pinned:
            return
        self._pinned.remove(digest)
        self._reclaim.unpin(digest)
        if digest in self._resident:
            self._count_if_idle(digest, self._resident[digest])

    def evict(self, digest: str) -> None:
        """Free the pages of an idle adapter."""
        resident = self._resident.pop(digest)
        assert not resident.leases, f"adapter {digest} is leased"
        self._reclaim.drop(digest)
        if digest in self._pinned:
            self.held_pages -= len(resident.pages)
        else:
            self.idle_pages -= len(resident.pages)
        self._buffer.settle(resident.pages)
        self._pool.give(resident.pages, resident.owner)

    def remember(self, digest: str) -> None:
        """A version that was unloaded is asked for again."""
        self._retired.discard(digest)

    def unload(self, digest: str) -> None:
        """Forget a version everywhere, at once if idle, else when its last lease ends."""
        self.unpin(digest)
        self._retired.add(digest)
        self._drop_if_retired(digest)

    def retired(self, digest: str) -> bool:
        """Whether this version was unloaded, and is only kept for those who use it still."""
        return digest in self._retired

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def pinned_pages(self, but: str | None) -> int:
        """Pages of pinned adapters in the pool, `but` that one's."""
        pinned = (self._resident.get(digest) for digest in self._pinned if digest != but)
        return sum(len(resident.pages) for resident in pinned if resident)

    @property
    def resident_count(self) -> int:
        return len(self._resident)

    @property
    def host_count(self) -> int:
        return len(self._host)

    def _is_idle(self, digest: str, resident: Resident) -> bool:
        return not resident.leases and digest not in self._pinned

    def _count_if_idle(self, digest: str, resident: Resident) -> None:
        if self._is_idle(digest, resident):
            self.held_pages -= len(resident.pages)
            self.idle_pages += len(resident.pages)

    def _drop_if_retired(self, digest: str) -> None:
        if digest not in self._retired or self.leased(digest) or digest in self._wanted:
            return
        self._drop_from_host(digest)
        if digest in self._resident:
            self.evict(digest)
        if digest not in self._reading:
            self._retired.discard(digest)

    def _drop_from_host(self, digest: str) -> None:
        slab = self._host.pop(digest, None)
        if slab is not None:
            self._host_used -= slab.bytes

    def _trim_host(self, keep: str) -> None:
        """Least recently used versions leave the host tier once it is over its bytes."""
        excess = self._host_used - self._host_bytes
        leaving = []
        for digest, slab in self._host.items():
            if excess <= 0:
                break
            if digest != keep and digest not in self._wanted:
                excess -= slab.bytes
                leaving.append(digest)
        for digest in leaving:
            self._drop_from_host(digest)


def _no_answer() -> AdapterError:
    return AdapterError("the adapter store does not answer")


def _for_tenant(digest: str, error: BaseException) -> AdapterError:
    if isinstance(error, AdapterError):
        return error
    log.error("reading adapter %s failed", digest, exc_info=error)
    return AdapterError("it could not be read from the adapter store")
