"""One measurement from its plan to its figures: warm up, load, watch."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

from gateway.bench.client import Address, Client
from gateway.bench.load import Load, Run
from gateway.bench.measure import Figures, figures
from gateway.bench.plan import Limit, Plan
from gateway.bench.processes import ProcessWatch, Usage
from gateway.bench.targets import Target
from gateway.bench.workload import WARM_UP, arrivals, requests

WARM_UP_CLIENTS_MAX = 4


class WarmUpFailed(Exception):
    """Not one request was answered; the message says how the first failed."""


@dataclass(frozen=True)
class Result:
    started_at: datetime
    run: Run
    figures: Figures
    usage: Usage


async def measure(
    plan: Plan,
    targets: list[Target],
    api_key: str,
    redact: Callable[[str], str],
    progress: Callable[[str], None],
) -> Result | None:
    """None: interrupted before there was anything to measure. A first Ctrl-C ends the measurement
    and keeps what it has; a second one ends the program.

    Raises AddressError, ProcessesError and WarmUpFailed.
    """
    client = Client(Address(plan.url, plan.shape.endpoint), api_key, plan.timeout_s, redact)
    watch = ProcessWatch(plan.pids)
    try:
        with _interrupts_set() as stop:
            if await _warm_up(client, plan, targets, stop, progress):
                return None
            drawn = requests(plan.shape, targets, plan.seed)
            load = Load(client, drawn, plan.limit, stop, lambda run: progress(_counts(run)))
            started_at = datetime.now(UTC)
            async with watch:
                if plan.concurrency is None:
                    assert plan.rate is not None
                    run = await load.open(arrivals(plan.rate, plan.cv, plan.seed))
                else:
                    run = await load.closed(plan.concurrency)
                usage = watch.usage()
    finally:
        client.close()
    return Result(started_at, run, figures(run, plan.slo_ttft_s, plan.slo_inter_token_s), usage)


async def _warm_up(
    client: Client,
    plan: Plan,
    targets: list[Target],
    stop: asyncio.Event,
    progress: Callable[[str], None],
) -> bool:
    """Whether it was interrupted."""
    if not plan.warmup:
        return False
    drawn = requests(plan.shape, targets, plan.seed, WARM_UP)
    limit = Limit(plan.warmup, None)
    load = Load(client, drawn, limit, stop, lambda run: progress(f"warming up: {_counts(run)}"))
    run = await load.closed(min(plan.concurrency or 1, plan.warmup, WARM_UP_CLIENTS_MAX))
    failures = [one.failure for one in run.timelines if one.failure is not None]
    if len(failures) == len(run.timelines) and not run.interrupted:
        raise WarmUpFailed(f"{failures[0].kind}: {failures[0].detail}")
    return run.interrupted


def _counts(run: Run) -> str:
    sent = len(run.timelines)
    return f"{sent} sent, {sent - run.ended} running, {run.failed} failed"


@contextmanager
def _interrupts_set() -> Iterator[asyncio.Event]:
    """An event that the first Ctrl-C sets. The second is Python's usual one."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()

    def interrupt() -> None:
        event.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        yield event
    finally:
        loop.remove_signal_handler(signal.SIGINT)
