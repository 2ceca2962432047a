"""Cached prefixes: KV blocks that stay in the pool when their request is done with them.

A tree over whole blocks (RadixAttention, arXiv 2312.07104, with pages for edges); a block's key
stands for itself and all before it (`keys`), so the tree is one dictionary. A block that sequences
go on from has readers and stays; an idle one is reclaimed when it is worth least, leaves first.

    root ── A ── B ── C          B has two children; with one reader of D, only C is
                 └─── D          a leaf that may go
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

from gateway.engine.memory.keys import Root
from gateway.engine.memory.pages import Owner, PagePool
from gateway.engine.memory.reclaim import ReclaimOrder

SWEPT_AT_ONCE = 64
"""Worthless blocks freed per iteration; so many cost a small part of a millisecond."""


class Block:
    """`block_tokens` tokens of a prefix, computed and full."""

    __slots__ = ("children", "key", "owner", "page", "parent", "readers")

    def __init__(self, key: bytes, page: int, owner: Owner, parent: "Block | None") -> None:
        self.key = key
        self.page = page
        self.owner = owner
        self.parent = parent
        self.children = 0
        self.readers = 0


class RadixCache:
    """`cost_s` says how many seconds it takes now to compute a block."""

    def __init__(self, pool: PagePool, reclaim: ReclaimOrder, cost_s: Callable[[], float]) -> None:
        self._pool = pool
        self._reclaim = reclaim
        self._cost_s = cost_s
        self._blocks: dict[bytes, Block] = {}
        self._by_adapter: dict[str, dict[bytes, Block]] = {}  # parents before their children
        self._gone: deque[str] = deque()
        self.idle_pages = 0
        """Pages that no sequence reads."""
        self.locked_pages = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def match(self, keys: Sequence[bytes]) -> list[Block]:
        """The blocks of the longest cached prefix of these."""
        found: list[Block] = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def lock(self, blocks: Sequence[Block]) -> None:
        """A sequence reads these, the first blocks of a prefix, until it unlocks them."""
        for block in blocks:
            self._read(block)

    def unlock(self, blocks: Sequence[Block]) -> None:
        for block in reversed(blocks):
            self._pool.unshare(block.page)
            block.readers -= 1
            if not block.readers:
                self.idle_pages += 1
                self.locked_pages -= 1
                self._offer(block)

    def insert(
        self, path: list[Block], keys: Sequence[bytes], pages: list[int], owner: Owner, root: Root
    ) -> None:
        """Extend the locked prefix `path` of a sequence by its next full blocks `keys`, whose KV
        it has computed in `pages`. It owns those pages; they become the cache's, and `path` and
        `pages` name what the cache has from now on: where it had the block, the sequence's own
        page is given back."""
        kept = owner._replace(kind="prefix", key=root.adapter)
        for index, key in enumerate(keys):
            parent = path[-1] if path else None
            block = self._blocks.get(key)
            if block is None:
                self._pool.transfer(pages[index], owner, kept)
                block = self._add(Block(key, pages[index], kept, parent))
            else:
                self._pool.give([pages[index]], owner)
                pages[index] = block.page
            path.append(block)
            self._read(block)

    # --- blocks go ------------------------------------------------------------------------------

    def evict(self, key: bytes) -> None:
        """Free an idle leaf, which `ReclaimOrder` had named."""
        block = self._blocks.pop(key)
        assert not block.readers, "a prefix that is read was to be evicted"
        assert not block.children, "a prefix was to be evicted before its continuations"
        own = self._by_adapter[block.owner.key]
        del own[key]
        if not own:
            del self._by_adapter[block.owner.key]
        self._reclaim.drop(key)
        self._pool.give([block.page], block.owner)
        self.idle_pages -= 1
        if block.parent is not None:
            block.parent.children -= 1
            self._offer(block.parent)

    def forget(self, adapter: str) -> None:
        """An adapter version is gone, and its prefixes are worth nothing: `sweep` frees them."""
        if adapter in self._by_adapter and adapter not in self._gone:
            self._gone.append(adapter)

    def remember(self, adapter: str) -> None:
        """The version is served again; what is left of its prefixes is still right."""
        if adapter in self._gone:
            self._gone.remove(adapter)

    def sweep(self) -> None:
        """Free some of what is worthless. A bounded piece of work, for every iteration."""
        if not self._gone:
            return
        adapter = self._gone.popleft()
        newest = islice(reversed(self._by_adapter.get(adapter, {}).values()), SWEPT_AT_ONCE)
        for block in list(newest):
            if not block.readers and not block.children:
                self.evict(block.key)
        if adapter in self._by_adapter:
            self._gone.append(adapter)

    def check(self) -> None:
        """For tests."""
        children: dict[bytes, int] = {}
        for block in self._blocks.values():
            if block.parent is not None:
                assert self._blocks.get(block.parent.key) is block.parent, "a block lost its parent"
                assert block.parent.readers >= block.readers, "a reader skipped a parent"
                children[block.parent.key] = children.get(block.parent.key, 0) + 1
        for key, block in self._blocks.items():
            assert block.children == children.get(key, 0), "children are miscounted"
        idle = sum(not block.readers for block in self._blocks.values())
        assert (idle, len(self) - idle) == (self.idle_pages, self.locked_pages)

    def _read(self, block: Block) -> None:
        self._pool.share(block.page)
        block.readers += 1
        if block.readers == 1:
            self.idle_pages -= 1
            self.locked_pages += 1
        self._reclaim.use(block.key, 1, self._cost_s())

    def _add(self, block: Block) -> Block:
        self._blocks[block.key] = block
        self._by_adapter.setdefault(block.owner.key, {})[block.key] = block
        self.idle_pages += 1
        if block.parent is not None:
            block.parent.children += 1
        return block

    def _offer(self, block: Block) -> None:
        """What is an idle leaf now may go."""
        if not block.readers and not block.children:
            self._reclaim.idle(block.key)
