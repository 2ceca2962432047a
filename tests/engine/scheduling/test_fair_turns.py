"""Turns between tenants, and how long anybody can have to wait for one."""

import random
import sys
import threading
from collections import Counter
from types import FrameType
from typing import Any

import pytest

from gateway.engine.messages import AdapterRef, Sampling, Submit
from tests.engine.scheduling.simulation import Ask, Simulation

RUNNING_MAX = 8
STEP_TOKENS = 64


def vtc_bound(prompt: int, output: int, weight: float = 1.0) -> float:
    """VTC, theorem 4.4: while two keys are backlogged their services differ by at most twice the
    larger of one input and of what a full batch generates, however long that lasts."""
    return 2 * max(prompt, 2 * RUNNING_MAX * output) / weight


def shared_prompt(length: int, tail: int) -> tuple[int, ...]:
    return tuple([1] * (length - 8) + [2 + (tail >> place & 1) for place in range(8)])


def test_prefix_hits_are_not_charged_and_keep_the_balance():
    """The flood's prompts are mostly cached: it gets more requests through, not more tokens."""
    simulation = Simulation(running_max=RUNNING_MAX, namespace=lambda ask: ask.tenant)
    differences = []
    for step in range(400):
        for index in range(4):
            tail = (step * 4 + index) % 256
            simulation.ask(Ask("flood", 120, 10, 10, tokens=shared_prompt(120, tail)))
        simulation.submit("modest", 40, 10)
        simulation.step()
        differences.append(simulation.served["flood"] - simulation.served["modest"])
    assert max(map(abs, differences)) <= vtc_bound(120, 10)
    hits = [cached for name, cached in simulation.cached.items() if name.startswith("flood")]
    assert len(hits) > 100
    assert sum(cached >= 100 for cached in hits) >= 0.9 * len(hits)


@pytest.mark.parametrize("weight", [0.5, 1.0, 4.0])
def test_service_over_weight_stays_within_the_bound(weight: float):
    simulation = Simulation(running_max=RUNNING_MAX)
    differences = []
    for _ in range(400):
        for _ in range(4):
            simulation.submit("flood", 30, 10)
            simulation.submit("weighted", 30, 10, weight=weight)
        simulation.step()
        differences.append(simulation.served["flood"] - simulation.served["weighted"] / weight)
    assert max(map(abs, differences)) <= vtc_bound(30, 10, min(weight, 1.0))


def test_one_long_answer_saves_up_no_turns():
    """While one request of `b` runs and none waits, `a` is served alone, and owes nothing for it
    when `b` comes with a flood of its own."""
    simulation = Simulation(running_max=RUNNING_MAX)
    simulation.submit("b", 30, 600)
    for _ in range(400):
        simulation.submit("a", 30, 10)
        simulation.step()
    before = Counter(simulation.served)
    differences = []
    for _ in range(150):
        for _ in range(2):
            simulation.submit("a", 30, 10)
            simulation.submit("b", 30, 10)
        simulation.step()
        got = {key: simulation.served[key] - before[key] for key in "ab"}
        differences.append(got["a"] - got["b"])
    assert max(map(abs, differences)) <= vtc_bound(30, 10)


