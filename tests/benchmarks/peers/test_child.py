"""Real processes: nothing is waited for without a limit, and nothing is left."""

import os
import socket
import sys
import time
from pathlib import Path

import pytest

from benchmarks.peers import child as module
from benchmarks.peers.child import Failed, child, local_url

STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "again" not in sys.argv:
    subprocess.Popen([sys.executable, __file__, "again"])
    time.sleep(0.2)
    print("started", flush=True)
time.sleep(600)
"""


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_processes_that_do_not_stop_are_ended_with_their_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "STOP_S", 0.2)
    script, log = tmp_path / "stubborn.py", tmp_path / "log"
    script.write_text(STUBBORN)
    with child([sys.executable, str(script)], os.environ, log) as running:
        running.wait_for(lambda: "started" in log.read_text(), 20.0)
        pids = running.pids
        assert len(pids) == 2
        assert all(map(lives, pids))
    assert not any(map(lives, pids))


def test_a_server_that_ends_while_starting_says_why(tmp_path: Path):
    command = [sys.executable, "-c", "import sys; print('one'); sys.exit('no such library')"]
    with child(command, os.environ, tmp_path / "log") as running:
        begun = time.monotonic()
        with pytest.raises(Failed, match=r"stopped while starting: one \| no such library"):
            running.wait_for(lambda: False, 60.0)
    assert time.monotonic() - begun < 30.0


def test_a_server_that_never_gets_ready_is_given_up(tmp_path: Path):
    command = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with child(command, os.environ, tmp_path / "log") as running:
        with pytest.raises(Failed, match="not ready after 0 s"):
            running.wait_for(lambda: False, 0.3)
        (pid,) = running.pids
    assert not lives(pid)


def test_a_program_that_is_not_there_is_a_failure_and_no_crash(tmp_path: Path):
    command = [str(tmp_path / "bin" / "vllm")]
    with (
        pytest.raises(Failed, match="cannot be run: No such file"),
        child(command, os.environ, tmp_path / "log"),
    ):
        raise AssertionError("it runs")


def test_a_server_that_is_not_ours_is_never_measured():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(Failed, match=f"port {port} is in use"):
            local_url(port)
    assert local_url(port) == f"http://127.0.0.1:{port}"
