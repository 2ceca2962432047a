import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.engine.scheduling.fairness import VirtualTokenCounters


def arrive(counters: VirtualTokenCounters, key: str, *waiting: str) -> None:
    """A request of the key, while those keys wait."""
    counters.enter(key)
    counters.wait(key, waiting)


def test_tokens_are_priced_and_weighted():
    counters = VirtualTokenCounters()
    arrive(counters, "a")
    arrive(counters, "b", "a")
    counters.charge("a", 1.0, input_tokens=10, output_tokens=3)
    counters.charge("b", 2.0, input_tokens=10, output_tokens=3)
    assert counters.served == {"a": 16.0, "b": 8.0}


def test_who_comes_late_starts_level_with_the_least_served():
    counters = VirtualTokenCounters()
    arrive(counters, "a")
    arrive(counters, "b", "a")
    counters.charge("a", 1.0, 100, 0)
    counters.charge("b", 1.0, 40, 0)
    arrive(counters, "late", "a", "b")
    assert counters.served["late"] == 40.0


def test_a_pause_saves_up_no_turns():
    counters = VirtualTokenCounters()
    arrive(counters, "idle")
    counters.leave("idle")
    arrive(counters, "busy")
    counters.charge("busy", 1.0, 500, 0)
    arrive(counters, "idle", "busy")
    assert counters.served["idle"] == 500.0


def test_who_had_all_it_asked_for_comes_back_level_with_those_that_wait():
    """Though it never left: one request of it was running, and none waited."""
    counters = VirtualTokenCounters()
    arrive(counters, "content")
    counters.start("content")
    arrive(counters, "busy")
    counters.charge("busy", 1.0, 500, 0)
    arrive(counters, "content", "busy")
    assert counters.served["content"] == 500.0


def test_leaving_and_coming_back_clears_no_debt():
    counters = VirtualTokenCounters()
    arrive(counters, "modest")
    arrive(counters, "greedy", "modest")
    counters.charge("greedy", 1.0, 900, 0)
    counters.leave("greedy")
    arrive(counters, "greedy", "modest")
    assert counters.served["greedy"] == 900.0


def test_after_a_lull_the_next_to_come_starts_where_the_last_left():
    counters = VirtualTokenCounters()
    arrive(counters, "a")
    counters.start("a")
    counters.charge("a", 1.0, 70, 0)
    counters.leave("a")
    arrive(counters, "b")
    assert counters.served["b"] == 70.0


def test_those_long_gone_are_forgotten():
    counters = VirtualTokenCounters()
    for index in range(1000):
        arrive(counters, f"tenant-{index}")
        counters.start(f"tenant-{index}")
        counters.charge(f"tenant-{index}", 1.0, 10, 0)
        counters.leave(f"tenant-{index}")
    assert len(counters.served) <= 2


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50), st.booleans()), max_size=60))
def test_counters_never_sink_while_a_key_is_known(steps: list[tuple[str, int, bool]]):
    counters = VirtualTokenCounters()
    active: dict[str, int] = {}
    for key, tokens, leaves in steps:
        before = dict(counters.served)
        if active.get(key) and leaves:
            counters.leave(key)
            active[key] -= 1
        else:
            arrive(counters, key, *(other for other, count in active.items() if count))
            active[key] = active.get(key, 0) + 1
            counters.charge(key, 1.0, tokens, 0)
        for known, served in counters.served.items():
            assert served >= before.get(known, 0.0)
        assert all(key in counters.served for key, count in active.items() if count)


def test_leaving_more_often_than_entering_is_caught():
    counters = VirtualTokenCounters()
    with pytest.raises(AssertionError, match="more often"):
        counters.leave("nobody")
