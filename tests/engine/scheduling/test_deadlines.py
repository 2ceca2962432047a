"""Deadlines: a request that can't have its first token in time is refused at once, and no other
tenant pays for it."""

import random
from statistics import mean

import pytest

from gateway.engine.scheduling.deadlines import Forecast, fair_order
from gateway.engine.scheduling.sequence import Sequence
from tests.engine.scheduling.simulation import Ask, NoForesight, Simulation, lengths_like

LAWS = ("classifier", "chat", "writer")


def line_step_s(tokens: int) -> float:
    return 0.05 + 0.001 * tokens


def measured(simulation: Simulation) -> Simulation:
    """Let it learn how long iterations take; answers of tenants a, b and c get twenty tokens."""
    for index in range(120):
        simulation.submit("abc"[index % 3], 30, 20)
        simulation.step()
    simulation.finish()
    assert simulation.costs.step.known
    return simulation


def forecast(simulation: Simulation, places: int) -> dict[str, float]:
    """When each waiting request will have its first token, by the simulated clock."""

    def expected(sequence: Sequence) -> int:
        return len(sequence.request.prompt) + 20

    scheduler = simulation.scheduler
    lines = {key: scheduler.waiting.line(key) for key in scheduler.waiting.ready_keys}
    order = fair_order(lines, scheduler.counters.served, expected)
    found = Forecast(simulation.costs.step, places, 64, expected)
    running = list(scheduler.running.values())
    return {item.id: simulation.now + s for item, s in found.first_tokens(running, order)}


@pytest.mark.parametrize("running_max", [2, 8])
@pytest.mark.parametrize("tenants", ["a", "abc"])
def test_the_forecast_is_what_then_happens(running_max: int, tenants: str):
    """Where answers get as long as expected: within a tenth and three iterations; among several
    tenants, as the turns go round, also within a turn of each of the others."""
    chance = random.Random(running_max)
    simulation = measured(Simulation(1_000, running_max=running_max, step_s=line_step_s))
    for index in range(40):
        simulation.submit(tenants[index % len(tenants)], chance.randint(10, 100), 20)
    for _ in range(3):
        simulation.step()
    now, foreseen = simulation.now, forecast(simulation, running_max)
    simulation.finish()
    assert len(foreseen) >= 25
    turn_s = 20 * line_step_s(64) / running_max * 2
    tolerance_s = 3 * line_step_s(64) + (len(tenants) - 1) * turn_s
    for name, first in foreseen.items():
        actual = simulation.arrived[name] + simulation.first_token_s[name]
        assert abs(first - actual) <= 0.1 * (actual - now) + tolerance_s, name


def test_one_that_would_be_late_is_refused_on_arrival_with_a_time_to_come_back():
    simulation = measured(Simulation(1_000, running_max=2, step_s=line_step_s))
    for _ in range(20):
        simulation.submit("a", 30, 20)
    name = simulation.submit("a", 30, 20, first_token_s=2.0)
    failed = simulation.failed[name]
    assert failed.code == "late"
    assert failed.retry_after_s is not None
    assert failed.retry_after_s > 5
    in_time = simulation.submit("a", 30, 20, first_token_s=60.0)
    simulation.finish()
    assert simulation.first_token_s[in_time] <= 60.0
    assert list(simulation.failed) == [name]


def test_before_anything_was_measured_nobody_is_refused_on_arrival():
    simulation = Simulation(step_s=line_step_s)
    for _ in range(50):
        simulation.submit("a", 30, 20, first_token_s=1.0)
    assert not simulation.failed


def test_no_tenants_request_is_refused_for_the_load_of_another():
    simulation = measured(Simulation(1_000, running_max=4, step_s=line_step_s))
    modest = []
    for index in range(400):
        simulation.submit("a", 60, 20, first_token_s=4.0)
        if index % 8 == 0:
            modest.append(simulation.submit("b", 20, 5, first_token_s=4.0))
        simulation.step()
    simulation.finish()
    assert len(simulation.failed) > 100
    assert not set(modest) & set(simulation.failed)
    assert max(simulation.first_token_s[name] for name in modest) <= 4.0


def test_the_costliest_of_the_own_tenant_goes():
    simulation = measured(Simulation(1_000, running_max=1, step_s=line_step_s))
    simulation.submit("a", 30, 20)
    simulation.step()
    costly = simulation.submit("a", 600, 20, first_token_s=5.0)
    other = simulation.submit("b", 700, 20, first_token_s=60.0)
    assert not simulation.failed
    cheap = [simulation.submit("a", 10, 20, first_token_s=5.0) for _ in range(2)]
    assert list(simulation.failed) == [costly]
    simulation.finish()
    assert all(simulation.first_token_s[name] <= 5.0 for name in cheap)
    assert other in simulation.finished


