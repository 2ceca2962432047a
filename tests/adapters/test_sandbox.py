"""The child in which uploads are checked: what ends it, and that it stays otherwise."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.adapters.draft import check_draft
from gateway.adapters.sandbox import Sandbox
from gateway.errors import InvalidAdapter, TooLarge
from tests.adapters.making import INFO, write_folder
from tests.adapters.packing import CONFIG, WEIGHTS, tarred

BYTES_MAX = 2**20


@pytest.fixture
async def box() -> AsyncIterator[Sandbox]:
    made = Sandbox()
    yield made
    made.close()


def child_of(box: Sandbox) -> subprocess.Popen[bytes]:
    return box._idle[0]._process


async def test_it_finds_what_the_check_itself_finds(box: Sandbox, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a")
    found = await box.check(folder, INFO, BYTES_MAX, None)
    assert found == check_draft(folder, INFO, BYTES_MAX)
    first = child_of(box).pid
    await box.check(folder, INFO, BYTES_MAX, None)
    assert child_of(box).pid == first != os.getpid()


async def test_refusals_come_through_and_leave_the_child_alive(
    box: Sandbox, tmp_path: Path
) -> None:
    with pytest.raises(InvalidAdapter, match="is empty") as error:
        await box.check(write_folder(tmp_path / "a", file=b""), INFO, BYTES_MAX, None)
    assert error.value.param == "weights"
    first = child_of(box).pid
    (tmp_path / "b").mkdir()
    archive = tarred({CONFIG: b"{}", WEIGHTS: bytes(BYTES_MAX + 1)})
    (tmp_path / "b" / "archive").write_bytes(archive)
    with pytest.raises(TooLarge):
        await box.check(tmp_path / "b", INFO, BYTES_MAX, None)
    (tmp_path / "c" / CONFIG).mkdir(parents=True)
    (tmp_path / "c" / "archive").write_bytes(archive)
    with pytest.raises(OSError, match="File exists"):
        await box.check(tmp_path / "c", INFO, BYTES_MAX, None)
    assert child_of(box).pid == first


async def test_a_dead_child_is_replaced(box: Sandbox, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a")
    await box.check(folder, INFO, BYTES_MAX, None)
    first = child_of(box)
    first.kill()
    first.wait()
    await box.check(folder, INFO, BYTES_MAX, None)
    assert child_of(box).pid != first.pid


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGXCPU, "time"), (signal.SIGKILL, "memory")]
)
async def test_a_child_that_took_too_much_refuses_the_adapter(
    box: Sandbox, tmp_path: Path, number: signal.Signals, words: str
) -> None:
    folder = write_folder(tmp_path / "a")
    await box.check(folder, INFO, BYTES_MAX, None)
    child = child_of(box)
    child.send_signal(signal.SIGSTOP)
    checking = asyncio.create_task(box.check(folder, INFO, BYTES_MAX, None))
    await asyncio.sleep(0.05)
    child.send_signal(number)
    child.send_signal(signal.SIGCONT)
    with pytest.raises(InvalidAdapter, match=f"more {words}"):
        await checking
    assert box._idle == []


async def test_cancelling_a_check_ends_its_child(box: Sandbox, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a")
    await box.check(folder, INFO, BYTES_MAX, None)
    child = child_of(box)
    child.send_signal(signal.SIGSTOP)
    checking = asyncio.create_task(box.check(folder, INFO, BYTES_MAX, None))
    await asyncio.sleep(0.05)
    checking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await checking
    assert child.wait(5) == -signal.SIGKILL


LIMITED = """
import sys
from gateway.adapters import sandbox
sandbox._limit_memory()
try:
    bytearray(2 * sandbox.MEMORY_BYTES)
except MemoryError:
    print("memory")
sandbox.CPU_S = 0
sandbox._limit_time()
sys.stdout.flush()
while True:
    pass
"""


def test_the_child_cannot_have_more_memory_or_time() -> None:
    run = subprocess.run(
        [sys.executable, "-c", LIMITED], capture_output=True, timeout=60, check=False
    )
    assert (run.stdout, run.returncode) == (b"memory\n", -signal.SIGXCPU)


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from gateway.adapters.sandbox import _Child
print(_Child()._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_gateway_leaves_no_child_behind() -> None:
    run = subprocess.run([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, check=False)
    pid = int(run.stdout)
    for _ in range(200):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(") ")[2].startswith("Z"):
            return
        time.sleep(0.05)
    raise AssertionError("the child lives on")
