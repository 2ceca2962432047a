"""A page pool with nothing in it but names: which request finds what, and what that costs.

Requests start in order of arrival, `RUNNING` at once at most, and hold their adapter and blocks
until they end. What they hold does not depend on the policy, nor when they start and end: all idle
pages can be had. Policies differ only in what is still there when it is asked for again.
"""

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from benchmarks.reclaim_trace import Request
from gateway.engine.memory.reclaim import ReclaimOrder

RUNNING = 8


class Costs(NamedTuple):
    """Of a two-core machine that serves SmolLM2-135M in 16 bits."""

    page_bytes: int = 16 * 23_040
    bytes_per_rank: int = 2 * 305_280
    copy_bytes_per_s: float = 5e9
    """Host memory → pool."""
    read_bytes_per_s: float = 0.3e9
    """Store → host memory, parsing included."""
    prefill_tokens_per_s: float = 300.0
    block_tokens: int = 16
    host_share: float = 0.25
    """Share of all adapters' bytes that the host tier holds."""

    def pages(self, rank: int) -> int:
        return -(-rank * self.bytes_per_rank // self.page_bytes)

    @property
    def block_s(self) -> float:
        return self.block_tokens / self.prefill_tokens_per_s


class Policy(Protocol):
    """What of ReclaimOrder the pool uses."""

    def use(self, key: Hashable, pages: int, cost_s: float) -> None: ...
    def idle(self, key: Hashable) -> None: ...
    def drop(self, key: Hashable) -> None: ...
    def cheapest(self) -> Hashable | None: ...


class Ranked:
    """Least rank first. The rank of a thing changes only when it is used."""

    def __init__(self) -> None:
        self._rank: dict[Hashable, tuple[float, ...]] = {}
        self._idle: set[Hashable] = set()
        self._heap: list[tuple[tuple[float, ...], Hashable]] = []
        self.uses: Counter[Hashable] = Counter()
        self.now = 0

    def rank(self, key: Hashable, density: float) -> tuple[float, ...]:
        raise NotImplementedError

    def use(self, key: Hashable, pages: int, cost_s: float) -> None:
        self.now += 1
        self.uses[key] += 1
        self._idle.discard(key)
        self._rank[key] = self.rank(key, cost_s / pages)

    def idle(self, key: Hashable) -> None:
        if key not in self._idle:
            self._idle.add(key)
            heapq.heappush(self._heap, (self._rank[key], key))

    def drop(self, key: Hashable) -> None:
        self._idle.discard(key)

    def cheapest(self) -> Hashable | None:
        while self._heap:
            rank, key = self._heap[0]
            if key in self._idle and rank == self._rank[key]:
                return key
            heapq.heappop(self._heap)
        return None


class LeastRecent(Ranked):
    def rank(self, key: Hashable, density: float) -> tuple[float, ...]:
        return (self.now,)


class LeastFrequent(Ranked):
    """Counts of the whole trace, those of what was dropped included."""

    def rank(self, key: Hashable, density: float) -> tuple[float, ...]:
        return (self.uses[key], self.now)


class Clairvoyant:
    """Knows all that is to come: the one goes whose seconds per page are saved the farthest
    ahead (Belady, weighted by cost). Not a proven optimum, but no policy without a crystal ball
    comes near it."""

    def __init__(self, requests: list[Request]) -> None:
        self._uses: dict[Hashable, deque[int]] = {}
        for number, request in enumerate(requests):
            for key in keys(request):
                self._uses.setdefault(key, deque()).append(number)
        self._number = 0
        self._density: dict[Hashable, float] = {}
        self._idle: set[Hashable] = set()
        self._heaps: dict[float, list[tuple[float, Hashable]]] = {}
        """Per seconds a page costs: (−number of the request that uses it next, key)."""

    def use(self, key: Hashable, pages: int, cost_s: float) -> None:
        self._number = max(self._number, self._uses[key].popleft())
        self._density[key] = float(f"{cost_s / pages:.1e}")
        self._idle.discard(key)

    def _next(self, key: Hashable) -> float:
        coming = self._uses[key]
        return coming[0] if coming else float("inf")

    def idle(self, key: Hashable) -> None:
        if key not in self._idle:
            self._idle.add(key)
            heap = self._heaps.setdefault(self._density[key], [])
            heapq.heappush(heap, (-self._next(key), key))

    def drop(self, key: Hashable) -> None:
        self._idle.discard(key)

    def cheapest(self) -> Hashable | None:
        best: tuple[float, Hashable] | None = None
        for density, heap in self._heaps.items():
            while heap and not self._current(density, heap[0]):
                heapq.heappop(heap)
            if heap:
                worth = density / (-heap[0][0] - self._number)
                if best is None or worth < best[0]:
                    best = worth, heap[0][1]
        return best[1] if best else None

    def _current(self, density: float, entry: tuple[float, Hashable]) -> bool:
        after, key = entry
        return key in self._idle and self._density[key] == density and self._next(key) == -after


@dataclass
class Result:
    adapter_s: float = 0.0
    """Seconds spent bringing adapters back; the first time of each is not counted."""
    prefix_s: float = 0.0
    """Seconds spent computing blocks again that had been computed before."""
    hits: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)

    @property
    def seconds(self) -> float:
        return self.adapter_s + self.prefix_s

    def hit_rate(self, kind: str) -> float:
        return self.hits[kind] / max(1, self.hits[kind] + self.misses[kind])


