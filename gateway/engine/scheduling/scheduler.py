"""Iteration-level scheduling (Orca, OSDI 2022): who computes what in the next iteration.

Each iteration has one token budget. Running decodes get their token first; prompts, in chunks,
share the rest (Sarathi-Serve, arXiv 2403.02310, section 4) in the order of their tenants'
virtual token counters. When pages run out, idle adapters and prefixes go first; then a sequence is
preempted: its pages are given back, and it computes again later, with the same result.
"""

from collections.abc import Callable, Iterable

from gateway.engine.memory.costs import Costs
from gateway.engine.messages import Event, Failed, Finished, Submit, Tokens
from gateway.engine.scheduling.admission import Admission, Memory
from gateway.engine.scheduling.limits import Limits
from gateway.engine.scheduling.lookahead import OutputLengths
from gateway.engine.scheduling.plan import Plan, Slice
from gateway.engine.scheduling.sequence import Sequence

AGE_TOKENS = 16
"""A prefill that is running gains as many tokens an iteration on shorter ones that come later."""


class Scheduler:
    def __init__(
        self,
        limits: Limits,
        memory: Memory,
        lengths: OutputLengths,
        costs: Costs,
        clock: Callable[[], float],
    ) -> None:
        self._limits = limits
        self._memory = memory
        self._iteration = 0
        self.running: dict[str, Sequence] = {}
        self._admission = Admission(limits, memory, self.running, lengths, costs, clock)
        self.counters = self._admission.counters
        self.waiting = self._admission.waiting
        self.preemptions = 0

    # --- requests come and go between iterations ------------------------------------------------

    def submit(self, request: Submit) -> list[Event]:
        """Queue a request, or say why it can never run, or not in time."""
        return self._admission.submit(request)

    def cancel(self, request_id: str) -> list[Event]:
        """Give back at once all that the request holds, and tell what it had got."""
        if request_id in self.waiting:
            sequence = self._admission.leave(request_id)
        elif request_id in self.running:
            sequence = self.running[request_id]
            self._end(sequence)
        else:
            return []
        computed = min(sequence.charged, len(sequence.request.prompt))
        return [
            Finished(request_id, "cancelled", computed, sequence.generated, sequence.cached),
        ]

    @property
    def busy(self) -> bool:
        """False while every request there is waits for its adapter to be read."""
        return bool(self.running) or self._admission.busy

    # --- one iteration --------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Decide the next iteration. Takes the pages it will write to."""
        step = _Step(self._limits.step_tokens, self._admission.refresh())
        self._memory.radix.sweep()
        self._iteration += 1
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
            full = not admitting or len(self.running) >= self._limits.running_max
            newcomer = None if full else self._admission.candidate(step.events)
            if newcomer and (following is None or self._turn(newcomer) < self._turn(following)):
                if not self._admission.fits(newcomer):
                    admitting = False
                    continue
                self._start(newcomer)
                self._schedule(newcomer, step)
            elif following:
                begun.remove(following)
                self._schedule(following, step)
            else:
                return

    def _turn(self, sequence: Sequence) -> tuple[float, float, bool]:
        """Least served tenant first; within one, the shortest rest of a prompt, but one that
        has been running for long before one that came later; then one whose adapter is in use."""
        started = sequence.admitted if sequence.id in self.running else self._iteration
        age = self._iteration - started
        cold = sequence.digest is not None and not self._memory.pager.leased(sequence.digest)
        return self.counters.served[sequence.key], sequence.pending - AGE_TOKENS * age, cold

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
            self._end(sequence, sound=False)
            cause = "adapter" if request.adapter else "model"
            detail = f"the {cause} computed NaN or Inf for this prompt"
            return [Failed(request.request_id, "not_finite", detail)]
        first = not sequence.generated
        if first:
            self._publish(sequence)
        sequence.tokens.append(token)
        stopped = token in request.stop_token_ids
        cached = sequence.cached if first else 0
        events: list[Event] = [] if stopped else [Tokens(request.request_id, [token], cached)]
        if stopped or len(sequence.tokens) >= sequence.limit:
            self._admission.finished(sequence)
            self._end(sequence)
            events.append(
                Finished(
                    request.request_id,
                    "stop" if stopped else "length",
                    len(request.prompt),
                    sequence.generated,
                    sequence.cached,
                )
            )
        return events

    # --- pages ----------------------------------------------------------------------------------

    def _start(self, sequence: Sequence) -> None:
        """From the queue to the running ones: with what the cache has of it, with its adapter
        leased, and with pages for the rest of its prompt."""
        pool, pager, radix, supply = self._memory
        self._admission.start(sequence)
        sequence.prefix = self._admission.prefix(sequence)
        radix.lock(sequence.prefix)
        sequence.pages = [block.page for block in sequence.prefix]
        sequence.computed = len(sequence.prefix) * self._limits.block_tokens
        sequence.charged = max(sequence.charged, sequence.computed)
        if sequence.admitted < 0:
            sequence.cached = sequence.computed
        digest = sequence.digest
        if digest is not None:
            supply.secure(pager.pages_to_lease(digest), "adapter", keep=(digest,))
            sequence.adapter = pager.lease(digest, sequence.key)
            pager.unwant(digest)
        held = len(sequence.adapter.pages) if sequence.adapter else 0
        roof = (pool.total - held - pager.pinned_pages(digest)) * self._limits.block_tokens
        sequence.limit = min(sequence.limit, roof, self._limits.context_tokens)
        sequence.admitted = self._iteration
        self.running[sequence.id] = sequence
        self._take(sequence, self._lacks(sequence, sequence.pending))

    def _grow(self, sequence: Sequence, length: int) -> bool:
        """Make sure that `length` more tokens have pages, preempting others if need be: the
        youngest request of the tenant that was served most. False if that was this one."""
        lacking = self._lacks(sequence, length)
        if not lacking:
            return True
        while self._memory.supply.missing(0, lacking) > 0:
            victim = max(
                self.running.values(),
                key=lambda other: (self.counters.served[other.key], other.arrived),
            )
            self._preempt(victim)
            if victim is sequence:
                return False
        self._take(sequence, lacking)
        return True

    def _lacks(self, sequence: Sequence, count: int) -> int:
        """Pages for `count` more tokens that it does not have yet."""
        return max(0, self._limits.blocks(sequence.computed + count) - len(sequence.pages))

    def _take(self, sequence: Sequence, pages: int) -> None:
        self._memory.supply.secure(pages, "kv")
        sequence.pages += self._memory.pool.take(pages, sequence.owner)

    def _publish(self, sequence: Sequence) -> None:
        """Let the cache have its full blocks, so that others, and itself if it is preempted, can
        go on from them."""
        full = sequence.computed // self._limits.block_tokens
        keys = sequence.block_keys(full, self._limits.block_tokens)
        known = len(sequence.prefix)
        if sequence.root is None or len(keys) <= known:
            return
        if sequence.digest is not None and self._memory.pager.retired(sequence.digest):
            return  # nobody will ask for it again
        pages = sequence.pages[known:full]
        self._memory.radix.insert(
            sequence.prefix, keys[known:], pages, sequence.owner, sequence.root
        )
        sequence.pages[known:full] = pages

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the queue, to compute again what the cache does not keep. It asks for its adapter
        before it lets go of it: a version that was unloaded meanwhile could not be read again."""
        self._admission.back(sequence)
        self._stop(sequence, sound=True)
        sequence.computed = 0
        self.preemptions += 1

    def _stop(self, sequence: Sequence, sound: bool) -> None:
        """Give back what a sequence holds while running; into the cache, if it is `sound`."""
        del self.running[sequence.id]
        if sound:
            self._publish(sequence)
        own = sequence.pages[len(sequence.prefix) :]
        self._memory.radix.unlock(sequence.prefix)
        self._memory.pool.give(own, sequence.owner)
        sequence.pages, sequence.prefix = [], []
        if sequence.adapter is not None:
            sequence.adapter = None
            assert sequence.digest is not None
            self._memory.pager.release(sequence.digest)

    def _end(self, sequence: Sequence, sound: bool = True) -> None:
        self._stop(sequence, sound)
        self.counters.leave(sequence.key)


class _Step:
    """An iteration while it is planned."""

    def __init__(self, budget: int, events: list[Event]) -> None:
        self.budget = budget
        self.lengths: dict[str, int] = {}
        self.events = events
