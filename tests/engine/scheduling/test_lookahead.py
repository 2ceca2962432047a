"""Lookahead admission on a trace of three kinds of adapters, against reserving all and nothing."""

import math
import random
from collections.abc import Callable
from statistics import mean

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.engine.messages import Sampling, Submit
from gateway.engine.scheduling.lookahead import (
    COVERAGE,
    UNSEEN_TOKENS,
    Demand,
    History,
    ObservedLengths,
    OutputLengths,
    peak_pages,
)
from gateway.engine.scheduling.sequence import Sequence
from tests.engine.scheduling.simulation import Ask, NoForesight, Simulation, lengths_like

LAWS = ("classifier", "chat", "writer")
MAX_TOKENS = 512
PAGES = 250
BLOCK = 16


def test_an_answer_nobody_has_seen_the_like_of_does_not_count_with_the_whole_context():
    """Else a new server would let in two chats at a time, until enough of them had ended."""
    lengths = ObservedLengths()
    request = Submit("a", [1] * 10, 8000, Sampling())
    sequence = Sequence(request, 1)
    assert lengths.expected(sequence) == 10 + UNSEEN_TOKENS
    sequence.tokens += [1] * 300
    assert lengths.expected(sequence) == 10 + 600
    for number in range(20):  # the tenant's answers so far were short
        ended = Sequence(Submit(str(number), [1] * 10, 8000, Sampling()), number)
        ended.tokens += [1] * 5
        lengths.finished(ended)
    assert lengths.expected(sequence) == 10 + 600
    sequence.limit = 400
    assert lengths.expected(sequence) == 400


class AllReserved:
    """Every request counts with all that it may need."""

    def expected(self, sequence: Sequence) -> int:
        return sequence.limit

    def finished(self, sequence: Sequence) -> None:
        pass


def trace(count: int, laws: Callable[[int], str]) -> list[Ask]:
    chance = random.Random(24)
    asks = []
    for index in range(count):
        law = laws(index)
        output = min(MAX_TOKENS, lengths_like(law, chance))
        asks.append(Ask(law, chance.randint(10, 60), output, MAX_TOKENS))
    return asks


def play(asks: list[Ask], lengths: OutputLengths | None = None, pages: int = PAGES) -> Simulation:
    """Four requests arrive in each iteration, so there is always a queue."""
    simulation = Simulation(
        pages, step_tokens=256, running_max=256, lengths=lengths, block_tokens=BLOCK
    )
    for index, ask in enumerate(asks):
        simulation.ask(ask)
        if index % 4 == 3:
            simulation.step()
    simulation.finish()
    assert len(simulation.finished) == len(asks)
    assert simulation.pool.free == pages
    return simulation


def busy_concurrency(simulation: Simulation) -> float:
    """Mean number of running sequences until the last fifth, when the queue runs empty."""
    return mean(simulation.concurrency[: len(simulation.concurrency) * 4 // 5])


def test_more_run_at_a_time_than_if_all_were_reserved_and_fewer_are_sent_back_than_if_nothing_was():
    asks = trace(1_000, lambda index: LAWS[index % 3])
    ours = play(asks)
    reserved = play(asks, AllReserved())
    unreserved = play(asks, NoForesight())
    assert busy_concurrency(ours) >= 1.5 * busy_concurrency(reserved)
    assert ours.steps < reserved.steps
    assert reserved.scheduler.preemptions == 0
    assert unreserved.scheduler.preemptions > 50
    assert ours.scheduler.preemptions <= 0.3 * unreserved.scheduler.preemptions
    generated = sum(ask.output for ask in asks)
    assert ours.pool.takes <= generated / 8


def test_the_expected_length_covers_nine_answers_in_ten():
    """Once each law has been seen."""
    asks = trace(1_500, lambda index: LAWS[index % 3])
    lengths = Watched()
    play(asks, lengths)
    covered = {law: mean(lengths.covered[law][100:]) for law in LAWS}
    assert 0.87 <= covered["chat"] <= 0.93
    assert 0.87 <= covered["writer"] <= 0.93
    assert covered["classifier"] >= 0.87  # three lengths only: there is nothing between 2/3 and 1


class Watched(ObservedLengths):
    """Notes whether each answer was as long as was expected of it when it came in."""

    def __init__(self) -> None:
        super().__init__()
        self.covered: dict[str, list[bool]] = {law: [] for law in LAWS}
        self._first: dict[str, int] = {}

    def expected(self, sequence: Sequence) -> int:
        expected = super().expected(sequence)
        assert len(sequence.tokens) < expected <= sequence.limit
        self._first.setdefault(sequence.id, expected)
        return expected

    def finished(self, sequence: Sequence) -> None:
        self.covered[sequence.key].append(len(sequence.tokens) <= self._first[sequence.id])
        super().finished(sequence)


def test_a_tenant_that_changes_its_law_is_followed_and_all_finish():
    """From classifier to writer and back, in a pool that its writers alone would fill."""
    asks = trace(600, lambda index: "writer" if 200 <= index < 400 else "classifier")
    asks = [ask._replace(tenant="hostile") for ask in asks]
    bystander = [Ask("modest", 20, 5, 16)] * 600
    mixed = [ask for pair in zip(asks, bystander, strict=True) for ask in pair]
    simulation = play(mixed, pages=60)
    modest = [name for name, ask in simulation.asks.items() if ask.tenant == "modest"]
    assert all(name in simulation.finished for name in modest)


def test_drifting_lengths_are_covered_too():
    history = History()
    chance = random.Random(7)
    covered = []
    for index in range(2_000):
        length = int(100 + index / 10 + chance.gauss(0, 20))
        quantile = history.quantile(0)
        covered.append(quantile is not None and length <= quantile)
        history.add(length)
    assert 0.87 <= mean(covered[200:]) <= 0.93
    assert COVERAGE == 0.9


def test_what_is_expected_of_one_under_way_is_more_than_it_has():
    history = History()
    for length in range(1, 101):
        history.add(length)
    history.level = COVERAGE  # they grew, so it had gone up
    assert history.quantile(0) == 90
    assert history.quantile(50) == 95
    assert history.quantile(99) == 100
    assert history.quantile(100) is None


def brute_force_peak(demands: list[Demand], block_tokens: int) -> int:
    """Held pages, step by step, to the end of the last."""
    peak = 0
    for step in range(max((demand.remaining for demand in demands), default=0) + 1):
        held = [
            math.ceil((demand.used + step) / block_tokens)
            for demand in demands
            if step <= demand.remaining
        ]
        peak = max(peak, sum(held))
    return peak


@settings(max_examples=200)
@given(
    demands=st.lists(st.builds(Demand, st.integers(0, 60), st.integers(0, 60)), max_size=8),
    block_tokens=st.sampled_from([1, 2, 4, 16]),
)
def test_the_peak_equals_a_timeline_walked_step_by_step(demands: list[Demand], block_tokens: int):
    assert peak_pages(demands, block_tokens) == brute_force_peak(demands, block_tokens)
