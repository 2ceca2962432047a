"""Load on a server in one of two ways.

A closed loop has so many clients, each of which sends its next request when its last has ended: it
finds out what a server can do. An open loop sends at given times, whatever has become of what was
sent before, as many independent users do: it finds out what they get.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from gateway.bench.client import Client
from gateway.bench.plan import Limit
from gateway.bench.timeline import Timeline
from gateway.bench.workload import Request

PAUSE_S = 0.1
"""Of a client of a closed loop that was turned away: without it, it would do nothing else."""
PROGRESS_S = 0.5


@dataclass
class Run:
    timelines: list[Timeline] = field(default_factory=list)
    """In the order in which they were sent."""
    started_s: float = 0.0
    ended_s: float = 0.0
    interrupted: bool = False
    ended: int = 0
    """Requests that are completed or failed; for the progress."""
    failed: int = 0

    @property
    def duration_s(self) -> float:
        return self.ended_s - self.started_s


class Load:
    """Runs once. `stop`, when it is set, ends it with what has arrived by then."""

    def __init__(
        self,
        client: Client,
        requests: Iterator[Request],
        limit: Limit,
        stop: asyncio.Event,
        progress: Callable[[Run], None],
    ) -> None:
        self.run = Run()
        self._client, self._limit, self._stop = client, limit, stop
        self._requests = islice(requests, limit.requests)
        self._progress = progress

    async def closed(self, concurrency: int) -> Run:
        async with self._measured():
            clients = [self._turns() for _ in range(concurrency)]
            await self._until_stopped(clients, self._limit.duration_s)
        return self.run

    async def open(self, arrivals: Iterator[float]) -> Run:
        async with self._measured():
            await self._until_stopped([self._arrive(arrivals)], None)
        return self.run

    @asynccontextmanager
    async def _measured(self) -> AsyncIterator[None]:
        watching = asyncio.create_task(self._watch())
        self.run.started_s = time.perf_counter()
        try:
            yield
        finally:
            self.run.ended_s = time.perf_counter()
            watching.cancel()

    async def _until_stopped(
        self, work: list[Coroutine[Any, Any, None]], within_s: float | None
    ) -> None:
        """Run all, and cut off what still runs at the end."""
        stopping = asyncio.create_task(self._stop.wait())
        working = asyncio.gather(*work)
        try:
            await asyncio.wait(
                (working, stopping), timeout=within_s, return_when=asyncio.FIRST_COMPLETED
            )
            self.run.interrupted = self._stop.is_set()
            if working.done():
                working.result()
        finally:
            stopping.cancel()
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def _turns(self) -> None:
        """One client of a closed loop."""
        for request in self._requests:
            timeline = await self._send(request, time.perf_counter())
            if timeline.failure and timeline.failure.kind in ("connection", "refused"):
                await asyncio.sleep(PAUSE_S)

    async def _arrive(self, arrivals: Iterator[float]) -> None:
        end_s = self._limit.duration_s
        async with asyncio.TaskGroup() as running:
            # `request` is made before its time has come
            for request, due_s in zip(self._requests, arrivals, strict=False):
                if end_s is not None and due_s > end_s:
                    break
                due = self.run.started_s + due_s
                await asyncio.sleep(due - time.perf_counter())
                running.create_task(self._send(request, due))

    async def _send(self, request: Request, due: float) -> Timeline:
        now = time.perf_counter()
        timeline = Timeline(
            model=request.target.model,
            prompt_tokens=request.prompt_tokens,
            asked_tokens=request.output_tokens,
            sent_s=now,
            late_s=now - due,
        )
        self.run.timelines.append(timeline)
        await self._client.send(request, timeline)
        self.run.ended += 1
        self.run.failed += timeline.failure is not None
        return timeline

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            self._progress(self.run)
