"""The engine as a child process, reached over ZeroMQ: the embedded default. Needs no torch here.

The child is watched: when it dies, what was in flight ends with `engine_lost`, and a new child
is started. The socket lies in a folder that only this user can enter.
"""

import asyncio
import contextlib
import logging
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zmq

from gateway.engine.border import GatewayEnd
from gateway.engine.child import Child
from gateway.engine.client import EngineClient, EngineFailure
from gateway.engine.messages import Command, EngineSettings, Shutdown, StartFailed

log = logging.getLogger(__name__)

RESTART_PAUSE_S = 0.5
RESTART_PAUSE_S_MAX = 30.0
STABLE_S = 60.0
"""A child that lived this long starts the pauses anew."""
STOP_S = 5.0
EARLY_DEATHS_MAX = 3
"""A child that dies while it loads is tried again so often: more would not help."""
SILENCE_S_MAX = 120.0
"""Far longer than any iteration: who says nothing for so long hangs."""


class ProcessEngine(EngineClient):
    """`worker`: the module that the child runs."""

    def __init__(
        self,
        settings: EngineSettings,
        silence_s_max: float = SILENCE_S_MAX,
        worker: str = "gateway.engine.worker",
    ) -> None:
        super().__init__()
        self._settings = settings
        self._silence_s_max = silence_s_max
        self._worker = worker
        self._context = zmq.Context()
        self._folder: Path | None = None
        self._border: GatewayEnd | None = None
        self._child: Child | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self.starts = 0
        """Children started so far."""

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child else None

    @contextlib.contextmanager
    def ahead(self) -> Iterator[None]:
        """The first child loads while the gateway itself is loaded, built and started. On the way
        out nothing is left of it, however far that came."""
        self._spawn()
        try:
            yield
        finally:
            if self._supervisor is None and self._child is not None:
                self._child.kill()
                self._context.destroy()
                self._remove_folder()

    async def start(self) -> None:
        if self._child is None:
            self._spawn()
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")

    async def send(self, command: Command) -> None:
        """Never waits."""
        self.require()
        assert self._border is not None
        try:
            self._border.send(command)
        except zmq.ZMQError as error:
            raise EngineFailure("engine_lost", "the engine process is not there") from error

    async def close(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
        self._context.destroy(linger=0)
        self._remove_folder()

    def _spawn(self) -> Child:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="loragate-"))
        self.starts += 1
        self._child = Child(self._worker, self._endpoint, self._settings)
        return self._child

    @property
    def _endpoint(self) -> str:
        """Of the last child that was started."""
        return f"ipc://{self._folder}/engine-{self.starts}"

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _supervise(self) -> None:
        pause, early_deaths = RESTART_PAUSE_S, 0
        child = self._child
        while True:
            started = time.monotonic()
            was_ready = await self._run(child or self._spawn())
            child = None
            early_deaths = 0 if was_ready else early_deaths + 1
            if early_deaths == EARLY_DEATHS_MAX:
                self._mailbox.deliver([StartFailed(f"it ended {early_deaths} times while loading")])
            if self._mailbox.start_error is not None:
                log.error("the engine cannot start: %s", self._mailbox.start_error)
                return
            if time.monotonic() - started > STABLE_S:
                pause = RESTART_PAUSE_S
            await asyncio.sleep(pause)
            pause = min(2 * pause, RESTART_PAUSE_S_MAX)

    async def _run(self, child: Child) -> bool:
        """One child, from its start to its end. Whether it was ever ready."""
        with (
            contextlib.closing(child),
            contextlib.closing(
                GatewayEnd(self._context, self._endpoint, self._mailbox.deliver)
            ) as border,
        ):
            self._border = border
            ended = asyncio.create_task(child.wait(), name="engine-child")
            watch = asyncio.create_task(self._watch(), name="engine-watch")
            ends: list[asyncio.Future[Any]] = [ended, watch, border.broken]
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                was_ready = self._mailbox.info is not None
                self._mailbox.info = None  # from here on nobody submits
                if ended.done():  # what it said before may still be on its way
                    await asyncio.wait([border.broken], timeout=0.1)
            finally:
                watch.cancel()
                await asyncio.wait([watch])
                await self._stop(child, border)
                self._mailbox.lose(f"the engine process ended (exit status {child.returncode})")
        log.warning("engine process %d ended with status %s", child.pid, child.returncode)
        for gave_up in (watch, border.broken):
            if not gave_up.cancelled() and (error := gave_up.exception()):
                log.error("the engine process was given up", exc_info=error)
        return was_ready

    async def _watch(self) -> None:
        """Raises TimeoutError once a child that was ready has not answered for too long: it hangs,
        and only a new one helps."""
        await self.wait_ready()
        while True:
            await asyncio.sleep(self._silence_s_max / 4)
            async with asyncio.timeout(self._silence_s_max):
                await self.stats()

    async def _stop(self, child: Child, border: GatewayEnd) -> None:
        """End a child that still runs: ask, then kill."""
        if child.returncode is not None:
            return
        with contextlib.suppress(zmq.ZMQError):
            border.send(Shutdown())
        try:
            await asyncio.wait_for(child.wait(), STOP_S)
        except TimeoutError:
            child.kill()
            await child.wait()
