"""Whatever the number of threads, and whenever they come, all work is done once and in order."""

import gc
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest

from gateway.engine.kernels.compiling import entry
from gateway.engine.kernels.team import DONE, Team, done, take, team, wait

THREADS = [1, 2, 3, 8]
MODULUS = 65521


@entry
def add_up(claims: Any, sums: Any, times: Any) -> None:
    """sums[p, i] = 1 + the sum of sums[p - 1], modulo a prime, and times[p, i] counts how often
    that was done."""
    phases, items = sums.shape
    for phase in range(phases):
        item = take(claims, phase)
        while item < items:
            total = 1
            if phase > 0:
                for before in range(items):
                    total += sums[phase - 1, before]
            sums[phase, item] = total % MODULUS
            times[phase, item] += 1
            done(claims, phase)
            item = take(claims, phase)
        wait(claims, phase, items)


def job(phases: int, items: int) -> tuple[Any, Any]:
    """What no thread has written is far from right."""
    return np.full((phases, items), -1 << 40), np.zeros((phases, items), dtype=np.int64)


def check(sums: Any, times: Any) -> None:
    assert (times == 1).all()
    expected = 1
    for of_phase in sums:
        assert (of_phase == expected).all()
        expected = (1 + len(of_phase) * expected) % MODULUS


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize(("phases", "items"), [(1, 1), (3, 0), (9, 2), (5, 100), (12, 7)])
def test_each_item_is_done_once_after_all_of_the_phase_before(
    threads: int, phases: int, items: int
):
    for _ in range(20):
        sums, times = job(phases, items)
        claims = team(threads).run(phases, add_up, sums, times)
        check(sums, times)
        assert (claims[:, DONE] == items).all()


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize(("phases", "items", "runs"), [(4, 3, 3_000), (30, 50, 200)])
def test_what_was_computed_is_there_when_run_returns(
    threads: int, phases: int, items: int, runs: int
):
    """Runs of microseconds, for which helpers come at any moment, and often too late; and such as
    all have a share in."""
    for _ in range(runs):
        sums, times = job(phases, items)
        team(threads).run(phases, add_up, sums, times)
        check(sums, times)


def test_a_thread_that_comes_when_all_is_done_finds_nothing():
    sums, times = job(5, 4)
    claims = team(3).run(5, add_up, sums, times)
    before = sums.copy()
    for _ in range(3):
        add_up(claims, sums, times)
    assert (sums == before).all()
    assert (times == 1).all()


class SetAside:
    """Keeps the helpers of a team from taking jobs."""

    def __init__(self, of: Team) -> None:
        self._released = threading.Event()
        blocked = threading.Barrier(of.threads)

        def block() -> None:
            blocked.wait()
            self._released.wait()

        for helper in of._helpers:
            helper.start(block)
        blocked.wait()

    def release(self) -> None:
        self._released.set()


def test_a_helper_that_is_set_aside_holds_nobody_up():
    of_three = Team(3)
    aside = SetAside(of_three)
    jobs = [job(6, 5) for _ in range(4)]
    for sums, times in jobs:
        of_three.run(6, add_up, sums, times)
        check(sums, times)
    aside.release()
    until_idle(of_three)
    for sums, times in jobs:
        check(sums, times)
    sums, times = job(6, 5)
    of_three.run(6, add_up, sums, times)
    check(sums, times)


def until_idle(of: Team) -> None:
    """Their jobs are queued behind those from before."""
    for helper in of._helpers:
        over = threading.Event()
        helper.start(over.set)
        assert over.wait(60)


def test_an_idle_team_keeps_nothing_alive():
    """Else the weights of an engine that was closed would stay."""
    of_two = Team(2)
    sums, times = job(2, 2)
    of_two.run(2, add_up, sums, times)
    kept = weakref.ref(sums)
    del sums
    deadline = time.monotonic() + 60
    while kept() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert kept() is None


def test_helpers_take_part():
    """Else all of the above would be the work of one thread."""
    both = threading.Barrier(2)

    def meet(claims: Any) -> None:
        both.wait(60)

    Team(2).run(1, meet)
