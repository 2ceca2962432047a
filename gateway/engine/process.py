"""The engine as a child process, reached over ZeroMQ: the embedded default. Needs no torch here.

The child is watched: when it dies, what was in flight ends with `engine_lost`, and a new child
is started. The socket lies in a folder that only this user can enter.
"""

import asyncio
import contextlib
import logging
import shutil
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from gateway.engine.client import EngineClient
from gateway.engine.messages import Command, EngineSettings, Events, Shutdown

log = logging.getLogger(__name__)

RESTART_PAUSE_S = 0.5
RESTART_PAUSE_S_MAX = 30.0
STABLE_S = 60.0
"""A child that lived this long starts the pauses anew."""
STOP_S = 5.0


class ProcessEngine(EngineClient):
    def __init__(self, settings: EngineSettings) -> None:
        super().__init__()
        self._settings = settings
        self._context = zmq.asyncio.Context()
        self._folder = Path(tempfile.mkdtemp(prefix="loragate-"))
        self._socket: zmq.asyncio.Socket | None = None
        self._child: Process | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Events)
        self.starts = 0
        """Children started so far."""

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child else None

    async def start(self) -> None:
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")

    async def send(self, command: Command) -> None:
        self.require()
        assert self._socket is not None
        await self._socket.send(self._encoder.encode(command))

    async def close(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _supervise(self) -> None:
        pause = RESTART_PAUSE_S
        while True:
            started = time.monotonic()
            await self._run_child()
            if self._mailbox.start_error is not None:
                log.error("the engine cannot start: %s", self._mailbox.start_error)
                return
            if time.monotonic() - started > STABLE_S:
                pause = RESTART_PAUSE_S
            await asyncio.sleep(pause)
            pause = min(2 * pause, RESTART_PAUSE_S_MAX)

    async def _run_child(self) -> None:
        """One child, from its start to its end."""
        self.starts += 1
        endpoint = f"ipc://{self._folder}/engine-{self.starts}"
        with self._context.socket(zmq.PAIR) as socket:
            socket.set_hwm(0)
            socket.bind(endpoint)
            self._socket = socket
            child = self._child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "gateway.engine.worker", endpoint, stdin=PIPE, stdout=DEVNULL
            )
            reader = asyncio.create_task(self._read(socket), name="engine-reader")
            try:
                assert child.stdin is not None
                child.stdin.write(msgspec.json.encode(self._settings) + b"\n")
                await child.wait()
                await self._read_rest(reader)
            finally:
                reader.cancel()
                await asyncio.wait([reader])
                await self._stop(child, socket)
                self._mailbox.lose(f"the engine process ended (exit status {child.returncode})")
        log.warning("engine process %d ended with status %s", child.pid, child.returncode)

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            self._mailbox.deliver(self._decoder.decode(await socket.recv()).events)

    async def _read_rest(self, reader: asyncio.Task[None]) -> None:
        """What the child said before it ended may still be on its way."""
        await asyncio.wait([reader], timeout=0.1)

    async def _stop(self, child: Process, socket: zmq.asyncio.Socket) -> None:
        """End a child that still runs: ask, then kill."""
        if child.returncode is not None:
            return
        with contextlib.suppress(zmq.ZMQError):
            await socket.send(self._encoder.encode(Shutdown()), zmq.NOBLOCK)
        try:
            await asyncio.wait_for(child.wait(), STOP_S)
        except TimeoutError:
            child.kill()
            await child.wait()
