"""Who may come in: the queue, its order, and whether there is room and time for a request.

A request waits for its adapter without holding up others. Then it is its tenant's counter that
decides when it is its turn, the lookahead whether the pages will last, and its deadline whether
waiting makes sense at all.
"""

import heapq
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from gateway.engine.memory.costs import Costs
from gateway.engine.memory.pager import AdapterPager
from gateway.engine.memory.pages import PagePool
from gateway.engine.memory.radix import Block, RadixCache
from gateway.engine.memory.supply import PageSupply
from gateway.engine.messages import Event, Failed, Submit
from gateway.engine.scheduling.deadlines import Forecast, too_late
from gateway.engine.scheduling.fairness import VirtualTokenCounters
from gateway.engine.scheduling.limits import Limits
from gateway.engine.scheduling.lookahead import Demand, OutputLengths, peak_pages
from gateway.engine.scheduling.queue import WaitingQueue
from gateway.engine.scheduling.sequence import Sequence


class Memory(NamedTuple):
    """The parts of the engine's memory, as scheduling sees them."""

    pool: PagePool
    pager: AdapterPager
    radix: RadixCache
    supply: PageSupply


class _Need(NamedTuple):
    """What a waiting sequence would take from the pool."""

    prefix: list[Block]
    """Cached blocks that it would read."""
    adapter_pages: int
    idle_kept: int
    """Pages of its prefix and its adapter that are idle now, and would be in use."""