def drain(ahead: int, prompts: int, output: int) -> int:
    """Iterations after which `ahead` requests with `prompts` tokens of prompts are done, in
    batches as large as may be and each as long as the longest answer, and one batch more, as none
    comes in any more while one that does not fit is next."""
    batches = -(-ahead // RUNNING_MAX) + 1
    return batches * (output + 1) + -(-prompts // (STEP_TOKENS - RUNNING_MAX))


def flooded(simulation: Simulation, tenants: str, steps: int, adapters: int) -> None:
    """Small requests for hot adapters, three of each tenant a step: more than can be served."""
    for _ in range(steps):
        for tenant in tenants:
            for _ in range(3):
                adapter = f"hot-{len(simulation.asks) % adapters}"
                simulation.submit(tenant, 20, 10, adapter=adapter)
        simulation.step()


@pytest.mark.parametrize("tenant", ["flood", "cold"])
@pytest.mark.parametrize("pages", [56, 100])
def test_t6_an_adapter_nobody_else_uses_is_served_while_hot_ones_fill_the_pool(
    tenant: str, pages: int
):
    """Its turn comes when all that arrived before is done: of its own tenant, if it is the
    flood's, else one request of each other."""
    simulation = Simulation(pages, STEP_TOKENS, RUNNING_MAX)
    flooded(simulation, "flood", 60, adapters=10)
    assert simulation.pool.owned("adapter") >= 16  # four hot ones at least
    name = simulation.submit(tenant, 20, 10, adapter="cold")
    ahead = len(simulation.scheduler.running) + (
        len(simulation.scheduler.waiting) if tenant == "flood" else 1
    )
    bound = simulation.steps + drain(ahead, 20 * ahead, 10)
    while name not in simulation.first_token:
        flooded(simulation, "flood", 1, adapters=10)
        assert simulation.steps <= bound


@pytest.mark.parametrize("tenant", ["flood", "big"])
def test_t7_one_that_needs_most_of_the_pool_is_served_while_small_ones_keep_coming(tenant: str):
    simulation = Simulation(100, STEP_TOKENS, RUNNING_MAX)
    flooded(simulation, "flood", 40, adapters=2)
    name = simulation.submit(tenant, 300, 10)  # 78 of 100 pages
    ahead = len(simulation.scheduler.running) + (
        len(simulation.scheduler.waiting) if tenant == "flood" else 1
    )
    bound = simulation.steps + drain(ahead, 20 * ahead + 300, 10)
    while name not in simulation.first_token:
        flooded(simulation, "flood", 1, adapters=2)
        assert simulation.steps <= bound
    simulation.finish()


def test_t7_a_new_tenant_in_every_step_starves_nobody():
    """Each comes in level with the least served, not below it."""
    simulation = Simulation(100, STEP_TOKENS, RUNNING_MAX)
    for index in range(40):
        simulation.submit(f"t{index}", 20, 10)
        simulation.submit(f"u{index}", 20, 10)
        simulation.step()
    name = simulation.submit("big", 300, 10)
    bound = simulation.steps + drain(
        len(simulation.scheduler.running) + len(simulation.scheduler.waiting),
        20 * len(simulation.scheduler.waiting) + 300,
        10,
    )
    index = 40
    while name not in simulation.first_token:
        simulation.submit(f"t{index}", 20, 10)
        simulation.submit(f"u{index}", 20, 10)
        simulation.step()
        index += 1
        assert simulation.steps <= bound


def test_adapters_are_grouped_only_among_requests_that_came_together():
    chance = random.Random(4)
    simulation = Simulation(1_000, STEP_TOKENS, running_max=4)
    tick: dict[str, int] = {}
    order: list[str] = []
    for step in range(60):
        for _ in range(chance.randint(0, 3)):
            name = simulation.submit("a", 20, 10, adapter=f"v{chance.randint(0, 3)}")
            tick[name] = step
        simulation.step()
        order += [name for name in simulation.scheduler.running if name not in order]
    while simulation.scheduler.waiting or simulation.scheduler.running:
        simulation.step()
        order += [name for name in simulation.scheduler.running if name not in order]
    assert simulation.scheduler.preemptions == 0
    assert [tick[name] for name in order] == sorted(tick[name] for name in order)
    arrived = sorted(order, key=lambda name: int(name.split("-")[1]))
    assert order != arrived, "nothing was grouped"


def calls_of_an_iteration(parked: int) -> int:
    """Python calls while one iteration is planned beside requests whose adapters are being read."""
    simulation = Simulation(1_000, STEP_TOKENS, RUNNING_MAX)
    reading = threading.Event()
    simulation.pager._reader._read = lambda ref: reading.wait(30)  # type: ignore[assignment,return-value]
    scheduler = simulation.scheduler
    scheduler.submit(Submit("runs", [1] * 20, 50, Sampling()))
    for index in range(parked):
        ref = AdapterRef(f"v{index}", "")
        scheduler.submit(Submit(str(index), [1] * 20, 5, Sampling(), ref, fairness_key="other"))
    for _ in range(2):
        scheduler.commit(scheduler.plan(), [0])
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        plan = scheduler.plan()
    finally:
        sys.setprofile(None)
    assert [item.sequence.id for item in plan.slices] == ["runs"]
    reading.set()
    simulation.pager.close()
    return calls


def test_requests_whose_adapter_is_being_read_cost_an_iteration_nothing():
    assert calls_of_an_iteration(500) == calls_of_an_iteration(5)
