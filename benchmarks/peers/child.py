"""A server as a child process: started, waited for, stopped, each within a time limit."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

STOP_S = 30.0
KILL_S = 5.0
LOG_LINES = 3


class Failed(Exception):
    """A server did not start, answer or stop; the message is for the table."""


class Child:
    def __init__(self, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.process = process
        self._log = log

    @property
    def pids(self) -> list[int]:
        """Its processes: those of the session that it leads."""
        return [pid for pid, session in _sessions() if session == self.process.pid]

    def wait_for(self, ready: Callable[[], bool], limit_s: float) -> None:
        """Raises Failed if it ends before, or takes longer."""
        begun = time.monotonic()
        while not ready():
            if self.process.poll() is not None:
                raise Failed(f"stopped while starting: {self.log_end()}")
            if time.monotonic() - begun > limit_s:
                raise Failed(f"not ready after {limit_s:.0f} s: {self.log_end()}")
            time.sleep(0.2)

    def log_end(self) -> str:
        lines = self._log.read_text(errors="replace").split("\n")
        return " | ".join([line.strip() for line in lines if line.strip()][-LOG_LINES:])


@contextmanager
def child(
    command: list[str],
    environ: Mapping[str, str],
    log: Path,
    stdout: int | None = None,
) -> Iterator[Child]:
    """It leads a session of its own, of which nothing is left in the end. Its output goes to `log`
    (stdout only if not named); its stdin is a pipe from us, which ends when we do.

    Raises Failed if it can't be run, or if something of it outlives even SIGKILL.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        try:
            process = subprocess.Popen(
                command,
                env=dict(environ),
                stdin=subprocess.PIPE,
                stdout=out if stdout is None else stdout,
                stderr=out if stdout is not None else subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise Failed(f"cannot be run: {error.strerror}: {command[0]}") from None
    started = Child(process, log)
    try:
        yield started
    finally:
        _stop(started)


def local_url(port: int) -> str:
    """Where a server is to listen. Raises Failed if another one does: it would be measured."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise Failed(f"port {port} is in use: stop the program that uses it, or name another")
    return f"http://127.0.0.1:{port}"


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5.0, trust_env=False).is_success
    except httpx.TransportError:
        return False


def _stop(running: Child) -> None:
    process = running.process
    try:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
    finally:  # after Ctrl-C, too
        begun = time.monotonic()
        while left := running.pids:
            if time.monotonic() - begun > KILL_S:
                raise Failed(f"processes {left} are left of it")
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


def _sessions() -> Iterator[tuple[int, int]]:
    """(process, session) of all that run."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    yield int(entry.name), int(fields[3])
