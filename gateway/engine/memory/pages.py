"""The page pool's bookkeeping: who owns which page. Integers only; the bytes lie in `buffer`.

    pages   0    1    2    3    4    5    6    7
           kv   kv   --  adpt adpt  kv   --   --      any free page serves any owner

Invariant, checked by `check`: free + owned = total, and no page has two owners.
"""

from collections import Counter
from typing import Literal, NamedTuple

Kind = Literal["kv", "adapter"]


class Owner(NamedTuple):
    kind: Kind
    key: str
    """Request id for KV, version digest for an adapter."""


class PagePool:
    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._owner: list[Owner | None] = [None] * total
        self._owned: Counter[Owner] = Counter()

    @property
    def free(self) -> int:
        return len(self._free)

    def owned(self, kind: Kind) -> int:
        return sum(count for owner, count in self._owned.items() if owner.kind == kind)

    def take(self, count: int, owner: Owner) -> list[int]:
        """`count` free pages, the most recently freed first. The caller has asked `free`."""
        assert 0 <= count <= len(self._free), f"{count} pages asked, {len(self._free)} free"
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            assert self._owner[page] is None, f"free page {page} has an owner"
            self._owner[page] = owner
        if taken:
            self._owned[owner] += count
        return taken

    def give(self, pages: list[int], owner: Owner) -> None:
        for page in pages:
            assert self._owner[page] == owner, f"page {page} is not {owner}'s"
            self._owner[page] = None
        self._free.extend(reversed(pages))
        self._owned[owner] -= len(pages)
        assert self._owned[owner] >= 0, f"{owner} gave more than it took"
        if not self._owned[owner]:
            del self._owned[owner]

    def check(self) -> None:
        """Walk the whole pool. For tests; nothing on the step loop needs it."""
        assert len(self._free) + self._owned.total() == self.total, "pages are not conserved"
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        assert all(self._owner[page] is None for page in self._free), "a free page is owned"
        owned = Counter(owner for owner in self._owner if owner is not None)
        assert owned == self._owned, "the ledger does not match the pages"
