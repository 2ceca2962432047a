"""The prefix cache against a brute-force model: a dictionary of token runs, searched one by one."""

from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from gateway.engine.memory.keys import Root, next_key
from gateway.engine.memory.pages import Owner, PagePool
from gateway.engine.memory.radix import SWEPT_AT_ONCE, Block, RadixCache
from gateway.engine.memory.reclaim import ReclaimOrder

BLOCK = 2
ROOTS = [Root(namespace, adapter) for namespace in ("t1", "t2") for adapter in ("", "v1", "v2")]

Prefix = tuple[Root, tuple[int, ...]]
"""Whole blocks of tokens under a root."""


def keys_of(root: Root, tokens: tuple[int, ...]) -> list[bytes]:
    """Of its full blocks."""
    keys = [root.key]
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        keys.append(next_key(keys[-1], tokens[start : start + BLOCK]))
    return keys[1:]


class Reader(NamedTuple):
    """A running sequence, as far as the cache has to do with it."""

    owner: Owner
    root: Root
    tokens: tuple[int, ...]
    path: list[Block]
    pages: list[int]
    """All of its pages; the first are those of `path`."""


class Cache:
    """A cache with its pool, and sequences that use it as the scheduler does."""

    def __init__(self, pages: int) -> None:
        self.pool = PagePool(pages)
        self.reclaim = ReclaimOrder()
        self.radix = RadixCache(self.pool, self.reclaim, lambda: 1.0)
        self._names = count()

    def start(self, root: Root, tokens: tuple[int, ...]) -> Reader:
        path = self.radix.match(keys_of(root, tokens))
        self.radix.lock(path)
        owner = Owner("kv", str(next(self._names)), root.namespace)
        own = self.pool.take(len(tokens) // BLOCK - len(path), owner)
        return Reader(owner, root, tokens, path, [block.page for block in path] + own)

    def publish(self, reader: Reader) -> None:
        known = len(reader.path)
        keys = keys_of(reader.root, reader.tokens)[known:]
        pages = reader.pages[known:]
        self.radix.insert(reader.path, keys, pages, reader.owner, reader.root)
        reader.pages[known:] = pages

    def stop(self, reader: Reader) -> None:
        own = reader.pages[len(reader.path) :]
        self.radix.unlock(reader.path)
        self.pool.give(own, reader.owner)

    def leave(self, root: Root, tokens: tuple[int, ...]) -> None:
        """A sequence came and went; its prefix stays."""
        reader = self.start(root, tokens)
        self.publish(reader)
        self.stop(reader)

    def hits(self, root: Root, tokens: tuple[int, ...]) -> int:
        return len(self.radix.match(keys_of(root, tokens)))

    def check(self) -> None:
        self.pool.check()
        self.radix.check()
        self.reclaim.check()


class Fuzz(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.readers: list[Reader] = []
        self.cached: dict[Prefix, int] = {}
        """Page of the last block of each prefix that should be in the cache."""
        self.gone: list[str] = []

    @initialize(pages=st.integers(4, 24))
    def make(self, pages: int) -> None:
        self.cache = Cache(pages)

    def longest(self, root: Root, tokens: tuple[int, ...]) -> int:
        blocks = 0
        while (blocks + 1) * BLOCK <= len(tokens):
            if (root, tokens[: (blocks + 1) * BLOCK]) not in self.cached:
                break
            blocks += 1
        return blocks

    def readers_of(self, prefix: Prefix) -> int:
        root, tokens = prefix
        return sum(
            reader.root == root
            and reader.tokens[: len(tokens)] == tokens
            and len(reader.path) * BLOCK >= len(tokens)
            for reader in self.readers
        )

    def continuations(self, prefix: Prefix) -> list[Prefix]:
        root, tokens = prefix
        return [
            other
            for other in self.cached
            if other[0] == root and other[1][:-BLOCK] == tokens and other != prefix
        ]

    @rule(root=st.sampled_from(ROOTS), blocks=st.integers(1, 5), bits=st.integers(0, 2**10 - 1))
    def start(self, root: Root, blocks: int, bits: int) -> None:
        tokens = tuple(bits >> place & 1 for place in range(blocks * BLOCK + bits % BLOCK))
        matched = self.cache.radix.match(keys_of(root, tokens))
        assert len(matched) == self.longest(root, tokens)
        pages = [self.cached[root, tokens[: (i + 1) * BLOCK]] for i in range(len(matched))]
        assert [block.page for block in matched] == pages
        if self.cache.pool.free >= len(tokens) // BLOCK - len(matched):
            self.readers.append(self.cache.start(root, tokens))

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from(self.readers))
        free = self.cache.pool.free
        shared = self.longest(reader.root, reader.tokens) - len(reader.path)
        self.cache.publish(reader)
        for index, page in enumerate(reader.pages):
            prefix = reader.root, reader.tokens[: (index + 1) * BLOCK]
            assert self.cached.setdefault(prefix, page) == page, "a prefix is cached twice"
        assert self.cache.pool.free == free + shared  # its own copies of what was there

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from(self.readers))
        self.readers.remove(reader)
        self.cache.stop(reader)

    @rule()
    def evict(self) -> None:
        key = self.cache.reclaim.cheapest()
        free = [prefix for prefix in self.cached if self.may_go(prefix)]
        assert (key is None) == (not free)
        if isinstance(key, bytes):
            (prefix,) = [prefix for prefix in free if keys_of(*prefix)[-1] == key]
            self.cache.radix.evict(key)
            del self.cached[prefix]

    def may_go(self, prefix: Prefix) -> bool:
        return not self.readers_of(prefix) and not self.continuations(prefix)

    @rule(adapter=st.sampled_from(["v1", "v2"]))
    def forget(self, adapter: str) -> None:
        self.cache.radix.forget(adapter)
        if adapter not in self.gone and any(root.adapter == adapter for root, _ in self.cached):
            self.gone.append(adapter)

    @rule(adapter=st.sampled_from(["v1", "v2"]))
    def remember(self, adapter: str) -> None:
        self.cache.radix.remember(adapter)
        self.gone = [other for other in self.gone if other != adapter]

    @rule()
    def sweep(self) -> None:
        """All of these few blocks fit one piece of its work."""
        self.cache.radix.sweep()
        if not self.gone:
            return
        adapter = self.gone.pop(0)
        own = [prefix for prefix in self.cached if prefix[0].adapter == adapter]
        for prefix in sorted(own, key=lambda prefix: -len(prefix[1])):
            if self.may_go(prefix):
                del self.cached[prefix]
        if any(root.adapter == adapter for root, _ in self.cached):
            self.gone.append(adapter)

    @invariant()
    def the_model_agrees(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        pool, radix = self.cache.pool, self.cache.radix
        assert len(radix) == len(self.cached)
        assert all(keys_of(*prefix)[-1] in radix for prefix in self.cached)
        own = sum(len(reader.pages) - len(reader.path) for reader in self.readers)
        assert pool.free == pool.total - len(self.cached) - own
        assert radix.locked_pages == sum(self.readers_of(prefix) > 0 for prefix in self.cached)
        for reader in self.readers:
            for index, block in enumerate(reader.path):
                prefix = reader.root, reader.tokens[: (index + 1) * BLOCK]
                assert self.cached[prefix] == block.page == reader.pages[index]
                assert block.readers == self.readers_of(prefix)


TestFuzz = Fuzz.TestCase
TestFuzz.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)


