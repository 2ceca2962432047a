"""The scheduler alone, over a pool without bytes: what a step holds, and who gets it."""

import random

from gateway.engine.messages import Failed
from tests.engine.scheduling.simulation import NoForesight, Simulation


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
    simulation = Simulation(pages=30, lengths=NoForesight())
    for index in range(12):
        simulation.submit("ab"[index % 2], 12, 40)
    simulation.finish()
    assert simulation.scheduler.preemptions > 0
    charged = simulation.scheduler.counters.served
    assert sum(charged.values()) <= 12 * (12 + 2 * 39)


def test_a_tiny_pool_comes_to_an_end_whatever_arrives():
    chance = random.Random(3)
    for _ in range(30):
        lengths = chance.choice([NoForesight(), None])
        simulation = Simulation(pages=16, step_tokens=8, running_max=6, lengths=lengths)
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


def test_a_request_that_never_fits_is_told_so_even_if_its_adapter_was_unloaded_meanwhile():
    simulation = Simulation(pages=10, adapter_pages=20)
    name = simulation.submit("a", 4, 1, adapter="large")
    simulation.pager.unload("large")
    (event,) = simulation.scheduler.plan().events
    assert isinstance(event, Failed)
    assert (event.request_id, event.code) == (name, "adapter_failed")
    assert not simulation.scheduler.busy
