"""The real gateway as a child process, behind a socket, with a worker that is not the engine."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx

from gateway import settings
from tests.serving import issue_key

ROOT = Path(__file__).resolve().parent.parent
BASE = "smollm2-135m-instruct"
START_S = 60.0


class Gateway(NamedTuple):
    pid: int
    port: int
    key: str

    def cpu_s(self) -> float:
        return cpu_s(self.pid)


def cpu_s(pid: int) -> float:
    """CPU time of all threads that a process has or had (clock_getcpuclockid(3))."""
    return time.clock_gettime(~pid << 3 | 2)


@contextmanager
def running(
    model: Path, folder: Path, worker: str, environ: Mapping[str, str] | None = None
) -> Iterator[Gateway]:
    """`model`: a GGUF file with a tokenizer. `worker`: the module that plays the engine."""
    chosen = {
        "LORAGATE_DATA_DIR": str(folder),
        "LORAGATE_MODEL": str(model.absolute()),
        "LORAGATE_ENGINE__NAME": BASE,
    } | dict(environ or {})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        command = [sys.executable, "-m", "benchmarks.scripted_gateway"]
        process = subprocess.Popen(
            [*command, str(listener.fileno()), worker],
            env=os.environ | {"PYTHONPATH": str(ROOT)} | chosen,
            stderr=(folder / "log").open("wb"),
            pass_fds=[listener.fileno()],
        )
        try:
            _wait_ready(process, port)
            key = asyncio.run(issue_key(settings.load(environ=chosen))).text.reveal()
            yield Gateway(process.pid, port, key)
        except BaseException:
            print((folder / "log").read_text()[-2000:], file=sys.stderr)
            raise
        finally:
            process.terminate()
            process.wait()


def _wait_ready(process: "subprocess.Popen[bytes]", port: int) -> None:
    for _ in range(int(START_S / 0.1)):
        assert process.poll() is None, "the gateway did not start"
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health/ready").is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError("the gateway was not ready in time")
