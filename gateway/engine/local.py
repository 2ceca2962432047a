"""An engine on a thread of this process, for tests and tools. Imports torch."""

import asyncio
import contextlib
import queue
import threading

from gateway.engine.client import EngineClient
from gateway.engine.engine import Engine
from gateway.engine.loop import serve
from gateway.engine.messages import (
    Command,
    EngineSettings,
    Events,
    Ready,
    Shutdown,
    StartFailed,
)
from gateway.engine.model.errors import ModelError


class LocalEngine(EngineClient):
    def __init__(self, settings: EngineSettings) -> None:
        super().__init__()
        self._settings = settings
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def send(self, command: Command) -> None:
        self._inbox.put(command)

    async def close(self) -> None:
        if self._thread.is_alive():
            self._inbox.put(Shutdown())
            await asyncio.to_thread(self._thread.join)
            await asyncio.sleep(0)  # what it said last is delivered before
            self._mailbox.lose("the engine was closed")

    def _run(self) -> None:
        try:
            engine = Engine(self._settings, wake=lambda: self._inbox.put(None))
        except ModelError as error:
            self._deliver(Events([StartFailed(str(error))]))
            return
        self._deliver(Events([Ready(engine.info)]))
        try:
            serve(engine, self._receive, self._deliver)
        finally:
            engine.close()

    def _receive(self, wait_s: float) -> list[Command]:
        commands: list[Command | None] = []
        with contextlib.suppress(queue.Empty):
            if wait_s:
                commands.append(self._inbox.get(timeout=wait_s))
            while True:
                commands.append(self._inbox.get_nowait())
        return [command for command in commands if command is not None]

    def _deliver(self, events: Events) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._mailbox.deliver, events.events)
