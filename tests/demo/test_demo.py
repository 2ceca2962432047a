"""The demo as a user starts it: real server, real engine, real model."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from gateway.demo.server import free_port
from gateway.settings import PREFIX, SHORT_NAMES

READY_S_MAX = 180.0
READY = "stop with Ctrl-C"


def environment(data_dir: Path, **more: str) -> dict[str, str]:
    """Nothing of what is configured on the machine that runs the tests."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(PREFIX) and name not in SHORT_NAMES
    }
    return kept | {"LORAGATE_DATA_DIR": str(data_dir), "PYTHONUNBUFFERED": "1"} | more


def demo(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "gateway", "demo", *arguments]


def test_the_check_passes_and_leaves_nothing(base_model: Path, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    environ = environment(
        tmp_path / "data",
        LORAGATE_MODEL=str(base_model),
        TMPDIR=str(temporary),
        # a database that is not there: the check must not touch what is configured
        DATABASE_URL="postgresql://nobody@127.0.0.1:1/nothing",
    )
    run = subprocess.run(demo("--check"), env=environ, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "FAILED" not in run.stdout
    assert len(re.findall(r"^OK      ", run.stdout, re.MULTILINE)) == 8
    assert list(temporary.iterdir()) == []
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"LORAGATE_MODEL": "/nowhere/model.gguf"}, "there is no /nowhere/model.gguf"),
        ({"LORAGATE_ENGINE__POOL_MIB": "0.001"}, "pool_mib"),
        ({"LORAGATE_ENGINE__DEVICE": "tpu"}, r"engine\.device"),
    ],
)
def test_a_server_that_cannot_start_gives_the_reason(
    base_model: Path, tmp_path: Path, variables: dict[str, str], reason: str
) -> None:
    environ = environment(tmp_path, LORAGATE_MODEL=str(base_model)) | variables
    run = subprocess.run(demo("--check"), env=environ, capture_output=True, text=True)
    assert run.returncode == 1
    assert re.search(reason, run.stderr)
    assert "Traceback" not in run.stderr


def test_a_port_in_use_is_named(base_model: Path, tmp_path: Path) -> None:
    environ = environment(tmp_path, LORAGATE_MODEL=str(base_model))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        run = subprocess.run(demo("--port", port), env=environ, capture_output=True, text=True)
    assert run.returncode == 1
    assert f"Port {port}" in run.stderr


@contextmanager
def running(environ: dict[str, str], out: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A demo that is ready, and what it printed."""
    port = str(free_port("127.0.0.1"))
    with out.open("wb") as file:
        process = subprocess.Popen(demo("--port", port), env=environ, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + READY_S_MAX
        while READY not in (printed := out.read_text()):
            assert process.poll() is None, printed
            assert time.monotonic() < deadline, printed
            time.sleep(0.1)
        yield process, printed
    finally:
        process.terminate()
        process.wait(60)


def test_a_second_start_finds_everything_and_a_stop_signal_ends_all_of_it(
    base_model: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    environ = environment(data, LORAGATE_MODEL=str(base_model))
    with running(environ, tmp_path / "first") as (process, printed):
        assert printed.count("Uploaded adapter") == 3
        servers = children(process.pid)
        engines = [child for server in servers for child in children(server)]
        assert servers
        assert engines
    assert process.returncode == 0
    assert not any(is_running(pid) for pid in servers + engines)
    keys = json.loads((data / "demo-keys.json").read_text())
    files = sorted((data / "adapters").rglob("*"))

    with running(environ, tmp_path / "second") as (process, printed):
        assert "Uploaded" not in printed
        assert "Made tenant" not in printed
    assert json.loads((data / "demo-keys.json").read_text()) == keys
    assert sorted((data / "adapters").rglob("*")) == files


def test_a_stop_while_starting_leaves_no_process(base_model: Path, tmp_path: Path) -> None:
    environ = environment(tmp_path / "data", LORAGATE_MODEL=str(base_model))
    command = demo("--port", str(free_port("127.0.0.1")))
    process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL)
    while not (servers := children(process.pid)):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert not any(is_running(pid) for pid in servers)


def test_a_killed_demo_takes_its_server_along(base_model: Path, tmp_path: Path) -> None:
    environ = environment(tmp_path / "data", LORAGATE_MODEL=str(base_model))
    with running(environ, tmp_path / "out") as (process, _):
        servers = children(process.pid)
        below = [child for server in servers for child in children(server)]
        process.kill()
        deadline = time.monotonic() + 30
        while any(is_running(pid) for pid in servers + below):
            assert time.monotonic() < deadline
            time.sleep(0.1)


def children(pid: int) -> list[int]:
    return [child for child, (_, parent) in processes().items() if parent == pid]


def is_running(pid: int) -> bool:
    return processes().get(pid, ("Z", 0))[0] != "Z"


def processes() -> dict[int, tuple[str, int]]:
    """Process id → state and parent's id; Z is one that has ended."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # it has ended meanwhile
                state, parent, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
                found[int(folder.name)] = (state, int(parent))
    return found