def keys(request: Request) -> list[str]:
    """All that it holds: block by block from the first, and its adapter."""
    return [*request.blocks, *([request.adapter] if request.adapter else [])]


def working_set(requests: list[Request], costs: Costs) -> int:
    """Pages of all that is asked for more than once."""
    asked = Counter(key for request in requests for key in keys(request))
    pages = {request.adapter: costs.pages(request.rank) for request in requests if request.adapter}
    return sum(pages.get(key, 1) for key, times in asked.items() if times > 1)


def held_pages(request: Request, costs: Costs) -> int:
    return len(request.blocks) + (costs.pages(request.rank) if request.adapter else 0)


class Item:
    __slots__ = ("children", "pages", "parent", "users")

    def __init__(self, pages: int, parent: str | None) -> None:
        self.pages = pages
        self.parent = parent
        self.users = 0
        self.children = 0


class Pool:
    def __init__(
        self, requests: list[Request], total: int, policy: Policy, costs: Costs, drop_all: bool
    ) -> None:
        self._policy = policy
        self._costs = costs
        self._drop_all = drop_all
        self._total = total
        self._free = total
        self._items: dict[str, Item] = {}
        self._waiting = deque(requests)
        self._running: list[tuple[float, int, Request]] = []
        self._host: OrderedDict[str, int] = OrderedDict()
        ranks = {request.adapter: request.rank for request in requests if request.adapter}
        self._host_ranks = costs.host_share * sum(ranks.values())
        self._seen: set[str] = set()
        self.result = Result()

    def run(self) -> Result:
        now, number = 0.0, 0
        while self._waiting:
            request = self._waiting[0]
            now = max(now, request.at)
            while self._running and self._running[0][0] <= now:
                self._end(now)
            if len(self._running) == RUNNING or not self._fits(request):
                assert self._running, "a request larger than the pool"
                now = self._running[0][0]
                continue
            self._waiting.popleft()
            self._start(request)
            number += 1
            heapq.heappush(self._running, (now + request.runs_s, number, request))
        return self.result

    # --- a request --------------------------------------------------------------------------------

    def _fits(self, request: Request) -> bool:
        """What runs must leave room for what it does not share with them."""
        held = {key for _, _, other in self._running for key in keys(other)}
        used = sum(self._items[key].pages for key in held)
        missing = sum(self._pages(request, key) for key in keys(request) if key not in held)
        return used + missing <= self._total

    def _pages(self, request: Request, key: str) -> int:
        return self._costs.pages(request.rank) if key == request.adapter else 1

    def _start(self, request: Request) -> None:
        """It takes hold of what is there before anything goes to make room for the rest."""
        costs: dict[str, float] = dict.fromkeys(request.blocks, self._costs.block_s)
        for key in request.blocks[: request.prompt]:
            self._count("prefix", key, self._costs.block_s)
        if request.adapter:
            costs[request.adapter] = self._load_s(request)
            self._count("adapter", request.adapter, costs[request.adapter])
        parents: dict[str, str] = dict(zip(request.blocks[1:], request.blocks, strict=False))
        for key in sorted(costs, key=lambda key: key not in self._items):
            self._hold(key, self._pages(request, key), costs[key], parents.get(key))
        self._seen.update(costs)

    def _count(self, kind: str, key: str, cost_s: float) -> None:
        if key in self._items:
            self.result.hits[kind] += 1
        elif key in self._seen:
            self.result.misses[kind] += 1
            if kind == "adapter":
                self.result.adapter_s += cost_s
            else:
                self.result.prefix_s += cost_s

    def _load_s(self, request: Request) -> float:
        """Seconds that its adapter takes into the pool; leaves it in the host tier."""
        assert request.adapter
        size = request.rank * self._costs.bytes_per_rank
        copy_s = size / self._costs.copy_bytes_per_s
        if request.adapter in self._host:
            if request.adapter not in self._items:
                self._host.move_to_end(request.adapter)
            return copy_s
        if request.adapter not in self._items:
            self._host[request.adapter] = request.rank
            while sum(self._host.values()) > self._host_ranks and len(self._host) > 1:
                self._host.popitem(last=False)
        return copy_s + size / self._costs.read_bytes_per_s

    def _hold(self, key: str, pages: int, cost_s: float, parent: str | None) -> None:
        item = self._items.get(key)
        if item is None:
            while self._free < pages:
                self._reclaim()
            self._free -= pages
            item = self._items[key] = Item(pages, parent)
            if parent:
                self._items[parent].children += 1
        item.users += 1
        self._policy.use(key, pages, cost_s)

    def _end(self, now: float) -> None:
        _, _, request = heapq.heappop(self._running)
        for key in reversed(keys(request)):
            self._items[key].users -= 1
            self._idle(key)
        if self._drop_all:
            self._drop_unwanted(now)

    # --- what nobody uses -------------------------------------------------------------------------

    def _idle(self, key: str) -> None:
        item = self._items[key]
        if not item.users and not item.children:
            self._policy.idle(key)

    def _reclaim(self) -> None:
        key = self._policy.cheapest()
        assert isinstance(key, str), "nothing is idle"
        self._drop(key)

    def _drop(self, key: str) -> None:
        item = self._items.pop(key)
        assert not item.users, f"{key} is in use"
        assert not item.children, f"{key} has children"
        self._policy.drop(key)
        self._free += item.pages
        if item.parent:
            self._items[item.parent].children -= 1
            self._idle(item.parent)

    def _drop_unwanted(self, now: float) -> None:
        """All that no running or waiting request needs goes (S-LoRA, section 4.1)."""
        wanted: set[str] = set()
        for request in self._waiting:
            if request.at > now:
                break
            wanted.update(keys(request))
        for key in reversed(list(self._items)):
            item = self._items[key]
            if not item.users and not item.children and key not in wanted:
                self._drop(key)


POLICIES: dict[str, Callable[[list[Request]], Policy]] = {
    "ours": lambda _: ReclaimOrder(),
    "LRU": lambda _: LeastRecent(),
    "LFU": lambda _: LeastFrequent(),
    "drop all": lambda _: LeastRecent(),
    "clairvoyant": Clairvoyant,
}


def simulate(requests: list[Request], total: int, name: str, costs: Costs) -> Result:
    policy = POLICIES[name](requests)
    return Pool(requests, total, policy, costs, drop_all=name == "drop all").run()
