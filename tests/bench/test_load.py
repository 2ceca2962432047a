"""How many requests are sent, and when."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import suppress
from itertools import count, islice

import pytest

from gateway.bench.client import Address, Client
from gateway.bench.load import PAUSE_S, Load, Run
from gateway.bench.plan import Limit
from gateway.bench.redaction import hiding
from gateway.bench.targets import Target
from gateway.bench.workload import requests
from tests.bench.scripted import Call, Scripted, answers, serving, shape, text, until


class Loads:
    """A client of a server, and its loads."""

    def __init__(self, server: Scripted) -> None:
        self.stop = asyncio.Event()
        self.client = Client(Address(server.url, "completions"), "", 30.0, hiding([]))
        self.seen: list[int] = []

    def load(self, *, number: int | None = None, duration_s: float | None = None) -> Load:
        def progress(run: Run) -> None:
            self.seen.append(len(run.timelines))

        asked = requests(shape(), [Target("a"), Target("b")], seed=4)
        return Load(self.client, asked, Limit(number, duration_s), self.stop, progress)


async def answers_slowly(call: Call) -> None:
    await call.begin()
    await call.send(text("a"), after_s=0.05)
    await call.send(text("b"), b"data: [DONE]\n\n", after_s=0.05)
    await call.end()


async def never_ends(call: Call) -> None:
    await call.begin()
    with suppress(ConnectionError):
        while not call.writer.transport.is_closing():
            await call.send(text("a"), after_s=0.02)


async def test_a_closed_loop_has_just_so_many_in_flight_until_all_are_sent():
    running = most = 0

    async def counted(call: Call) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await answers_slowly(call)
        running -= 1

    with serving(counted) as server:
        run = await Loads(server).load(number=17).closed(3)
    assert most == 3
    assert len(server.calls) == len(run.timelines) == run.ended == 17
    assert all(one.completed for one in run.timelines)
    assert run.duration_s > 6 * 0.1


async def test_requests_are_sent_in_the_order_in_which_they_are_drawn():
    with serving(answers) as server:
        run = await Loads(server).load(number=9).closed(1)
    drawn = list(islice(requests(shape(), [Target("a"), Target("b")], 4), 9))
    assert [call.body for call in server.calls] == [json.loads(one.body) for one in drawn]
    assert [one.model for one in run.timelines] == [one.target.model for one in drawn]


async def test_a_closed_loop_with_a_duration_cuts_off_what_runs_then():
    with serving(never_ends) as server:
        run = await Loads(server).load(duration_s=0.8).closed(4)
    assert 0.79 < run.duration_s < 5
    assert len(run.timelines) == 4
    assert all(one.running and one.failure is None and one.text_s for one in run.timelines)
    assert not run.interrupted


async def test_an_open_loop_sends_at_its_times_whatever_became_of_those_before():
    with serving(never_ends) as server:
        loads = Loads(server)
        load = loads.load(number=5)
        times = [0.1, 0.15, 0.3, 0.3, 0.6]
        running = asyncio.create_task(load.open(iter(times)))
        await asyncio.sleep(1.2)
        loads.stop.set()
        run = await running
    late_s = [one.late_s for one in run.timelines]
    assert min(late_s) > -0.002  # the event loop counts in milliseconds
    due_s = [one.sent_s - one.late_s - run.started_s for one in run.timelines]
    assert due_s == pytest.approx(times)
    assert run.interrupted
    assert all(one.running for one in run.timelines)


async def test_an_open_loop_with_a_duration_sends_no_more_and_waits():
    with serving(answers_slowly) as server:
        run = await Loads(server).load(duration_s=0.3).open(at_intervals(0.12))
    assert len(run.timelines) == 2
    assert all(one.completed for one in run.timelines)
    assert run.duration_s > 0.24 + 0.09


async def test_an_open_loop_ends_after_so_many_requests():
    with serving(answers) as server:
        run = await Loads(server).load(number=6).open(at_intervals(0.01))
    assert len(server.calls) == len(run.timelines) == 6


async def test_a_client_that_is_turned_away_waits_a_little():
    async def refuses(call: Call) -> None:
        await call.refuse(503, b"{}")

    with serving(refuses) as server:
        run = await Loads(server).load(duration_s=1.0).closed(2)
    assert 2 <= len(run.timelines) <= 2 * (run.duration_s / PAUSE_S + 1)
    assert run.failed == run.ended


async def test_a_stop_ends_a_closed_loop_with_what_it_has():
    with serving(answers_slowly) as server:
        loads = Loads(server)
        running = asyncio.create_task(loads.load(number=1000).closed(2))
        await until(lambda: len(server.calls) >= 16)
        loads.stop.set()
        run = await running
    assert run.interrupted
    assert 14 <= sum(one.completed for one in run.timelines) < 1000
    assert sum(one.running for one in run.timelines) <= 2
    assert loads.seen, "no progress was shown"


async def test_a_fault_of_the_client_itself_is_not_taken_for_an_end(
    monkeypatch: pytest.MonkeyPatch,
):
    async def broken(*_: object) -> None:
        raise ZeroDivisionError

    with serving(answers) as server:
        loads = Loads(server)
        monkeypatch.setattr(loads.client, "send", broken)
        with pytest.raises(ZeroDivisionError):
            await loads.load(number=3).closed(2)


def at_intervals(interval_s: float) -> Iterator[float]:
    return (interval_s * number for number in count(1))
