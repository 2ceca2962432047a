"""Adapters between their three tiers: store → host memory → pool.

Reading a version from the store (file work, casting, page formatting) runs on a thread of its
own, begun when a request for it arrives; the step loop only ever copies ready pages. A hundred
requests for one version cause one read. A read that fails fails the requests that wait for it.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from gateway.engine.memory.buffer import PageBuffer, Slab
from gateway.engine.memory.pages import Owner, PagePool
from gateway.engine.memory.rows import RowLayout
from gateway.engine.messages import AdapterRef

log = logging.getLogger(__name__)


class AdapterError(Exception):
    """This adapter version can't be loaded; the message is fit for its tenant."""


class Resident:
    """An adapter whose pages are in the pool."""

    __slots__ = ("layout", "leases", "pages", "tables")

    def __init__(self, layout: RowLayout, pages: list[int]) -> None:
        self.layout = layout
        self.pages = pages
        self.leases = 0
        self.tables: dict[str, Any] = {}
        """What kernels derive from layout and pages."""


class AdapterPager:
    """One thread calls this: the step loop. `wake` is called from the reading thread."""

    def __init__(
        self,
        pool: PagePool,
        buffer: PageBuffer,
        read: Callable[[AdapterRef], Slab],
        host_bytes: int,
        wake: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._buffer = buffer
        self._read = read
        self._host_bytes = host_bytes
        self._wake = wake
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapter-reader")
        self._reading: dict[str, Future[Slab]] = {}
        self._failed: dict[str, AdapterError] = {}
        self._host: OrderedDict[str, Slab] = OrderedDict()  # least recently used first
        self._resident: OrderedDict[str, Resident] = OrderedDict()  # least recently leased first
        self._wanted: Counter[str] = Counter()
        self._retired: set[str] = set()
        self.reads = 0
        self.loads = 0

    # --- a request waits for a version ----------------------------------------------------------

    def want(self, ref: AdapterRef) -> None:
        """A request waits for this version: begin to read it unless it is at hand."""
        self._retired.discard(ref.digest)
        self._wanted[ref.digest] += 1
        self.ready(ref)

    def unwant(self, digest: str) -> None:
        """The request has its lease, or is gone."""
        self._wanted[digest] -= 1
        if self._wanted[digest]:
            return
        del self._wanted[digest]
        self._failed.pop(digest, None)  # all who waited were told; a later request tries again
        self._drop_if_retired(digest)

    def ready(self, ref: AdapterRef) -> bool:
        """True once the version can be leased; while not, it is being read.

        Raises AdapterError if it can't be read.
        """
        digest = ref.digest
        if digest in self._resident or digest in self._host:
            return True
        if digest in self._failed:
            raise self._failed[digest]
        if digest not in self._reading:
            self.reads += 1
            future = self._reading[digest] = self._thread.submit(self._read, ref)
            future.add_done_callback(lambda _: self._wake())
        return False

    def settled(self, digest: str) -> bool:
        """False while the version is being read."""
        future = self._reading.get(digest)
        return future is None or future.done()

    def collect(self) -> None:
        """Take over what the reading thread has finished. Called once per iteration."""
        for digest, future in [item for item in self._reading.items() if item[1].done()]:
            del self._reading[digest]
            error = future.exception()
            if error is None and (digest in self._wanted or digest not in self._retired):
                self._host[digest] = future.result()
                self._trim_host(keep=digest)
            elif error is not None and digest in self._wanted:
                self._failed[digest] = _for_tenant(digest, error)
            self._drop_if_retired(digest)

    # --- leases ---------------------------------------------------------------------------------

    def pages_to_lease(self, digest: str) -> int:
        """Pages that leasing this ready version would take from the pool now."""
        return 0 if digest in self._resident else self._host[digest].layout.pages

    def lease(self, digest: str) -> Resident:
        """Keep a ready version in the pool until `release`. The caller has seen that it fits."""
        resident = self._resident.get(digest)
        if resident is None:
            slab = self._host[digest]
            self._host.move_to_end(digest)
            pages = self._pool.take(slab.layout.pages, Owner("adapter", digest))
            self._buffer.load(slab, pages)
            self.loads += 1
            resident = self._resident[digest] = Resident(slab.layout, pages)
        self._resident.move_to_end(digest)
        resident.leases += 1
        return resident

    def release(self, digest: str) -> None:
        resident = self._resident[digest]
        assert resident.leases > 0, f"adapter {digest} released more often than leased"
        resident.leases -= 1
        self._drop_if_retired(digest)

    # --- making room ----------------------------------------------------------------------------

    def idle_pages(self, keep: str | None = None) -> int:
        """Pages that `reclaim` could free, `keep`'s not counted."""
        return sum(
            len(resident.pages)
            for digest, resident in self._resident.items()
            if not resident.leases and digest != keep
        )

    def reclaim(self, pages: int, keep: str | None = None) -> None:
        """Free at least `pages` pages of idle adapters, least recently used first."""
        freed = 0
        for digest in list(self._resident):
            if freed >= pages:
                return
            resident = self._resident[digest]
            if not resident.leases and digest != keep:
                freed += len(resident.pages)
                self._evict(digest)
        assert freed >= pages, f"{pages} pages asked, {freed} idle"

    def unload(self, digest: str) -> None:
        """Forget a version everywhere, at once if idle, else when its last lease ends."""
        self._retired.add(digest)
        self._drop_if_retired(digest)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def resident_count(self) -> int:
        return len(self._resident)

    @property
    def host_count(self) -> int:
        return len(self._host)

    def _drop_if_retired(self, digest: str) -> None:
        resident = self._resident.get(digest)
        leased = resident is not None and resident.leases > 0
        if digest not in self._retired or leased or digest in self._wanted:
            return
        self._host.pop(digest, None)
        if resident is not None:
            self._evict(digest)
        if digest not in self._reading:
            self._retired.discard(digest)

    def _evict(self, digest: str) -> None:
        resident = self._resident.pop(digest)
        self._buffer.settle(resident.pages)
        self._pool.give(resident.pages, Owner("adapter", digest))

    def _trim_host(self, keep: str) -> None:
        """Least recently used versions leave the host tier once it is over its bytes."""
        used = sum(slab.bytes for slab in self._host.values())
        for digest in list(self._host):
            if used <= self._host_bytes:
                return
            if digest != keep and digest not in self._wanted:
                used -= self._host.pop(digest).bytes


def _for_tenant(digest: str, error: BaseException) -> AdapterError:
    if isinstance(error, AdapterError):
        return error
    log.error("reading adapter %s failed", digest, exc_info=error)
    return AdapterError("it could not be read from the adapter store")
