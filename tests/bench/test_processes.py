import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gateway.bench.processes import ProcessesError, ProcessWatch, _process

BURN = """
import sys, time
data = bytearray(int(sys.argv[1]) * 2**20)
while time.process_time() < 0.4: pass
print("ready", flush=True)
sys.stdin.readline()
while time.process_time() < 0.4 + float(sys.argv[2]): pass
print("done", flush=True)
sys.stdin.readline()
"""
"""Takes so many MiB and some CPU, waits for a line, uses so many seconds, waits for another."""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


async def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    assert await asyncio.to_thread(process.stdout.readline) == "done\n"


@pytest.mark.parametrize("command", [[BURN, "96", "0.6"], [PARENT, BURN, "96", "0.6"]])
async def test_memory_and_cpu_of_a_process_and_its_children_are_measured(command: list[str]):
    with started(*command) as process:
        async with ProcessWatch((process.pid,)) as watch:
            begun = time.perf_counter()
            await go_on(process)
            usage = watch.usage()
            wall_s = time.perf_counter() - begun
    assert usage.peak_pss_mib is not None
    assert 96 < usage.peak_pss_mib < 96 + 40
    assert usage.mean_cores is not None
    # what it had used before it was watched is not counted
    assert usage.mean_cores * wall_s == pytest.approx(0.6, abs=0.15)
    assert usage.ended == []


async def test_two_trees_are_summed_and_one_inside_of_the_other_counts_once():
    with started(BURN, "64", "0") as one, started(BURN, "32", "0") as two:
        async with ProcessWatch((one.pid, two.pid, os.getpid())) as watch:
            inside = watch.usage().peak_pss_mib
        async with ProcessWatch((one.pid, two.pid)) as watch:
            both = watch.usage().peak_pss_mib
        async with ProcessWatch((os.getpid(),)) as watch:
            all_of_us = watch.usage().peak_pss_mib
    assert both is not None
    assert inside is not None
    assert 96 < both < 96 + 40
    assert inside == pytest.approx(all_of_us, rel=0.2)


async def test_a_process_that_ends_meanwhile_is_named():
    with started(BURN, "1", "0") as process:
        async with ProcessWatch((process.pid,)) as watch:
            await go_on(process)
            process.kill()
            process.wait()
            usage = watch.usage()
    assert usage.ended == [process.pid]
    assert usage.peak_pss_mib is not None


async def test_cpu_that_others_use_is_told_from_ours():
    with started(BURN, "1", "0.8") as process:
        async with ProcessWatch(()) as watch:
            begun = time.perf_counter()
            await go_on(process)
            spent = time.process_time()
            while time.process_time() < spent + 0.2:
                pass
            usage = watch.usage()
            wall_s = time.perf_counter() - begun
    assert (usage.peak_pss_mib, usage.mean_cores) == (None, None)
    assert usage.own_cores * wall_s == pytest.approx(0.2, abs=0.1)
    assert usage.other_cores is not None
    assert usage.other_cores * wall_s > 0.7  # and whatever else this machine does


def test_a_process_that_is_not_there_is_refused():
    with pytest.raises(ProcessesError, match="There is no process 4194304"):
        ProcessWatch((2**22,))


def test_a_name_with_parentheses_and_spaces_does_not_confuse():
    with started("open('/proc/self/comm', 'w').write('x) S 1 (y')\n" + BURN, "1", "0") as process:
        found = _process(process.pid)
    assert found is not None
    assert found.parent == os.getpid()
