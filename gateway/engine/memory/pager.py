"""Adapters between their three tiers: store → host memory → pool.

Reading a version from the store (file work, casting, page formatting) runs on threads of its
own (`reader`), asked for when a request arrives; the step loop only ever copies ready pages. A
hundred requests for one version cause one read. A read that fails, or that the store does not
answer in time, fails the requests that wait for it, and no others.
"""

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from gateway.engine.memory.buffer import PageBuffer, Slab
from gateway.engine.memory.costs import Costs
from gateway.engine.memory.pages import Owner, PagePool
from gateway.engine.memory.reader import AdapterReader
from gateway.engine.memory.reclaim import ReclaimOrder
from gateway.engine.memory.rows import RowLayout
from gateway.engine.messages import AdapterRef, Place

log = logging.getLogger(__name__)


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
        self._reader = AdapterReader(read, wake, costs, read_s_max, clock)
        self._host_bytes = host_bytes
        self._costs = costs
        self._failed: dict[str, AdapterError] = {}
        self._host: OrderedDict[str, Slab] = OrderedDict()  # least recently used first
        self._host_used = 0
        self._ahead: dict[str, int] = {}  # bytes of those that were read and wait for their lease
        self._resident: dict[str, Resident] = {}
        self._wanted: Counter[str] = Counter()
        self._retired: set[str] = set()
        self._pinned: set[str] = set()
        self.idle_pages = 0
        """Pages of adapters that nobody leases, and that are not pinned."""
        self.held_pages = 0
        """Pages of all other adapters in the pool."""
        self.loads = 0
        self.bytes_loaded = 0

    @property
    def wanted(self) -> Mapping[str, int]:
        """How many requests wait for each version."""
        return self._wanted

    # --- a request waits for a version ----------------------------------------------------------

    def want(self, ref: AdapterRef, tenant: str = "") -> None:
        """A request waits for this version: have it read unless it is at hand."""
        self._wanted[ref.digest] += 1
        self._fetch(ref, tenant)

    def unwant(self, digest: str) -> None:
        """The request has its lease, or is gone."""
        self._wanted[digest] -= 1
        if self._wanted[digest]:
            return
        del self._wanted[digest]
        self._failed.pop(digest, None)  # all who waited were told; a later request tries again
        self._ahead.pop(digest, None)
        self._reader.withdraw(digest)
        self._drop_if_retired(digest)
        self._read_on()

    def ready(self, ref: AdapterRef, tenant: str = "") -> bool:
        """True if the version can be leased; if not, it is being read, or `failure` has the
        reason why it is not."""
        if ref.digest in self._resident or ref.digest in self._host:
            return True
        self._fetch(ref, tenant)
        return False

    def failure(self, digest: str) -> AdapterError | None:
        """Why a wanted version can't be read."""
        return self._failed.get(digest)

    def collect(self) -> list[str]:
        """Take over what the reading threads have finished, once per iteration. Returns the
        versions that are no longer being read: they are ready, or `failure` says why not."""
        settled = []
        for digest, future in self._reader.finished():
            self._take_over(digest, future)
            settled.append(digest)
        for digest in self._reader.overdue():
            if digest in self._wanted:
                self._failed[digest] = _no_answer()
                settled.append(digest)
        self._read_on()
        return settled

    @property
    def settled(self) -> bool:
        """Whether `collect` would have something to say."""
        return self._reader.has_news

    @property
    def reads(self) -> int:
        """Reads begun."""
        return self._reader.reads

    def _fetch(self, ref: AdapterRef, tenant: str) -> None:
        digest = ref.digest
        if digest in self._resident or digest in self._host or digest in self._failed:
            return
        if self._reader.gave_up(digest):
            self._failed[digest] = _no_answer()
            return
        self._reader.ask(ref, tenant)
        self._read_on()

    def _read_on(self) -> None:
        """Begin reads, as far ahead of the leases as host memory has room; one in any case, for
        an adapter may be larger than all of it."""
        if self._ahead or self._reader.reading:
            self._reader.begin(self._host_bytes - sum(self._ahead.values()))
        else:
            self._reader.begin_one()

    def _take_over(self, digest: str, future: Future[Slab]) -> None:
        error = future.exception()
        if error is None:
            self._failed.pop(digest, None)  # it came after its deadline, but it came
            if digest in self._wanted or digest not in self._retired:
                slab = self._host[digest] = future.result()
                self._host_used += slab.bytes
                if digest in self._wanted:
                    self._ahead[digest] = slab.bytes
                self._trim_host(keep=digest)
        elif digest in self._wanted:
            self._failed[digest] = _for_tenant(digest, error)
        self._drop_if_retired(digest)

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
        self._ahead.pop(digest, None)
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
        self._reader.close()

    def pinned_pages(self, but: str | None) -> int:
        """Pages of pinned adapters in the pool, `but` that one's."""
        pinned = (self._resident.get(digest) for digest in self._pinned if digest != but)
        return sum(len(resident.pages) for resident in pinned if resident)

    def place(self, digest: str) -> Place:
        """The nearest place in which the version is."""
        if digest in self._resident:
            return "pool"
        return "host" if digest in self._host else "store"

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
        if digest not in self._reader:
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