class Admission:
    """`running` is the scheduler's, and only read here."""

    def __init__(
        self,
        limits: Limits,
        memory: Memory,
        running: Mapping[str, Sequence],
        lengths: OutputLengths,
        costs: Costs,
        clock: Callable[[], float],
    ) -> None:
        self._limits = limits
        self._memory = memory
        self._running = running
        self._lengths = lengths
        self._costs = costs
        self._clock = clock
        self._arrivals = 0
        self._tick = 0
        self._latest_starts: list[tuple[float, int, str]] = []  # a heap; (…, arrived, request id)
        self._places = limits.running_max
        self.counters = VirtualTokenCounters()
        self.waiting = WaitingQueue()

    # --- coming and going -----------------------------------------------------------------------

    def submit(self, request: Submit) -> list[Event]:
        """Queue a request, or say why it, or another one of its tenant, will not run."""
        refusal = self._refuse(request)
        if refusal is not None:
            return [refusal]
        self._arrivals += 1
        now = self._clock()
        deadline = now + (math.inf if request.first_token_s is None else request.first_token_s)
        sequence = Sequence(request, self._arrivals, self._tick, deadline)
        if sequence.digest is not None:  # it may have been unloaded once
            self._memory.pager.remember(sequence.digest)
            self._memory.radix.remember(sequence.digest)
        self.counters.enter(sequence.key)
        self._enter(sequence)
        if not sequence.has_deadline:
            return []
        latest_start = deadline - self._costs.step.seconds(sequence.pending)
        heapq.heappush(self._latest_starts, (latest_start, sequence.arrived, sequence.id))
        return self._refuse_the_late(sequence, now)

    def back(self, sequence: Sequence) -> None:
        """A running sequence was preempted, and waits again."""
        self._enter(sequence)

    def start(self, sequence: Sequence) -> None:
        """A waiting sequence begins to run."""
        self.waiting.take(sequence.id)
        self.counters.start(sequence.key)

    def leave(self, request_id: str) -> Sequence:
        """A waiting request goes for good."""
        sequence = self.waiting.take(request_id)
        self.counters.leave(sequence.key)
        if sequence.digest is not None:
            self._memory.pager.unwant(sequence.digest)
        return sequence

    @property
    def busy(self) -> bool:
        """Whether there is one who could be admitted, or something new about an adapter."""
        return bool(self.waiting.ready_keys) or self._memory.pager.settled

    def refresh(self) -> list[Event]:
        """Once per iteration: take over adapters that were read; those whose adapter can't be,
        and those whose time is up, leave."""
        self._tick += 1
        events: list[Event] = []
        pager = self._memory.pager
        for digest in pager.collect():
            failure = pager.failure(digest)
            for sequence in self.waiting.parked(digest):
                if failure is None:
                    self.waiting.take(sequence.id)
                    self._wait(sequence)
                else:
                    self.leave(sequence.id)
                    events.append(Failed(sequence.id, "adapter_failed", str(failure)))
        return events + self._expired()

    def _enter(self, sequence: Sequence) -> None:
        adapter = sequence.request.adapter
        if adapter is None:
            self._wait(sequence)
            return
        pager = self._memory.pager
        pager.want(adapter, sequence.key)
        # one whose adapter is known to be bad is told so when its turn comes
        if not pager.ready(adapter, sequence.key) and pager.failure(adapter.digest) is None:
            self.waiting.push(sequence, parked=True)
        else:
            self._wait(sequence)

    def _wait(self, sequence: Sequence) -> None:
        """For a turn, and nothing else."""
        self.counters.wait(sequence.key, self.waiting.ready_keys)
        self.waiting.push(sequence)

    def _refuse(self, request: Submit) -> Failed | None:
        limits, prompt = self._limits, request.prompt
        if len(self.waiting) >= limits.waiting_max:
            detail = f"{limits.waiting_max} requests are waiting already"
            return Failed(request.request_id, "overloaded", detail)
        longest = min(limits.context_tokens, self._memory.pool.total * limits.block_tokens) - 1
        if len(prompt) > longest:
            detail = f"the prompt has {len(prompt)} tokens; at most {longest} fit"
            return Failed(request.request_id, "prompt_too_long", detail)
        assert request.request_id not in self.waiting, "its id is in use"
        assert request.request_id not in self._running, "its id is in use"
        assert prompt, "a prompt without tokens"
        assert request.max_tokens > 0, "nothing to generate"
        assert 0 < request.fairness_weight < math.inf, "a weight that is not one"
        assert request.first_token_s is None or not math.isnan(request.first_token_s)
        assert 0 <= min(prompt) <= max(prompt) < limits.vocab_size, "a token outside the vocabulary"
        return None

    # --- whose turn it is -----------------------------------------------------------------------

    def candidate(self, events: list[Event]) -> Sequence | None:
        """The next waiting sequence in fair order whose adapter is at hand. One that can never
        run leaves the queue, with the reason in `events`."""
        while keys := self.waiting.ready_keys:
            key = min(keys, key=self.counters.served.__getitem__)
            sequence = self.waiting.head(key, self._adapters_in_use())
            adapter = sequence.request.adapter
            if adapter is not None and not self._memory.pager.ready(adapter, key):
                self._read_again(sequence, events)
            elif not self._running and self._missing_pages(sequence, self._need(sequence)) > 0:
                # said before it leaves: with it goes an adapter that was unloaded meanwhile
                events.append(self._never_fits(sequence))
                self.leave(sequence.id)
            else:
                return sequence
        return None

    def _adapters_in_use(self) -> dict[str, None]:
        digests = (sequence.digest for sequence in self._running.values())
        return dict.fromkeys(digest for digest in digests if digest is not None)

    def _read_again(self, sequence: Sequence, events: list[Event]) -> None:
        """Its adapter went from pool and host while it waited, or could not be read."""
        assert sequence.digest is not None
        failure = self._memory.pager.failure(sequence.digest)
        if failure is None:
            self.waiting.park(sequence)
        else:
            self.leave(sequence.id)
            events.append(Failed(sequence.id, "adapter_failed", str(failure)))

    def _never_fits(self, sequence: Sequence) -> Failed:
        """With nothing running all pages are idle or free, so what does not fit now never will."""
        pages = self._memory.supply.kv_roof()
        if sequence.digest is not None:
            adapter = self._memory.pager.pages_to_lease(sequence.digest)
            if adapter >= pages:
                detail = (
                    f"it needs {adapter} pages beside those for KV, the pool has {pages}; "
                    "raise engine.pool_mib"
                )
                return Failed(sequence.id, "adapter_failed", detail)
        detail = (
            f"{sequence.pending} tokens and their adapter need more than the pool's {pages} pages"
        )
        return Failed(sequence.id, "prompt_too_long", detail)

    # --- whether the pages will last ------------------------------------------------------------

    def fits(self, sequence: Sequence) -> bool:
        """Whether the pages will last, as far as can be foreseen, if this one comes in now."""
        need = self._need(sequence)
        fitting = self._missing_pages(sequence, need) <= 0 and (
            not self._running or self._lasts(sequence, need)
        )
        self._places = self._limits.running_max if fitting else max(1, len(self._running))
        return fitting

    def prefix(self, sequence: Sequence) -> list[Block]:
        """What the cache has of it. Its last token is computed in any case, for its logits."""
        full = (len(sequence.tokens) - 1) // self._limits.block_tokens
        return self._memory.radix.match(sequence.block_keys(full, self._limits.block_tokens))

    def expected(self, sequence: Sequence) -> int:
        """Length at which it will probably end; asked again only when it has got there."""
        if sequence.expected <= len(sequence.tokens):
            sequence.expected = max(self._lengths.expected(sequence), len(sequence.tokens) + 1)
        return sequence.expected

    def finished(self, sequence: Sequence) -> None:
        self._lengths.finished(sequence)

    def _need(self, sequence: Sequence) -> _Need:
        prefix, pager, digest = self.prefix(sequence), self._memory.pager, sequence.digest
        kept = sum(not block.readers for block in prefix)
        if digest is None:
            return _Need(prefix, 0, kept)
        return _Need(prefix, pager.pages_to_lease(digest), kept + pager.idle_pages_of(digest))

    def _missing_pages(self, sequence: Sequence, need: _Need) -> int:
        """How many pages its adapter and all of its tokens lack, idle ones counted as there."""
        kv_pages = self._limits.blocks(len(sequence.tokens) + 1) - len(need.prefix)
        return self._memory.supply.missing(need.adapter_pages, kv_pages, need.idle_kept)

    def _lasts(self, sequence: Sequence, need: _Need) -> bool:
        demands = [self._demand(other, len(other.prefix)) for other in self._running.values()]
        demands.append(self._demand(sequence, len(need.prefix)))
        roof = self._memory.supply.kv_roof(need.adapter_pages + need.idle_kept)
        return peak_pages(demands, self._limits.block_tokens) <= roof

    def _demand(self, sequence: Sequence, shared_blocks: int) -> Demand:
        length = len(sequence.tokens)
        used = length - shared_blocks * self._limits.block_tokens
        return Demand(used, self.expected(sequence) - length)

    # --- whether there is time ------------------------------------------------------------------

    def _refuse_the_late(self, newcomer: Sequence, now: float) -> list[Event]:
        if not self._costs.step.known:
            return []
        lines = {key: self.waiting.line(key) for key in self.waiting.ready_keys}
        if newcomer not in lines.get(newcomer.key, ()):
            # its adapter is on its way
            lines[newcomer.key] = [*lines.get(newcomer.key, ()), newcomer]
        late = too_late(
            newcomer,
            lines,
            list(self._running.values()),
            self.counters.served,
            Forecast(self._costs.step, self._places, self._limits.step_tokens, self.expected),
            now,
        )
        for item in late:
            self.leave(item.sequence.id)
        return [self._late(item.sequence, now + item.wait_s) for item in late]

    def _expired(self) -> list[Event]:
        """Those that wait and whose time is up, as the forecast was wrong."""
        now = self._clock()
        events: list[Event] = []
        while self._latest_starts and self._latest_starts[0][0] < now:
            _, arrived, request_id = heapq.heappop(self._latest_starts)
            sequence = self.waiting.get(request_id)
            if sequence and sequence.arrived == arrived and sequence.admitted < 0:
                self.leave(sequence.id)
                events.append(self._late(sequence, now + self._costs.step.mean_s))
        return events

    @staticmethod
    def _late(sequence: Sequence, first: float) -> Failed:
        within = sequence.request.first_token_s
        detail = f"its first token would not have come within {within:g} s"
        return Failed(
            sequence.id, "late", detail, retry_after_s=max(1.0, first - sequence.deadline)
        )
