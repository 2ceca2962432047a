"""Which waiting requests can still get their first token in time (deadline-aware admission).

A forecast plays the queue forward: sequences leave their places as they are expected to end, those
that wait take them in fair order, and prompts share what the decodes leave of the budget. A
request that would come too late is refused at once, while its client can still go elsewhere,
instead of being queued to fail. When a tenant asks for more than can be had, as many of its
requests as possible are kept: the costliest goes (Moore, Management Science 15, 1968).
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

from gateway.engine.memory.costs import StepTime
from gateway.engine.scheduling.fairness import INPUT_PRICE, OUTPUT_PRICE
from gateway.engine.scheduling.sequence import Sequence

DROPS_MAX = 8
"""Requests refused for one that arrives; should there be more, the next arrival goes on."""


class Late(NamedTuple):
    sequence: Sequence
    wait_s: float
    """Seconds from now after which its first token was to be expected."""


class Forecast:
    """`places`: sequences that can run at a time. `budget`: tokens of an iteration. `expected`:
    the length at which a sequence will probably end."""

    def __init__(
        self, step: StepTime, places: int, budget: int, expected: Callable[[Sequence], int]
    ) -> None:
        self._step = step
        self._places = places
        self._budget = budget
        self.expected = expected

    def first_tokens(
        self, running: Iterable[Sequence], waiting: Iterable[Sequence]
    ) -> Iterator[tuple[Sequence, float]]:
        """Seconds from now to the first token of each waiting sequence, which are in the order in
        which they will be admitted."""
        decode_s = self._step.mean_s
        running = list(running)
        prefilled = sum(sequence.pending for sequence in running if sequence.pending > 1)
        prefill_free = self._prefill_s(prefilled, len(running))
        places = [self._decodes(sequence) * decode_s for sequence in running]
        places += [0.0] * (self._places - len(places))
        heapq.heapify(places)
        for sequence in waiting:
            start = max(heapq.heappop(places), prefill_free)
            first = start + self._prefill_s(sequence.pending, len(running))
            prefill_free = first
            heapq.heappush(places, first + self._decodes(sequence) * decode_s)
            yield sequence, first

    def service_s(self, sequence: Sequence) -> float:
        """What it costs, alone."""
        decodes = self._decodes(sequence) * self._step.mean_s / self._places
        return self._prefill_s(sequence.pending, 0) + decodes

    def _decodes(self, sequence: Sequence) -> int:
        return max(1, self.expected(sequence) - len(sequence.tokens))

    def _prefill_s(self, tokens: int, decodes: int) -> float:
        """Prompts get what the decodes leave of full iterations."""
        left = max(1, self._budget - min(decodes, self._places))
        return tokens / left * self._step.seconds(min(self._budget, tokens + decodes))


def fair_order(
    lines: Mapping[str, Seq[Sequence]],
    served: Mapping[str, float],
    expected: Callable[[Sequence], int],
) -> Iterator[Sequence]:
    """The order in which the virtual token counters will let these in, each key's own in turn."""
    heads = [(served[key], key, 0) for key, line in lines.items() if line]
    heapq.heapify(heads)
    while heads:
        counter, key, index = heapq.heappop(heads)
        sequence = lines[key][index]
        yield sequence
        outputs = expected(sequence) - len(sequence.tokens)
        price = INPUT_PRICE * sequence.pending + OUTPUT_PRICE * outputs
        if index + 1 < len(lines[key]):
            counter += price / sequence.request.fairness_weight
            heapq.heappush(heads, (counter, key, index + 1))


def too_late(
    newcomer: Sequence,
    lines: Mapping[str, Seq[Sequence]],
    running: Seq[Sequence],
    served: Mapping[str, float],
    forecast: Forecast,
    now: float,
) -> list[Late]:
    """Which of the newcomer's tenant's waiting requests (the newcomer is among them) to refuse, so
    that its others come in time. Other tenants' requests are never touched: it is their turn
    that fairness protects, and each answers for its own load. Nor are those that have no
    deadline, or ran before."""

    def until_late(own: Seq[Sequence]) -> list[Late]:
        """The tenant's own that have a deadline, in order, up to the first that is late."""
        found: list[Late] = []
        order = fair_order({**lines, newcomer.key: own}, served, forecast.expected)
        for sequence, wait_s in forecast.first_tokens(running, order):
            if sequence.key == newcomer.key and sequence.admitted < 0 and sequence.has_deadline:
                found.append(Late(sequence, wait_s))
            if (found and is_late(found[-1])) or sequence is newcomer:  # the last of its line
                break
        return found

    def is_late(item: Late) -> bool:
        return now + item.wait_s > item.sequence.deadline

    refused: list[Late] = []
    own = list(lines[newcomer.key])
    ahead = until_late(own)
    while ahead and is_late(ahead[-1]) and len(refused) < DROPS_MAX:
        late = ahead[-1]
        costliest = max(ahead, key=lambda item: forecast.service_s(item.sequence))
        rest = [sequence for sequence in own if sequence is not costliest.sequence]
        ahead = until_late(rest)
        if ahead and ahead[-1].sequence is late.sequence and is_late(ahead[-1]):
            # it would be late even so; then at least nobody else goes for it
            costliest = late
            rest = [sequence for sequence in own if sequence is not late.sequence]
            ahead = until_late(rest)
        refused.append(costliest)
        own = rest
    return refused