@pytest.fixture
def cache() -> Iterator[Cache]:
    made = Cache(400)
    yield made
    made.check()


PROMPT = tuple(range(10))


def test_s6_s7_no_namespace_hits_another_ones_prefix_and_each_hits_its_own(cache: Cache):
    """Namespace, adapter version, or both differ: 36 pairs, of which the six equal ones hit."""
    for owner in ROOTS:
        cache.leave(owner, PROMPT)
        for asking in ROOTS:
            assert cache.hits(asking, PROMPT) == (5 if asking == owner else 0)
        for key in reversed(keys_of(owner, PROMPT)):
            cache.radix.evict(key)


def test_no_text_of_a_namespace_can_name_another_root():
    """The fields are told apart however they are cut."""
    pairs = [("a", "bc"), ("ab", "c"), ("abc", ""), ("", "abc"), ("a\0b", "c"), ("a", "\0bc")]
    assert len({Root(*pair).key for pair in pairs}) == len(pairs)


def test_w2_w3_a_new_version_never_hits_the_old_ones_prefix(cache: Cache):
    cache.leave(Root("t", "v1"), PROMPT)
    assert cache.hits(Root("t", "v1"), PROMPT) == 5
    assert cache.hits(Root("t", "v2"), PROMPT) == 0


def test_a_block_hits_only_after_all_the_blocks_before_it(cache: Cache):
    cache.leave(ROOTS[0], PROMPT)
    assert cache.hits(ROOTS[0], (9, *PROMPT[1:])) == 0
    assert cache.hits(ROOTS[0], (*PROMPT[:6], 99, *PROMPT[7:])) == 3


def test_the_prefixes_of_a_gone_version_are_freed_in_bounded_steps(cache: Cache):
    gone, kept = Root("t", "v1"), Root("t", "v2")
    for first in range(30):
        cache.leave(gone, (first, *PROMPT[1:]))
        cache.leave(kept, (first, *PROMPT[1:]))
    cache.radix.forget("v1")
    sweeps = 0
    while cache.hits(gone, (0, *PROMPT[1:])) or len(cache.radix) > 150:
        before = len(cache.radix)
        cache.radix.sweep()
        assert 0 < before - len(cache.radix) <= SWEPT_AT_ONCE
        sweeps += 1
    assert sweeps == -(-150 // SWEPT_AT_ONCE)
    assert all(cache.hits(kept, (first, *PROMPT[1:])) == 5 for first in range(30))


def test_what_a_gone_versions_last_request_reads_goes_when_it_ends(cache: Cache):
    root = Root("t", "v1")
    cache.leave(root, PROMPT)
    reader = cache.start(root, PROMPT)
    cache.radix.forget("v1")
    cache.radix.sweep()
    assert len(cache.radix) == 5
    cache.stop(reader)
    cache.radix.sweep()
    assert len(cache.radix) == 0
    assert cache.pool.free == cache.pool.total


def test_a_version_that_comes_back_keeps_what_was_not_freed_yet(cache: Cache):
    root = Root("t", "v1")
    cache.leave(root, PROMPT)
    cache.radix.forget("v1")
    cache.radix.remember("v1")
    cache.radix.sweep()
    assert cache.hits(root, PROMPT) == 5


def test_several_gone_versions_take_turns(cache: Cache):
    for version in ("v1", "v2"):
        for first in range(30):
            cache.leave(Root("t", version), (first, *PROMPT[1:]))
        cache.radix.forget(version)
    cache.radix.sweep()
    cache.radix.sweep()
    left = [
        sum(cache.hits(Root("t", v), (i, *PROMPT[1:])) for i in range(30)) for v in ("v1", "v2")
    ]
    assert all(count < 150 for count in left)
