"""The demo's server as a child: what ends it, and which package it is."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from gateway.demo.server import ServerProcess, free_port

HOST = "127.0.0.1"
ROOT = Path(__file__).resolve().parent.parent.parent
WAIT_S = 30.0


def until_written(file: Path, text: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while text not in file.read_text():
        assert time.monotonic() < deadline, file.read_text()
        time.sleep(0.02)


def test_a_second_interrupt_kills_a_server_that_does_not_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubborn = tmp_path / "python"
    stubborn.write_text("#!/bin/sh\ntrap 'echo asked' TERM\necho $$\nwhile :; do sleep 0.1; done\n")
    stubborn.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(stubborn))
    log = tmp_path / "log"

    def interrupt() -> None:
        until_written(log, "asked")
        os.kill(os.getpid(), signal.SIGINT)

    second = threading.Thread(target=interrupt)
    server = ServerProcess(HOST, free_port(HOST), os.environ, log)
    until_written(log, "\n")
    second.start()
    with pytest.raises(KeyboardInterrupt):
        server.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)  # the first
    second.join()
    assert not Path("/proc", log.read_text().split()[0]).exists()


def test_a_folder_named_gateway_is_not_taken_for_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gateway").mkdir()
    (tmp_path / "gateway" / "__main__.py").write_text("print('the wrong one')")
    monkeypatch.chdir(tmp_path)
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "LORAGATE_MODEL": "/no/model"}
    log = tmp_path / "log"
    with ServerProcess(HOST, free_port(HOST), environ, log) as server:
        assert server.wait() == 1
    assert "there is no /no/model" in log.read_text()
