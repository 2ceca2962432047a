"""How long answers will get, and whether the pages will last for them.

Reserving `max_tokens` for everyone wastes most of the pool, reserving nothing makes sequences push
each other out. So a request counts with the length that answers of its tenant, adapter and kind of
prompt had so far: a quantile of them. A wrong guess costs a preemption, never an answer.
"""

import math
from bisect import bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterable
from typing import NamedTuple, Protocol

import numpy as np

from gateway.engine.scheduling.sequence import Sequence

COVERAGE = 0.9
"""Share of the answers that should not be longer than was expected."""
STEP = 0.02
"""How far the quantile moves when an answer was longer than expected."""
SAMPLES = 128
"""Latest answers that a history remembers."""
SAMPLES_MIN = 20
UNSEEN_TOKENS = 256
"""Expected of an answer while nothing is known: about a page of text."""
HISTORIES = 4096
"""Histories kept, the most recently used; each is a few kilobytes."""


class OutputLengths(Protocol):
    def expected(self, sequence: Sequence) -> int:
        """Length (prompt and output) at which the sequence will probably end, more than it has
        now and not more than its limit."""
        ...

    def finished(self, sequence: Sequence) -> None: ...


class History:
    """Output lengths of one kind of request, and the quantile that has covered them lately.

    The quantile adapts (adaptive conformal inference, Gibbs and Candès, arXiv 2106.00170, eq. 2):
    up when an answer was longer than expected, down a little when not, so that it covers its share
    even while the lengths drift.
    """

    def __init__(self) -> None:
        self._latest: deque[int] = deque()
        self._sorted: list[int] = []
        self.level = COVERAGE

    def __len__(self) -> int:
        return len(self._latest)

    def add(self, length: int) -> None:
        if len(self) >= SAMPLES_MIN:
            quantile = self.quantile(0)
            missed = quantile is not None and length > quantile
            self.level += STEP * (COVERAGE - 1 + missed)
            self.level = min(max(self.level, 0.0), 1.0)
        if len(self._latest) == SAMPLES:
            oldest = self._latest.popleft()
            del self._sorted[bisect_right(self._sorted, oldest) - 1]
        self._latest.append(length)
        insort(self._sorted, length)

    def quantile(self, generated: int) -> int | None:
        """The quantile of those answers that were longer than `generated`; None if none were."""
        shorter = bisect_right(self._sorted, generated)
        longer = len(self._sorted) - shorter
        if not longer:
            return None
        rank = math.ceil(self.level * longer)
        return self._sorted[shorter + min(max(rank, 1), longer) - 1]


class ObservedLengths:
    """By tenant, adapter and size of the prompt, then by tenant and adapter, then by tenant: the
    narrowest that has seen enough. Where none has, or an answer outlives all that were seen, it
    counts with as much again as it has, and UNSEEN_TOKENS at least: most requests may go on to the
    end of the context, and hardly any does."""

    def __init__(self) -> None:
        self._histories: OrderedDict[Hashable, History] = OrderedDict()

    def expected(self, sequence: Sequence) -> int:
        for kind in _kinds(sequence):
            history = self._histories.get(kind)
            if history is not None and len(history) >= SAMPLES_MIN:
                length = history.quantile(sequence.generated)
                if length is not None:
                    return min(len(sequence.request.prompt) + length, sequence.limit)
        length = max(UNSEEN_TOKENS, 2 * sequence.generated)
        return min(len(sequence.request.prompt) + length, sequence.limit)

    def finished(self, sequence: Sequence) -> None:
        for kind in _kinds(sequence):
            if kind not in self._histories:
                self._histories[kind] = History()
                if len(self._histories) > HISTORIES:
                    self._histories.popitem(last=False)
            self._histories[kind].add(sequence.generated)
            self._histories.move_to_end(kind)


def _kinds(sequence: Sequence) -> tuple[Hashable, ...]:
    tenant, adapter = sequence.key, sequence.digest
    size = len(sequence.request.prompt).bit_length()
    return (tenant, adapter, size), (tenant, adapter), (tenant,)


class Demand(NamedTuple):
    """What one sequence holds and will hold, in tokens of its own."""

    used: int
    remaining: int


def peak_pages(demands: Iterable[Demand], block_tokens: int) -> int:
    """Most pages that these sequences will hold together, if each goes on for its `remaining`
    tokens at one a step and then gives back all of its pages.

    The peak is at one of the moments when one ends (S-LoRA, arXiv 2311.03285, whose admission
    test this is, with pages for cells): by then those that last as long have grown as much.
    """
    longest_first = sorted(demands, key=lambda demand: -demand.remaining)
    used_N, remaining_N = np.array(longest_first, dtype=np.int64).reshape(-1, 2).T
    # [i, j]: what j holds when i ends; only those up to i are still there
    held_NN = -(-(used_N[None, :] + remaining_N[:, None]) // block_tokens)
    return int(np.tril(held_NN).sum(axis=1).max(initial=0))
