"""The scheduler over a pool without bytes, on a clock of its own: no model, every token is 0."""

import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch

from gateway.engine.memory.buffer import KvShape, PageBuffer, Slab
from gateway.engine.memory.costs import Costs
from gateway.engine.memory.pager import AdapterPager
from gateway.engine.memory.pages import PagePool
from gateway.engine.memory.radix import RadixCache
from gateway.engine.memory.reclaim import ReclaimOrder
from gateway.engine.memory.rows import TARGETS, RowLayout, TargetRank
from gateway.engine.memory.supply import PageSupply
from gateway.engine.messages import AdapterRef, Event, Failed, Finished, Sampling, Submit, Tokens
from gateway.engine.scheduling.admission import Memory
from gateway.engine.scheduling.limits import Limits
from gateway.engine.scheduling.lookahead import ObservedLengths, OutputLengths
from gateway.engine.scheduling.plan import Plan
from gateway.engine.scheduling.scheduler import Scheduler
from gateway.engine.scheduling.sequence import Sequence

BLOCK = 4
STOP = 9
"""The token that ends an answer which has its length from `Ask.output`."""


class NoForesight:
    """Nothing is reserved: sequences push each other out."""

    def expected(self, sequence: Sequence) -> int:
        return len(sequence.tokens) + 1

    def finished(self, sequence: Sequence) -> None:
        pass


class Ask(NamedTuple):
    """What a simulated request turns out to be."""

    tenant: str
    prompt: int
    output: int
    """Tokens after which it stops by itself."""
    max_tokens: int
    adapter: str | None = None
    first_token_s: float | None = None
    weight: float = 1.0
    tokens: tuple[int, ...] | None = None
    """The prompt itself, if it matters."""


class Simulation:
    """Runs plans without a model. `step_s` says how long an iteration of so many tokens takes on
    the simulated clock; adapters of `adapter_pages` pages are read at once."""

    def __init__(
        self,
        pages: int = 10_000,
        step_tokens: int = 64,
        running_max: int = 32,
        lengths: OutputLengths | None = None,
        step_s: Callable[[int], float] = lambda tokens: 0.1,
        adapter_pages: int = 4,
        block_tokens: int = BLOCK,
        namespace: Callable[[Ask], str | None] = lambda ask: None,
        checked: bool = True,
    ) -> None:
        self.now = 0.0
        self.pool = PagePool(pages)
        self.costs = Costs()
        self._step_s = step_s
        self._checked = checked
        self._namespace = namespace
        self._read = threading.Semaphore(0)
        self._reads = 0
        buffer = PageBuffer(pages, KvShape(1, block_tokens, 1, 2), torch.float32, "cpu")
        page = buffer.shape.page_elements
        projections = dict.fromkeys(TARGETS, (page // 2, page // 2))
        layout = RowLayout.plan({(0, "o_proj"): TargetRank(adapter_pages, 1.0)}, projections, page)
        assert layout.pages == adapter_pages
        slab = Slab(layout, torch.zeros(layout.pages, page))
        reclaim = ReclaimOrder()
        self.pager = AdapterPager(
            self.pool,
            reclaim,
            buffer,
            lambda ref: slab,
            host_bytes=2**40,
            wake=self._read.release,
            costs=self.costs,
            read_s_max=float("inf"),
            clock=lambda: self.now,
        )
        self.radix = RadixCache(self.pool, reclaim, lambda: 0.01)
        supply = PageSupply(self.pool, self.pager, self.radix, reclaim)
        self.scheduler = Scheduler(
            Limits(4096, 10, block_tokens, step_tokens, running_max, waiting_max=100_000),
            Memory(self.pool, self.pager, self.radix, supply),
            lengths or ObservedLengths(),
            self.costs,
            clock=lambda: self.now,
        )
        self.asks: dict[str, Ask] = {}
        self.arrived: dict[str, float] = {}
        self.served: Counter[str] = Counter()
        """Price of the tokens computed, by tenant."""
        self.first_token: dict[str, int] = {}
        """Iteration of it."""
        self.first_token_s: dict[str, float] = {}
        """Seconds from its arrival."""
        self.finished: dict[str, int] = {}
        self.cached: dict[str, int] = {}
        self.failed: dict[str, Failed] = {}
        self.steps = 0
        self.fill: list[int] = []
        self.concurrency: list[int] = []

    def submit(
        self,
        tenant: str,
        prompt: int,
        output: int,
        weight: float = 1.0,
        adapter: str | None = None,
        first_token_s: float | None = None,
    ) -> str:
        return self.ask(Ask(tenant, prompt, output, output, adapter, first_token_s, weight))

    def ask(self, ask: Ask) -> str:
        name = f"{ask.tenant}-{len(self.asks)}"
        self.asks[name] = ask
        self.arrived[name] = self.now
        tokens = list(ask.tokens) if ask.tokens else [1] * ask.prompt
        adapter = None if ask.adapter is None else AdapterRef(ask.adapter, "")
        events = self.scheduler.submit(
            Submit(
                name,
                tokens,
                ask.max_tokens,
                Sampling(),
                adapter,
                [STOP],
                fairness_key=ask.tenant,
                fairness_weight=ask.weight,
                cache_namespace=self._namespace(ask),
                first_token_s=ask.first_token_s,
            )
        )
        self._record(events)
        self._wait_for_reads()
        return name

    def step(self) -> Plan:
        plan = self.scheduler.plan()
        self._wait_for_reads()
        self.steps += 1
        self.fill.append(sum(item.length for item in plan.slices))
        self.concurrency.append(len(self.scheduler.running))
        for sequence, length in plan.slices:
            decode = sequence.generated > 0 and length == 1
            self.served[sequence.key] += 2 if decode else length
        seconds = self._step_s(self.fill[-1])
        self.now += seconds
        if plan.slices:
            self.costs.step.measured(self.fill[-1], seconds)
        sampled = [self._token(item.sequence.id, item.sequence.generated) for item in plan.slices
                   if item.samples]  # fmt: skip
        self._record(plan.events + self.scheduler.commit(plan, sampled))
        if self._checked:
            self.pool.check()
            self.radix.check()
        return plan

    def finish(self, steps_max: int = 100_000) -> None:
        while self.scheduler.waiting or self.scheduler.running:
            self.step()
            assert self.steps < steps_max, "the scheduler does not come to an end"

    def _wait_for_reads(self) -> None:
        """The simulated store takes no time."""
        while self._reads < self.pager.reads:
            self._read.acquire()
            self._reads += 1

    def _token(self, name: str, generated: int) -> int:
        ask = self.asks[name]
        return STOP if generated + 1 >= ask.output < ask.max_tokens else 0

    def _record(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Finished(request_id=name, cached_tokens=cached):
                    self.finished[name] = self.steps
                    self.cached[name] = cached
                case Failed(request_id=name, code="late"):
                    self.failed[name] = event
                case Tokens(request_id=name):
                    self.first_token.setdefault(name, self.steps)
                    self.first_token_s.setdefault(name, self.now - self.arrived[name])
                case _:
                    raise AssertionError(event)


def lengths_like(law: str, chance: random.Random) -> int:
    """Output lengths of three kinds of adapters: a classifier's, a chat's, a writer's."""
    match law:
        case "classifier":
            return chance.randint(2, 4)
        case "chat":
            return 20 + int(chance.expovariate(1 / 20))
        case _:
            return max(1, min(400, int(chance.gauss(200, 40))))
