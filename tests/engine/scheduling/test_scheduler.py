"""The scheduler alone, over a pool without bytes: what a step holds, and who gets it."""

import random
from collections import Counter

import torch

from gateway.engine.memory.buffer import KvShape, PageBuffer, Slab
from gateway.engine.memory.pager import AdapterPager
from gateway.engine.memory.pages import PagePool
from gateway.engine.messages import AdapterRef, Event, Finished, Sampling, Submit
from gateway.engine.scheduling.plan import Plan
from gateway.engine.scheduling.scheduler import Limits, Scheduler

BLOCK = 4


def no_store(ref: AdapterRef) -> Slab:
    raise AssertionError("no adapters here")


class Simulation:
    """Runs plans without a model: every sampling slice gets token 0."""

    def __init__(self, pages: int = 10_000, step_tokens: int = 64, running_max: int = 32) -> None:
        pool = self.pool = PagePool(pages)
        buffer = PageBuffer(1, KvShape(1, BLOCK, 1, 2), torch.float32, "cpu")
        pager = AdapterPager(pool, buffer, no_store, 0, lambda: None)
        limits = Limits(4096, 10, BLOCK, step_tokens, running_max, waiting_max=100_000)
        self.scheduler = Scheduler(limits, pool, pager)
        self.served: Counter[str] = Counter()
        """Price of the tokens computed, by tenant."""
        self.first_token: dict[str, int] = {}
        self.finished: dict[str, int] = {}
        self.steps = 0
        self.fill: list[int] = []
        self._count = 0

    def submit(self, tenant: str, prompt: int, output: int, weight: float = 1.0) -> str:
        self._count += 1
        name = f"{tenant}-{self._count}"
        request = Submit(
            name, [1] * prompt, output, Sampling(), fairness_key=tenant, fairness_weight=weight
        )
        assert self.scheduler.submit(request) is None
        return name

    def step(self) -> Plan:
        plan = self.scheduler.plan()
        self.steps += 1
        self.fill.append(sum(item.length for item in plan.slices))
        for sequence, length in plan.slices:
            decode = sequence.generated > 0 and length == 1
            self.served[sequence.key] += 2 if decode else length
        events = self.scheduler.commit(plan, [0 for item in plan.slices if item.samples])
        self._record(events)
        self.pool.check()
        return plan

    def finish(self, steps_max: int = 100_000) -> None:
        while self.scheduler.waiting or self.scheduler.running:
            self.step()
            assert self.steps < steps_max, "the scheduler does not come to an end"

    def _record(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Finished):
                self.finished[event.request_id] = self.steps
            else:
                assert not hasattr(event, "code"), event
                self.first_token.setdefault(getattr(event, "request_id", ""), self.steps)


def test_no_step_exceeds_the_budget_and_a_backlog_fills_it_exactly():
    simulation = Simulation()
    lengths = random.Random(1)
    for _ in range(60):
        simulation.submit("a", lengths.randint(3, 200), 1)
    while simulation.scheduler.waiting:
        simulation.step()
    assert max(simulation.fill) == 64
    assert simulation.fill.count(64) >= 0.95 * len(simulation.fill)


def test_a_short_request_gets_its_first_token_soon_behind_a_long_one():
    for tenant in ("same", "other"):
        simulation = Simulation()
        simulation.submit("same", 1000, 1)
        simulation.step()
        short = simulation.submit(tenant, 20, 1)
        before = simulation.steps
        while short not in simulation.first_token:
            simulation.step()
        assert simulation.steps - before <= 3


def test_a_long_prompt_is_not_starved_by_a_stream_of_short_ones():
    simulation = Simulation()
    long = simulation.submit("a", 1000, 1)
    simulation.step()
    while long not in simulation.finished:
        for _ in range(4):
            simulation.submit("a", 16, 1)
        simulation.step()
        assert simulation.steps < 150


def test_a_flood_leaves_the_other_tenant_its_half():
    """VTC, theorem 4.4: while both are backlogged their service differs by a bound that does not
    grow with time, here twice the largest of input and budget."""
    simulation = Simulation(running_max=8)
    differences = []
    for _ in range(800):
        for _ in range(10):
            simulation.submit("flood", 40, 20)
        simulation.submit("modest", 40, 20)
        simulation.step()
        differences.append(simulation.served["flood"] - simulation.served["modest"])
    bound = 2 * max(40, 2 * 8 * 20)
    assert max(map(abs, differences)) <= bound
    assert 0.9 <= simulation.served["modest"] / simulation.served["flood"] <= 1.1


def test_weights_divide_the_service():
    simulation = Simulation(running_max=8)
    for _ in range(800):
        simulation.submit("small", 20, 10, weight=1.0)
        simulation.submit("large", 20, 10, weight=3.0)
        simulation.step()
    assert 2.7 <= simulation.served["large"] / simulation.served["small"] <= 3.3


def test_every_token_of_every_tenant_is_charged_once():
    simulation = Simulation(running_max=8)
    for _ in range(100):
        simulation.submit("flood", 40, 20)
    names = [simulation.submit("late", 40, 2) for _ in range(4)]
    simulation.finish()
    assert all(name in simulation.finished for name in names)
    assert sum(simulation.served.values()) == 100 * (40 + 2 * 19) + 4 * (40 + 2)


def test_what_a_preemption_computes_again_is_not_charged_again():
    simulation = Simulation(pages=30)
    for index in range(12):
        simulation.submit("ab"[index % 2], 12, 40)
    simulation.finish()
    assert simulation.scheduler.preemptions > 0
    charged = simulation.scheduler.counters.served
    assert sum(charged.values()) <= 12 * (12 + 2 * 39)


def test_a_tiny_pool_comes_to_an_end_whatever_arrives():
    chance = random.Random(3)
    for _ in range(30):
        simulation = Simulation(pages=16, step_tokens=8, running_max=6)
        names = []
        for _ in range(chance.randint(1, 15)):
            tenant, prompt, output = (
                chance.choice("abc"),
                chance.randint(1, 40),
                chance.randint(1, 20),
            )
            names.append(simulation.submit(tenant, prompt, output))
            for _ in range(chance.randint(0, 4)):
                simulation.step()
        simulation.finish(5000)
        assert sorted(simulation.finished) == sorted(names)
        assert simulation.pool.free == 16
