"""Whose turn it is: virtual token counters (VTC, Sheng et al., arXiv 2401.00588, algorithm 2).

Each key (a tenant) has a counter of the service that it got: tokens computed for it, weighted by
their price, divided by its weight. The smallest counter is served next. A key that comes back to
the queue, after a pause or while it had all it asked for, is lifted to the smallest counter of
those that wait there, so nobody saves up turns by asking for little; and nobody loses debts by
leaving, since counters never sink.
"""

from collections import Counter
from collections.abc import Collection, Mapping

INPUT_PRICE = 1.0
OUTPUT_PRICE = 2.0
"""An output token costs a pass of its own (the paper's prices, section 3.1)."""


class VirtualTokenCounters:
    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._active: Counter[str] = Counter()  # requests waiting or running
        self._last = ""
        self._floor = 0.0

    @property
    def served(self) -> Mapping[str, float]:
        """Price of the tokens computed ÷ weight, by key."""
        return self._served

    def enter(self, key: str) -> None:
        """A request of the key has arrived."""
        self._active[key] += 1
        self._served.setdefault(key, self._floor)

    def wait(self, key: str, waiting: Collection[str]) -> None:
        """An active key's request could be served from now on, as could those of the keys
        `waiting`."""
        if key in waiting:
            return
        if waiting:
            self._floor = min(self._served[other] for other in waiting)
        elif self._last in self._served:
            self._floor = max(self._floor, self._served[self._last])
        self._served[key] = max(self._served[key], self._floor)
        self._forget_the_even()

    def start(self, key: str) -> None:
        """A request of the key has left the queue to be served. If nobody waits after it, the
        next to come starts level with it."""
        self._last = key

    def leave(self, key: str) -> None:
        """A request of the key has ended."""
        assert self._active[key], f"{key!r} left more often than it entered"
        self._active[key] -= 1
        if not self._active[key]:
            del self._active[key]

    def charge(self, key: str, weight: float, input_tokens: int, output_tokens: int) -> None:
        price = INPUT_PRICE * input_tokens + OUTPUT_PRICE * output_tokens
        self._served[key] += price / weight

    def _forget_the_even(self) -> None:
        """Keys that are away and not above the floor would be lifted to it anyway."""
        for key, served in list(self._served.items()):
            if served <= self._floor and key not in self._active:
                del self._served[key]
