"""`loragate serve` as a child process: started, waited for, stopped."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from gateway.demo.progress import Status, StepFailed

READY_S_MAX = 600.0
STOP_S_MAX = 40.0
"""Longer than the server's own drain time, after which it ends by itself."""
LOG_LINES_SHOWN = 15


class ServerProcess:
    """A running gateway, no part of which outlives us.

    It leads its own process group, which is killed whole. Its stdin is a pipe from us: however we
    end, that ends too, and the server with it.
    """

    def __init__(
        self,
        host: str,
        port: int,
        environ: Mapping[str, str],
        log: Path,
        config: Path | None = None,
    ) -> None:
        check_port_free(host, port)
        self.base_url = f"http://{host}:{port}"
        self._log = log
        options = [] if config is None else ["--config", str(config)]
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                # -P: a folder `gateway` in the working folder is not the package
                [sys.executable, "-P", "-m", "gateway", *options, "serve", "--until-stdin-ends"],
                env={**environ, "LORAGATE_SERVER__HOST": host, "LORAGATE_SERVER__PORT": str(port)},
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def wait_ready(self) -> None:
        """Wait until the model is loaded. Raises StepFailed with the reason if it never will be."""
        with Status("Starting the server and loading the model") as status:
            while (stage := self._stage()) != "ready":
                if self._process.poll() is not None:
                    raise StepFailed(f"The server stopped while starting.\n{self.log_tail()}")
                if status.seconds > READY_S_MAX:
                    raise StepFailed(
                        f"The server was not ready after {READY_S_MAX:.0f} s.\n{self.log_tail()}"
                    )
                status.show(stage)
                time.sleep(0.2)

    def wait(self) -> int:
        """Wait until the server ends by itself; its exit code."""
        return self._process.wait()

    def log_tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
        return "\n".join([f"The end of {self._log}:", *lines])

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._process.poll() is None:
                self._process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(STOP_S_MAX)
        finally:  # after a second Ctrl-C, too
            with suppress(ProcessLookupError):  # the whole group has ended: the usual case
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            assert self._process.stdin is not None
            self._process.stdin.close()

    def _stage(self) -> str:
        try:
            answer = httpx.get(f"{self.base_url}/health/ready", timeout=5.0, trust_env=False)
        except httpx.TransportError:
            return "starting"
        return "ready" if answer.is_success else "loading the model"


def check_port_free(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StepFailed(
                f"Port {port} on {host} cannot be used: {error.strerror}. Stop the program that "
                f"uses it (perhaps another `make demo`), or choose another: make demo PORT=8081."
            ) from None


def free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
    return port
