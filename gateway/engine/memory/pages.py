"""The page pool's bookkeeping: who owns which page, and who reads it. Integers only; the bytes
lie in `buffer`.

    pages    0     1     2     3     4     5     6     7
            kv   prefix  --  adapter adptr kv    --    --     any free page serves any owner
                 2 readers

A page has one owner. A page of a cached prefix may have readers beside it: sequences that go on
from that prefix. It can't be given back while it has any.

Invariant, checked by `check`: free + owned = total, and the ledger sums to what is owned.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

Kind = Literal["kv", "prefix", "adapter"]


class Owner(NamedTuple):
    kind: Kind
    key: str
    """Request id for KV, version digest for an adapter and for the prefixes computed with it."""
    tenant: str = ""
    """On whose account the pages are."""


class Snapshot(NamedTuple):
    """The pool at one moment."""

    total: int
    free: int
    ledger: dict[tuple[Kind, str], int]
    """Pages owned, by kind and tenant; with `free` they sum to `total`."""
    kinds: list[Kind | None]
    """What each page holds, in the order of the pool; None: free."""


class PagePool:
    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._owner: list[Owner | None] = [None] * total
        self._readers = [0] * total
        self._ledger: Counter[tuple[Kind, str]] = Counter()
        self.takes = 0
        """Calls of `take` that took a page."""

    @property
    def free(self) -> int:
        return len(self._free)

    def owned(self, kind: Kind) -> int:
        return sum(count for (owned, _), count in self._ledger.items() if owned == kind)

    def take(self, count: int, owner: Owner) -> list[int]:
        """`count` free pages, the most recently freed first. The caller has asked `free`."""
        assert 0 <= count <= len(self._free), f"{count} pages asked, {len(self._free)} free"
        if not count:
            return []
        self.takes += 1
        taken = self._free[: -count - 1 : -1]
        del self._free[-count:]
        for page in taken:
            assert self._owner[page] is None, f"free page {page} has an owner"
            self._owner[page] = owner
        self._ledger[owner.kind, owner.tenant] += count
        return taken

    def give(self, pages: Sequence[int], owner: Owner) -> None:
        """Pages back to the free ones. Nobody reads them any more."""
        for page in pages:
            assert self._owner[page] == owner, f"page {page} is not {owner}'s"
            assert not self._readers[page], f"page {page} is still read"
            self._owner[page] = None
        self._free.extend(reversed(pages))
        self._book(owner, -len(pages))

    def transfer(self, page: int, old: Owner, new: Owner) -> None:
        """A page, with what it holds, to another owner."""
        assert self._owner[page] == old, f"page {page} is not {old}'s"
        self._owner[page] = new
        self._book(old, -1)
        self._book(new, 1)

    def share(self, page: int) -> None:
        """One more reader of an owned page."""
        assert self._owner[page] is not None, f"page {page} is free"
        self._readers[page] += 1

    def unshare(self, page: int) -> None:
        assert self._readers[page] > 0, f"page {page} has no readers"
        self._readers[page] -= 1

    def snapshot(self) -> Snapshot:
        """Walks the whole pool: for pictures, not for the step loop."""
        kinds = [owner.kind if owner else None for owner in self._owner]
        return Snapshot(self.total, self.free, dict(self._ledger), kinds)

    def check(self) -> None:
        """Walk the whole pool. For tests; nothing on the step loop needs it."""
        assert len(self._free) + self._ledger.total() == self.total, "pages are not conserved"
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        assert all(self._owner[page] is None for page in self._free), "a free page is owned"
        assert not any(self._readers[page] for page in self._free), "a free page is read"
        owned = Counter((owner.kind, owner.tenant) for owner in self._owner if owner is not None)
        assert owned == self._ledger, "the ledger does not match the pages"

    def _book(self, owner: Owner, count: int) -> None:
        account = owner.kind, owner.tenant
        self._ledger[account] += count
        assert self._ledger[account] >= 0, f"{owner} gave more than it took"
        if not self._ledger[account]:
            del self._ledger[account]
