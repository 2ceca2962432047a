"""Iteration-level scheduling (Orca, OSDI 2022): who computes what in the next iteration.

Each iteration has one token budget. Running decodes get their token first; prompts, in chunks,
share the rest (Sarathi-Serve, arXiv 2403.02310, section 4) in the order of their tenants'
virtual token counters. When pages run out, idle adapters go first; then a sequence is preempted:
its pages are given back, and it computes again later, with the same result.
"""

from collections.abc import Iterable
from typing import NamedTuple

from gateway.engine.memory.pager import AdapterError, AdapterPager
from gateway.engine.memory.pages import PagePool
from gateway.engine.messages import Event, Failed, Finished, Submit, Tokens
from gateway.engine.scheduling.fairness import VirtualTokenCounters
from gateway.engine.scheduling.plan import Plan, Slice
from gateway.engine.scheduling.queue import WaitingQueue
from gateway.engine.scheduling.sequence import Sequence

AGE_TOKENS = 16
"""A prefill that is running gains as many tokens an iteration on shorter ones that come later."""


class Limits(NamedTuple):
    context_tokens: int
    vocab_size: int
    block_tokens: int
    step_tokens: int
    running_max: int
    waiting_max: int


class Scheduler:
    def __init__(self, limits: Limits, pool: PagePool, pager: AdapterPager) -> None:
        self._limits = limits
        self._pool = pool
        self._pager = pager
        self._arrivals = 0
        self._iteration = 0
        self.counters = VirtualTokenCounters()
        self.waiting = WaitingQueue()
        self.running: dict[str, Sequence] = {}
        self.preemptions = 0

    # --- requests come and go between iterations ------------------------------------------------

    def submit(self, request: Submit) -> Failed | None:
        """Queue a request, or say why it can never run."""
        refusal = self._refuse(request)
        if refusal is not None:
            return refusal
        self._arrivals += 1
        self.waiting.push(Sequence(request, self._arrivals))
        self.counters.enter(request.fairness_key)
        if request.adapter is not None:
            self._pager.want(request.adapter)
        return None

    def cancel(self, request_id: str) -> None:
        """Give back at once all that the request holds."""
        if request_id in self.waiting:
            self._drop(request_id)
        elif request_id in self.running:
            self._end(self.running[request_id])

    @property
    def busy(self) -> bool:
        """False while every request there is waits for its adapter to be read."""
        return bool(self.running) or any(
            sequence.request.adapter is None or self._pager.settled(sequence.request.adapter.digest)
            for sequence in self.waiting
        )

    # --- one iteration --------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Decide the next iteration. Takes the pages it will write to."""
        self._pager.collect()
        self._iteration += 1
        step = _Step(self._limits.step_tokens)
        preemptions = self.preemptions
        for sequence in [item for item in self.running.values() if item.pending == 1]:
            self._schedule(sequence, step)
        self._prefill(step, admitting=self.preemptions == preemptions)
        slices = [
            Slice(self.running[request_id], length)
            for request_id, length in step.lengths.items()
            if request_id in self.running  # a later one may have preempted it
        ]
        slices.sort(key=lambda item: item.sequence.digest or "")
        return Plan(slices, step.events)

    def _prefill(self, step: "_Step", admitting: bool) -> None:
        """Spend what the decodes left: prompts in chunks, those begun and those that wait alike
        in fair order, until the budget is used up exactly (SplitFuse, arXiv 2401.08671).

        Not `admitting` after a preemption: those sent back would push out others in turn.
        """
        begun = [item for item in self.running.values() if item.pending > 1]
        while step.budget:
            following = min(begun, key=self._turn, default=None)
            newcomer = self._newcomer(step) if admitting else None
            if newcomer and (following is None or self._turn(newcomer) < self._turn(following)):
                if self._missing_pages(newcomer) > 0:
                    admitting = False
                    continue
                self._start(newcomer)
                self._schedule(newcomer, step)
            elif following:
                begun.remove(following)
                self._schedule(following, step)
            else:
                return

    def _turn(self, sequence: Sequence) -> tuple[float, float]:
        """Least served tenant first; within one, the shortest rest of a prompt, but one that
        has been running for long before one that came later."""
        started = sequence.admitted if sequence.id in self.running else self._iteration
        age = self._iteration - started
        return self.counters.served[sequence.key], sequence.pending - AGE_TOKENS * age

    def _schedule(self, sequence: Sequence, step: "_Step") -> None:
        """Give a running sequence as many of its pending tokens as the budget has."""
        length = min(sequence.pending, step.budget)
        if sequence.id not in self.running or not length or not self._grow(sequence, length):
            return
        step.lengths[sequence.id] = length
        step.budget -= length
        self._charge(sequence, length)

    def _charge(self, sequence: Sequence, length: int) -> None:
        reached = sequence.computed + length
        prompt = len(sequence.request.prompt)
        inputs = max(0, min(reached, prompt) - sequence.charged)
        outputs = max(0, reached - max(prompt, sequence.charged))
        sequence.charged = max(sequence.charged, reached)
        self.counters.charge(sequence.key, sequence.request.fairness_weight, inputs, outputs)

    def commit(self, plan: Plan, sampled: Iterable[int | None]) -> list[Event]:
        """Record what the iteration computed. `sampled` has one entry per slice that samples;
        None where its logits were not finite."""
        events: list[Event] = []
        tokens = iter(sampled)
        for item in plan.slices:
            samples = item.samples
            item.sequence.computed += item.length
            if samples:
                events.extend(self._advance(item.sequence, next(tokens)))
        return events

    def _advance(self, sequence: Sequence, token: int | None) -> list[Event]:
        request = sequence.request
        if token is None:
            self._end(sequence)
            cause = "adapter" if request.adapter else "model"
            detail = f"the {cause} computed NaN or Inf for this prompt"
            return [Failed(request.request_id, "not_finite", detail)]
        sequence.tokens.append(token)
        stopped = token in request.stop_token_ids
        events: list[Event] = [] if stopped else [Tokens(request.request_id, [token])]
        if stopped or len(sequence.tokens) >= sequence.limit:
            self._end(sequence)
            events.append(
                Finished(
                    request.request_id,
                    "stop" if stopped else "length",
                    len(request.prompt),
                    sequence.generated,
                )
            )
        return events

    # --- admission ------------------------------------------------------------------------------

    def _refuse(self, request: Submit) -> Failed | None:
        limits, prompt = self._limits, request.prompt
        if len(self.waiting) >= limits.waiting_max:
            detail = f"{limits.waiting_max} requests are waiting already"
            return Failed(request.request_id, "overloaded", detail)
        longest = min(limits.context_tokens, self._pool.total * limits.block_tokens) - 1
        if len(prompt) > longest:
            detail = f"the prompt has {len(prompt)} tokens; at most {longest} fit"
            return Failed(request.request_id, "prompt_too_long", detail)
        assert prompt, "a prompt without tokens"
        assert request.max_tokens > 0, "nothing to generate"
        assert 0 <= min(prompt) <= max(prompt) < limits.vocab_size, "a token outside the vocabulary"
        return None

    def _newcomer(self, step: "_Step") -> Sequence | None:
        """The next waiting sequence in fair order. One that waits for its adapter to be read
        holds up nobody; one that can never run leaves the queue with the reason."""
        if len(self.running) >= self._limits.running_max:
            return None
        for key in sorted(self.waiting.keys, key=self.counters.served.__getitem__):
            for sequence in self.waiting.of(key):
                failure = self._adapter_failure(sequence) or self._never_fits(sequence)
                if failure is not None:
                    self._drop(sequence.id)
                    step.events.append(failure)
                elif self._at_hand(sequence):
                    return sequence
        return None

    def _at_hand(self, sequence: Sequence) -> bool:
        adapter = sequence.request.adapter
        return adapter is None or self._pager.ready(adapter)

    def _adapter_failure(self, sequence: Sequence) -> Failed | None:
        try:
            self._at_hand(sequence)
        except AdapterError as error:
            return Failed(sequence.request.request_id, "adapter_failed", str(error))
        return None

    def _never_fits(self, sequence: Sequence) -> Failed | None:
        """With nothing running all pages are idle or free, so what does not fit now never will."""
        if self.running or not self._at_hand(sequence) or self._missing_pages(sequence) <= 0:
            return None
        detail = (
            f"{sequence.pending} tokens and their adapter need more than the pool's "
            f"{self._pool.total} pages"
        )
        return Failed(sequence.request.request_id, "prompt_too_long", detail)

    def _missing_pages(self, sequence: Sequence) -> int:
        """How many pages its adapter and all of its tokens lack, idle ones counted as there."""
        digest = sequence.digest
        adapter = self._pager.pages_to_lease(digest) if digest else 0
        there = self._pool.free + self._pager.idle_pages(keep=digest)
        return adapter + self._blocks(sequence.pending + 1) - there

    def _start(self, sequence: Sequence) -> None:
        """From the queue to the running ones, with its adapter leased and pages for its prompt."""
        digest = sequence.digest
        self.waiting.take(sequence.id)
        if digest:
            self._make_room(self._pager.pages_to_lease(digest), keep=digest)
            sequence.adapter = self._pager.lease(digest)
            self._pager.unwant(digest)
        held = len(sequence.adapter.pages) if sequence.adapter else 0
        roof = (self._pool.total - held) * self._limits.block_tokens
        sequence.limit = min(sequence.limit, roof, self._limits.context_tokens)
        sequence.admitted = self._iteration
        self.running[sequence.id] = sequence
        self._take(sequence, sequence.pending)

    # --- pages ----------------------------------------------------------------------------------

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._limits.block_tokens)

    def _grow(self, sequence: Sequence, length: int) -> bool:
        """Make sure that `length` more tokens have pages, preempting others if need be: the
        youngest request of the tenant that was served most. False if that was this one."""
        while self._lacks(sequence, length) > self._pool.free + self._pager.idle_pages():
            victim = max(
                self.running.values(),
                key=lambda other: (self.counters.served[other.key], other.arrived),
            )
            self._preempt(victim)
            if victim is sequence:
                return False
        self._take(sequence, length)
        return True

    def _lacks(self, sequence: Sequence, count: int) -> int:
        return self._blocks(sequence.computed + count) - len(sequence.pages)

    def _make_room(self, pages: int, keep: str | None = None) -> None:
        if pages > self._pool.free:
            self._pager.reclaim(pages - self._pool.free, keep)

    def _take(self, sequence: Sequence, count: int) -> None:
        """Pages for `count` more tokens, from idle adapters where none are free."""
        missing = max(0, self._lacks(sequence, count))
        self._make_room(missing)
        sequence.pages += self._pool.take(missing, sequence.owner)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of its queue, to compute again from its first token."""
        self._stop(sequence)
        sequence.computed = 0
        self.waiting.push_back(sequence)
        if sequence.request.adapter is not None:
            self._pager.want(sequence.request.adapter)
        self.preemptions += 1

    def _stop(self, sequence: Sequence) -> None:
        """Give back what a sequence holds while running."""
        del self.running[sequence.id]
        self._pool.give(sequence.pages, sequence.owner)
        sequence.pages = []
        if sequence.adapter is not None:
            sequence.adapter = None
            assert sequence.digest is not None
            self._pager.release(sequence.digest)

    def _end(self, sequence: Sequence) -> None:
        self._stop(sequence)
        self.counters.leave(sequence.key)

    def _drop(self, request_id: str) -> None:
        """A waiting request goes for good."""
        sequence = self.waiting.take(request_id)
        self.counters.leave(sequence.key)
        if sequence.digest is not None:
            self._pager.unwant(sequence.digest)


class _Step:
    """An iteration while it is planned."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.lengths: dict[str, int] = {}
        self.events: list[Event] = []
