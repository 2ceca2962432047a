"""Which idle thing leaves the pool first: one order over adapters and cached prefixes.

Whoever owns a thing in the pool says when it is used and when nobody uses it any more. When pages
are needed, that one goes whose pages are worth least:

    worth of a page = seconds to bring it back × expected uses ÷ pages

Expected uses are counts that fade (LRFU: Lee et al., IEEE Transactions on Computers 50, 2001), so
what was popular once gives way: a use weighs 2^-h after h half-lives. The first use of a thing
never seen before tells less than its return, and weighs only as much as is likely that it returns
at all: the share of recent newcomers that did. A scan, or answers that nobody continues, thus push
out little; where most prompts are continued, newcomers count almost in full.

As all counts fade alike, the order of two things changes only when one of them is used. With times
t0, t1, … of the uses in half-lives, and w of the first, the logarithm of

    (seconds ÷ pages) × (w × 2^t0 + 2^t1 + 2^t2 + …)

is compared, which is a constant between uses and so can be the key of a heap. The constants were
chosen by `python -m benchmarks reclaim`.
"""

import heapq
import math
from collections import OrderedDict
from collections.abc import Container, Hashable

HALF_LIFE = 0.5
"""A count has faded by half when each known thing could have been used as many times."""
REMEMBERED = 4096
"""So many things that left the pool keep their counts."""
NEWCOMERS = 4096
"""From about so many of the last newcomers it is learned how likely one returns."""


class Known:
    """A thing in the pool, or one that left it."""

    __slots__ = ("cost_s", "entry", "idle", "pages", "returned", "uses", "worthless")

    def __init__(self) -> None:
        self.pages = 0
        self.cost_s = 0.0
        self.uses = -math.inf
        """log2 of the weighted sum of 2^time over its uses."""
        self.returned = False
        """It was used more than once."""
        self.idle = False
        self.worthless = False
        self.entry = 0
        """Number of its entry in the heap, 0 if it has none. Other entries are out of date."""

    @property
    def worth(self) -> float:
        if self.worthless:
            return -math.inf
        return self.uses + math.log2(self.cost_s / self.pages)


class ReclaimOrder:
    """No call takes more than O(log n) amortised, n things in the pool; `cheapest` O(log n) for
    each spared one that is cheaper."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._now = 0.0  # in half-lives
        self._held: dict[Hashable, Known] = {}
        self._pinned: set[Hashable] = set()
        self._left: OrderedDict[Hashable, Known] = OrderedDict()
        """Those that left, the one that left first first."""
        self._newcomers = 1.0
        self._returners = 1.0
        self._heap: list[tuple[float, int, Hashable]] = []
        """(worth, number of the entry, key). Entries out of date stay until they come up."""
        self._entries = 0
        self._candidates = 0

    # --- what its owner says about a thing --------------------------------------------------------

    def use(self, key: Hashable, pages: int, cost_s: float) -> None:
        """Someone begins to use it, whether it came into the pool for that or was there: counts
        as one use. Not reclaimable until `idle`.

        `cost_s`: seconds that bringing all of its pages back would take.
        """
        assert pages > 0, f"{key} has no pages"
        assert cost_s > 0, f"{key} costs nothing"
        self._now += 1 / (HALF_LIFE * (len(self._held) + len(self._left) + 1))
        held = self._held.get(key) or self._left.pop(key, None)
        if held is None:
            held = Known()
            held.uses = self._now + math.log2(self._returns())
        else:
            self._retract(key, held)
            self._returners += not held.returned
            held.returned = True
            held.uses = _log2_sum(held.uses, self._now)
        self._held[key] = held
        held.pages, held.cost_s = pages, cost_s
        held.idle = held.worthless = False

    def idle(self, key: Hashable) -> None:
        """Nobody uses it now."""
        held = self._held[key]
        self._retract(key, held)
        held.idle = True
        self._offer(key, held)

    def worthless(self, key: Hashable) -> None:
        """Nobody will ask for it again (its adapter version is gone): once idle, the first to
        go. A use takes this back."""
        held = self._held[key]
        self._retract(key, held)
        held.worthless = True
        self._offer(key, held)

    def drop(self, key: Hashable) -> None:
        """It left the pool. Its count is kept for a while, for its return."""
        held = self._held[key]
        self._retract(key, held)
        del self._held[key]
        if not held.worthless:
            self._left[key] = held
            if len(self._left) > self._remembered:
                self._left.popitem(last=False)

    def pin(self, key: Hashable) -> None:
        """Never the cheapest until `unpin`, in the pool or coming back to it."""
        if key in self._held:
            self._retract(key, self._held[key])
        self._pinned.add(key)

    def unpin(self, key: Hashable) -> None:
        self._pinned.remove(key)
        if key in self._held:
            self._offer(key, self._held[key])

    # --- what goes first --------------------------------------------------------------------------

    def cheapest(self, spare: Container[Hashable] = ()) -> Hashable | None:
        """The idle one whose pages are worth least, of equals the one idle for longest; neither
        a pinned nor a spared one. None if there is none. It stays until its owner says `drop`."""
        spared = []
        found: Hashable | None = None
        while self._heap:
            entry = self._heap[0]
            key = entry[2]
            if not self._current(entry):
                heapq.heappop(self._heap)
            elif key in spare:
                spared.append(heapq.heappop(self._heap))
            else:
                found = key
                break
        for entry in spared:
            heapq.heappush(self._heap, entry)
        return found

    def check(self) -> None:
        """Walk everything. For tests; nothing on the step loop needs it."""
        assert len(self._left) <= self._remembered, "more is remembered than allowed"
        assert not self._left.keys() & self._held.keys(), "a thing is both in the pool and gone"
        candidates = {key for key, held in self._held.items() if self._reclaimable(key, held)}
        offered = [entry[2] for entry in self._heap if self._current(entry)]
        assert len(offered) == len(set(offered)), "a thing has two entries"
        assert set(offered) == candidates, "the heap does not match what is idle"
        assert len(candidates) == self._candidates, "the candidates are not counted"
        assert len(self._heap) <= 2 * self._candidates + 1, "too many entries out of date"

    def _returns(self) -> float:
        """How likely one more newcomer is used again."""
        share = min(1.0, self._returners / self._newcomers)
        self._newcomers += 1
        if self._newcomers > NEWCOMERS:  # older ones tell less
            self._newcomers /= 2
            self._returners /= 2
        return share

    # --- the heap ---------------------------------------------------------------------------------

    def _reclaimable(self, key: Hashable, held: Known) -> bool:
        return held.idle and key not in self._pinned

    def _current(self, entry: tuple[float, int, Hashable]) -> bool:
        held = self._held.get(entry[2])
        return held is not None and held.entry == entry[1]

    def _offer(self, key: Hashable, held: Known) -> None:
        """Enter it, if it may go."""
        if not self._reclaimable(key, held):
            return
        self._entries += 1
        held.entry = self._entries
        self._candidates += 1
        heapq.heappush(self._heap, (held.worth, held.entry, key))

    def _retract(self, key: Hashable, held: Known) -> None:
        """Its entry, if it has one, is out of date."""
        if not held.entry:
            return
        held.entry = 0
        self._candidates -= 1
        if len(self._heap) > 2 * self._candidates + 1:
            self._heap = [entry for entry in self._heap if self._current(entry)]
            heapq.heapify(self._heap)


def _log2_sum(a: float, b: float) -> float:
    """log2(2^a + 2^b), for exponents beyond a float's."""
    low, high = min(a, b), max(a, b)
    return high + math.log2(1 + 2.0 ** (low - high))
