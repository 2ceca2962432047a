"""Strangers' files are parsed in a child process with little memory and time.

The child is kept for the next check; it ends when its standard input does, so also with a gateway
that is killed. Both speak JSON: what comes back from it is data, whatever became of it.
"""

import asyncio
import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from gateway.adapters.draft import check_draft
from gateway.adapters.peft_format import Manifest
from gateway.engine.messages import ModelInfo
from gateway.errors import ApiError, InvalidAdapter, TooLarge

CHILDREN_MAX = 2
"""Checks at once."""
MEMORY_BYTES = 512 * 2**20
"""Beyond what an idle child has. A check reads 1 MiB at a time; the most that it keeps is a header
of 4 MiB as Python objects, and two columns of an embedding."""
CPU_S = 300
"""The largest adapter takes seconds; twenty times that on a slow machine."""

TOO_MUCH = "The adapter takes more {} to check than any that is sound."


class Task(Struct, frozen=True):
    draft: str
    info: ModelInfo
    bytes_max: int
    weights_sha256: str | None


class Reply(Struct, frozen=True):
    manifest: Manifest | None = None
    refused: Literal["", "invalid", "too large", "memory", "storage"] = ""
    message: str = ""
    param: str | None = None
    errno: int = 0


class Sandbox:
    """Checks drafts, CHILDREN_MAX at once."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(CHILDREN_MAX)
        self._idle: list[_Child] = []

    async def check(
        self, draft: Path, info: ModelInfo, bytes_max: int, weights_sha256: str | None
    ) -> Manifest:
        """As `check_draft`, and raises what it raises. Cancelling it ends the child."""
        task = Task(str(draft), info, bytes_max, weights_sha256)
        async with self._turns:
            child = self._idle_child()
            if child is None:
                child = await asyncio.to_thread(_Child)
            answered = False
            try:
                reply = await asyncio.to_thread(child.ask, task)
                answered = True
            finally:
                if answered:
                    self._idle.append(child)
                else:
                    child.kill()
        return _result(reply)

    def _idle_child(self) -> "_Child | None":
        while self._idle:
            child = self._idle.pop()
            if child.lives():
                return child
            child.kill()
        return None

    def close(self) -> None:
        while self._idle:
            self._idle.pop().kill()


class _Child:
    """All methods block but `kill`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gateway.adapters.sandbox"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    def ask(self, task: Task) -> Reply:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        line = b""
        with suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode(task) + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        if line.endswith(b"\n"):
            return msgspec.json.decode(line, type=Reply)
        code = process.wait()
        if code == -signal.SIGXCPU:
            raise InvalidAdapter(TOO_MUCH.format("time"), param="weights")
        if code == -signal.SIGKILL:  # by the system, which has no memory left
            raise InvalidAdapter(TOO_MUCH.format("memory"), param="weights")
        raise RuntimeError(f"the check ended with {code}; its traceback is in the log")

    def lives(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        self._process.wait()


def _result(reply: Reply) -> Manifest:
    match reply.refused:
        case "invalid":
            raise InvalidAdapter(reply.message, param=reply.param)
        case "too large":
            raise TooLarge(reply.message, param=reply.param)
        case "memory":
            raise InvalidAdapter(TOO_MUCH.format("memory"), param="weights")
        case "storage":
            raise OSError(reply.errno, reply.message)
    assert reply.manifest is not None, "a check ends with a manifest or a refusal"
    return reply.manifest


def _answer(task: Task) -> Reply:
    try:
        return Reply(check_draft(Path(task.draft), task.info, task.bytes_max, task.weights_sha256))
    except InvalidAdapter as error:
        return Reply(refused="invalid", message=_text(error), param=error.param)
    except TooLarge as error:
        return Reply(refused="too large", message=_text(error), param=error.param)
    except MemoryError:
        return Reply(refused="memory")
    except OSError as error:
        return Reply(refused="storage", message=error.strerror or "", errno=error.errno or 0)


def _text(error: ApiError) -> str:
    """JSON can write half of a surrogate pair, which a message may quote; UTF-8 cannot."""
    return error.message.encode(errors="backslashreplace").decode()


def _limit_memory() -> None:
    """Counts what is allocated and not what is mapped of a file, as RLIMIT_AS would."""
    status = Path("/proc/self/status").read_text()
    data_kib = next(line.split()[1] for line in status.splitlines() if line.startswith("VmData"))
    most = int(data_kib) * 1024 + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _limit_time() -> None:
    """Of the task that begins."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime) + 1 + CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _limit_memory()
    for line in sys.stdin.buffer:
        _limit_time()
        reply = _answer(msgspec.json.decode(line, type=Task))
        sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
