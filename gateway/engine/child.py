"""A worker as a child of this process."""

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress

import msgspec

from gateway.engine.messages import EngineSettings


class Child:
    """Started without an event loop, so that it can load while its parent does."""

    def __init__(self, worker: str, endpoint: str, settings: EngineSettings) -> None:
        self._process = subprocess.Popen(
            # -P: a folder named gateway in the working directory is not our package
            [sys.executable, "-P", "-m", worker, endpoint],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
        )
        assert self._process.stdin is not None
        self.stdin = self._process.stdin
        """Open as long as its parent lives."""
        with suppress(BrokenPipeError):  # it has ended already
            self.stdin.write(msgspec.json.encode(settings) + b"\n")
            self.stdin.flush()
        self._ended: Future[int] = Future()
        self._ended.set_running_or_notify_cancel()  # who stops waiting changes nothing
        threading.Thread(target=self._watch, name="engine-child", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        """Its exit status, once it has ended."""
        return await asyncio.wrap_future(self._ended)

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """This end of its stdin; whoever still runs then ends soon."""
        with suppress(BrokenPipeError):
            self.stdin.close()

    def _watch(self) -> None:
        self._ended.set_result(self._process.wait())
