"""Iteration-level scheduling (Orca, OSDI 2022): who computes what in the next iteration.

Each iteration has one token budget. Running decodes get their token first, then the prefills
already begun, in chunks, then newly admitted ones (Sarathi-Serve, arXiv 2403.02310, section 4).
When pages run out, idle adapters go first, then the youngest sequence is preempted: its pages
are given back and it computes again later, with the same result.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from gateway.engine.memory.pager import AdapterError, AdapterPager
from gateway.engine.memory.pages import PagePool
from gateway.engine.messages import Event, Failed, Finished, Submit, Tokens
from gateway.engine.scheduling.plan import Plan, Slice
from gateway.engine.scheduling.sequence import Sequence


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
        self.waiting: OrderedDict[str, Sequence] = OrderedDict()  # next to be admitted first
        self.running: OrderedDict[str, Sequence] = OrderedDict()  # oldest first
        self.preemptions = 0

    # --- requests come and go between iterations ------------------------------------------------

    def submit(self, request: Submit) -> Failed | None:
        """Queue a request, or say why it can never run."""
        refusal = self._refuse(request)
        if refusal is not None:
            return refusal
        self._arrivals += 1
        self.waiting[request.request_id] = Sequence(request, self._arrivals)
        if request.adapter is not None:
            self._pager.want(request.adapter)
        return None

    def cancel(self, request_id: str) -> None:
        """Give back at once all that the request holds."""
        if request_id in self.waiting:
            self._leave_queue(self.waiting.pop(request_id))
        elif request_id in self.running:
            self._stop(self.running.pop(request_id))

    @property
    def busy(self) -> bool:
        """False while every request there is waits for its adapter to be read."""
        return bool(self.running) or any(
            sequence.request.adapter is None or self._pager.settled(sequence.request.adapter.digest)
            for sequence in self.waiting.values()
        )

    # --- one iteration --------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Decide the next iteration. Takes the pages it will write to."""
        self._pager.collect()
        events: list[Event] = []
        counts: dict[str, int] = {}
        budget = self._limits.step_tokens
        preempted = self.preemptions
        for sequence in self._decodes_then_prefills():
            if budget and sequence.request.request_id in self.running:
                count = min(sequence.pending, budget)
                if self._grow(sequence, count):
                    counts[sequence.request.request_id] = count
                    budget -= count
        if self.preemptions == preempted:  # else those sent back would push out others in turn
            self._admit(counts, budget, events)
        slices = [
            Slice(self.running[request_id], count)
            for request_id, count in counts.items()
            if request_id in self.running  # a later one may have preempted it
        ]
        slices.sort(key=lambda item: item.sequence.digest or "")
        return Plan(slices, events)

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
            self._stop(self.running.pop(request.request_id))
            cause = "adapter" if request.adapter else "model"
            detail = f"the {cause} computed NaN or Inf for this prompt"
            return [Failed(request.request_id, "not_finite", detail)]
        sequence.tokens.append(token)
        stopped = token in request.stop_token_ids
        events: list[Event] = [] if stopped else [Tokens(request.request_id, [token])]
        if stopped or len(sequence.tokens) >= sequence.limit:
            self._stop(self.running.pop(request.request_id))
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

    def _admit(self, counts: dict[str, int], budget: int, events: list[Event]) -> None:
        """Start waiting sequences in order while there is budget and room. One that waits for
        its adapter to be read holds up nobody."""
        for sequence in list(self.waiting.values()):
            if not budget or len(self.running) >= self._limits.running_max:
                return
            failure = self._adapter_failure(sequence) or self._never_fits(sequence)
            if failure is not None:
                del self.waiting[sequence.request.request_id]
                self._leave_queue(sequence)
                events.append(failure)
            elif not self._at_hand(sequence):
                continue
            elif self._missing_pages(sequence) > 0:
                return
            else:
                self._start(sequence)
                count = counts[sequence.request.request_id] = min(sequence.pending, budget)
                self._take(sequence, sequence.pending)
                budget -= count

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
        """From the queue to the running ones, with its adapter leased."""
        digest = sequence.digest
        del self.waiting[sequence.request.request_id]
        if digest:
            self._make_room(self._pager.pages_to_lease(digest), keep=digest)
            sequence.adapter = self._pager.lease(digest)
            self._pager.unwant(digest)
        held = len(sequence.adapter.pages) if sequence.adapter else 0
        roof = (self._pool.total - held) * self._limits.block_tokens
        sequence.limit = min(sequence.limit, roof, self._limits.context_tokens)
        self.running[sequence.request.request_id] = sequence

    # --- pages ----------------------------------------------------------------------------------

    def _decodes_then_prefills(self) -> list[Sequence]:
        return sorted(self.running.values(), key=lambda sequence: sequence.pending > 1)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._limits.block_tokens)

    def _grow(self, sequence: Sequence, count: int) -> bool:
        """Make sure that `count` more tokens have pages, preempting the youngest if need be.
        False if that was this sequence itself."""
        while self._lacks(sequence, count) > self._pool.free + self._pager.idle_pages():
            youngest = max(self.running.values(), key=lambda other: other.arrived)
            self._preempt(youngest)
            if youngest is sequence:
                return False
        self._take(sequence, count)
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
        """Back to the head of the queue, to compute again from its first token."""
        request = sequence.request
        self._stop(self.running.pop(request.request_id))
        sequence.computed = 0
        self.waiting[request.request_id] = sequence
        self.waiting.move_to_end(request.request_id, last=False)
        if request.adapter is not None:
            self._pager.want(request.adapter)
        self.preemptions += 1

    def _stop(self, sequence: Sequence) -> None:
        """Give back what a sequence holds while running."""
        self._pool.give(sequence.pages, sequence.owner)
        sequence.pages = []
        if sequence.adapter is not None:
            sequence.adapter = None
            assert sequence.digest is not None
            self._pager.release(sequence.digest)

    def _leave_queue(self, sequence: Sequence) -> None:
        if sequence.digest is not None:
            self._pager.unwant(sequence.digest)