def test_one_that_can_not_be_saved_takes_no_other_with_it():
    """No refusal of others would give it a token in less than an iteration."""
    simulation = measured(Simulation(1_000, running_max=1, step_s=line_step_s))
    simulation.submit("a", 30, 20)
    simulation.step()
    others = [simulation.submit("a", 300, 20, first_token_s=60.0) for _ in range(5)]
    hopeless = simulation.submit("a", 10, 20, first_token_s=0.01)
    assert list(simulation.failed) == [hopeless]
    simulation.finish()
    assert all(name in simulation.finished for name in others)


def test_one_without_a_deadline_is_never_refused_for_one_that_has_one():
    simulation = measured(Simulation(1_000, running_max=1, step_s=line_step_s))
    patient = [simulation.submit("a", 600, 20) for _ in range(5)]
    late = simulation.submit("a", 10, 20, first_token_s=3.0)
    assert list(simulation.failed) == [late]
    simulation.finish()
    assert all(name in simulation.finished for name in patient)


def test_one_that_ran_is_never_refused_though_its_time_is_up():
    """Nor do the preempted ones, whose first tokens are long out, cost their tenant a refusal."""
    simulation = measured(
        Simulation(pages=60, running_max=8, step_s=line_step_s, lengths=NoForesight())
    )
    ran = [simulation.submit("a", 12, 60, first_token_s=30.0) for _ in range(8)]
    before = simulation.scheduler.preemptions
    while simulation.scheduler.preemptions == before:
        simulation.step()
    assert simulation.scheduler.waiting
    simulation.now += 1_000.0
    new = simulation.submit("a", 12, 5, first_token_s=30.0)
    assert not simulation.failed
    simulation.finish()
    assert all(name in simulation.finished for name in [*ran, new])


def test_one_whose_time_runs_out_in_the_queue_is_told_so_without_running():
    slow = [1.0]
    simulation = measured(Simulation(1_000, running_max=1, step_s=lambda tokens: 0.1 * slow[0]))
    simulation.submit("a", 30, 20)
    simulation.step()
    name = simulation.submit("b", 30, 20, first_token_s=5.0)
    assert not simulation.failed
    slow[0] = 10.0  # nobody could foresee that
    simulation.finish()
    assert simulation.failed[name].code == "late"
    assert name not in simulation.first_token
    assert simulation.now < 1_000


def test_a_request_id_that_is_used_again_does_not_inherit_the_deadline():
    simulation = Simulation(running_max=1)
    simulation.submit("a", 10, 300)
    simulation.step()
    first = simulation.submit("a", 10, 5, first_token_s=5.0)
    simulation.scheduler.cancel(first)
    del simulation.asks[first]
    assert simulation.submit("a", 10, 5) == first
    simulation.finish()
    assert first in simulation.finished


def test_deadlines_that_can_be_met_change_nothing():
    def play(first_token_s: float | None) -> dict[str, int]:
        chance = random.Random(3)
        simulation = measured(Simulation(1_000, running_max=4, step_s=line_step_s))
        for _ in range(60):
            tenant, prompt = chance.choice("ab"), chance.randint(5, 100)
            simulation.submit(tenant, prompt, 10, first_token_s=first_token_s)
            simulation.step()
        simulation.finish()
        assert not simulation.failed
        return simulation.first_token

    assert play(None) == play(1e6)


def mixed(chance: random.Random, first_token_s: float | None = None) -> Ask:
    law = chance.choice(LAWS)
    output = min(512, lengths_like(law, chance))
    return Ask(chance.choice("ab"), chance.randint(10, 100), output, 512, law, first_token_s)


def overloaded(deadline_s: float, given: bool, running_max: int, rate: float) -> float:
    """Share of the requests whose first token came in time. Poisson arrivals, not slowed down by
    answers that don't come; the first quarter, when the queue is short, does not count."""
    chance = random.Random(2)
    simulation = Simulation(1_000, running_max=running_max, step_s=line_step_s, block_tokens=16)
    names = []
    arrival = 0.0
    for _ in range(1_000):
        arrival += chance.expovariate(rate)
        while simulation.now < arrival:
            if simulation.scheduler.busy:
                simulation.step()
            else:
                simulation.now = arrival
        names.append(simulation.ask(mixed(chance, deadline_s if given else None)))
    simulation.finish()
    waits = [simulation.first_token_s.get(name, 1e9) for name in names]
    assert not given or sum(deadline_s < wait < 1e9 for wait in waits) <= 0.01 * len(waits)
    return mean(wait <= deadline_s for wait in waits[300:])


@pytest.mark.parametrize(("running_max", "deadline_s"), [(8, 10.0), (32, 5.0)])
def test_at_one_and_a_half_times_the_capacity_three_in_four_are_in_time(
    running_max: int, deadline_s: float
):
    chance = random.Random(1)
    backlog = Simulation(1_000, running_max=running_max, step_s=line_step_s, block_tokens=16)
    for _ in range(300):
        backlog.ask(mixed(chance))
    while backlog.scheduler.waiting:
        backlog.step()
    rate = 1.5 * len(backlog.finished) / backlog.now
    in_time = overloaded(deadline_s, True, running_max, rate)
    in_time_without = overloaded(deadline_s, False, running_max, rate)
    assert in_time >= 0.75
    assert in_time_without <= 0.25
