"""The steps of an engine while something is measured: what each computed, and how long it took."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

from benchmarks.floor import Load, planned
from gateway.engine.engine import Engine
from gateway.engine.messages import Event
from gateway.engine.scheduling.plan import Plan


class Step(NamedTuple):
    load: Load
    seconds: float


@contextmanager
def watched(engine: Engine) -> Iterator[list[Step]]:
    """A list that gets every step in which the engine computes."""
    steps: list[Step] = []
    loads: list[Load] = []
    plan, step = engine.scheduler.plan, engine.step

    def plan_noted() -> Plan:
        made = plan()
        if made.slices:
            loads.append(planned(made.slices))
        return made

    def step_timed() -> list[Event]:
        started = time.perf_counter()
        events = step()
        seconds = time.perf_counter() - started
        if loads:
            steps.append(Step(loads.pop(), seconds))
        return events

    with (
        patch.object(engine.scheduler, "plan", plan_noted),
        patch.object(engine, "step", step_timed),
    ):
        yield steps
