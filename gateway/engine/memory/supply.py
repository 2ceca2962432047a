"""Where pages come from: free ones first, then what lies idle, the least worth first."""

from collections.abc import Container, Hashable

from gateway.engine.memory.pager import AdapterPager
from gateway.engine.memory.pages import Kind, PagePool
from gateway.engine.memory.radix import RadixCache
from gateway.engine.memory.reclaim import ReclaimOrder


class PageSupply:
    """One pool, one price for all that is idle: adapters, KV and cached prefixes compete for the
    same pages, so their shares follow the load."""

    def __init__(
        self, pool: PagePool, pager: AdapterPager, radix: RadixCache, reclaim: ReclaimOrder
    ) -> None:
        self._pool = pool
        self._pager = pager
        self._radix = radix
        self._reclaim = reclaim

    def missing(self, adapter_pages: int, kv_pages: int, idle_kept: int = 0) -> int:
        """How many of these pages could not be had; `idle_kept` pages that are idle now are to
        stay. Not positive if all could."""
        idle = self._pager.idle_pages + self._radix.idle_pages - idle_kept
        return adapter_pages + kv_pages - self._pool.free - idle

    def secure(self, pages: int, kind: Kind, keep: Container[Hashable] = ()) -> None:
        """See to it that so many pages are free, for what `kind` says. `missing` was asked.

        Adapters that waiting requests want go only if nothing else is left.
        """
        while self._pool.free < pages:
            spared = _Both(self._pager.wanted, keep)
            key = self._reclaim.cheapest(spared)
            if key is None:
                key = self._reclaim.cheapest(keep)
            assert key is not None, f"{pages} pages asked, {self._pool.free} free or idle"
            self.evict(key)

    def evict(self, key: Hashable) -> None:
        """Free what the order over idle things knows by this key."""
        if isinstance(key, bytes):
            self._radix.evict(key)
        else:
            self._pager.evict(str(key))

    def kv_roof(self, more_adapter_pages: int = 0) -> int:
        """Pages that the KV of running requests could ever have beside the adapters in use,
        `more_adapter_pages` of another one, pinned adapters, and the prefixes that are read."""
        held = self._pager.held_pages + more_adapter_pages + self._radix.locked_pages
        return self._pool.total - held


class _Both(Container[Hashable]):
    def __init__(self, one: Container[Hashable], other: Container[Hashable]) -> None:
        self._one = one
        self._other = other

    def __contains__(self, key: object) -> bool:
        return key in self._one or key in self._other
