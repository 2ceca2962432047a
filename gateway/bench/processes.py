"""Memory and CPU of trees of processes on this machine, and what the rest of it did. Linux only.

Memory is PSS: a page that several processes share counts in each with its part, so that a sum over
processes is what they really take.
"""

import asyncio
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

PROC = Path("/proc")
SAMPLE_S = 1.0
"""Reading the PSS of a large process walks its page tables, which takes milliseconds."""
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class ProcessesError(Exception):
    """The message says which process cannot be watched, and why."""


@dataclass(frozen=True)
class Usage:
    """Over the time between `start` and `stop`. None: not watched, or not to be known here."""

    peak_pss_mib: float | None
    mean_cores: float | None
    own_cores: float
    """Of this process."""
    other_cores: float | None
    """Of all other processes: 0 is a run that had the machine for itself."""
    ended: list[int]
    """Watched processes that did not live through it."""


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    began: int
    """In ticks since the boot, which tells it from another with the same pid."""
    cpu_s: float


class ProcessWatch:
    """Raises ProcessesError for a process that is not there or whose memory may not be read."""

    def __init__(self, pids: tuple[int, ...]) -> None:
        self._roots = [self._root(pid) for pid in pids]
        self._peak_kib = 0
        self._cpu_s: dict[tuple[int, int], float] = {}
        """Of each process that was ever in a tree, its CPU time when it was seen last."""
        self._before_s = self._started = self._own_s = 0.0
        self._busy_s: float | None = None

    def _root(self, pid: int) -> Process:
        if not PROC.is_dir():
            raise ProcessesError("Processes can be watched on Linux only: leave --pid out.")
        process = _process(pid)
        if process is None:
            raise ProcessesError(f"There is no process {pid}.")
        try:
            _pss_kib(pid)
        except PermissionError:
            raise ProcessesError(
                f"Process {pid} is another user's: its memory is hidden."
            ) from None
        except OSError:
            raise ProcessesError(f"There is no process {pid}.") from None
        return process

    async def __aenter__(self) -> Self:
        self._sample()
        self._before_s = sum(self._cpu_s.values())
        self._started, self._own_s = time.perf_counter(), time.process_time()
        self._busy_s = _busy_s()
        self._sampling = asyncio.create_task(self._keep_sampling())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._sampling.cancel()

    def usage(self) -> Usage:
        self._sample()
        wall_s = time.perf_counter() - self._started
        own = (time.process_time() - self._own_s) / wall_s
        watched = (sum(self._cpu_s.values()) - self._before_s) / wall_s
        busy_s = _busy_s()
        other = None
        if busy_s is not None and self._busy_s is not None:
            other = max(0.0, (busy_s - self._busy_s) / wall_s - own - watched)
        return Usage(
            peak_pss_mib=self._peak_kib / 1024 if self._roots else None,
            mean_cores=watched if self._roots else None,
            own_cores=own,
            other_cores=other,
            ended=[root.pid for root in self._roots if not _lives(root)],
        )

    async def _keep_sampling(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            await asyncio.to_thread(self._sample)

    def _sample(self) -> None:
        if not self._roots:
            return
        pss_kib = 0
        for process in _trees([root.pid for root in self._roots if _lives(root)]):
            self._cpu_s[process.pid, process.began] = process.cpu_s
            with suppress(OSError):  # it ended just now
                pss_kib += _pss_kib(process.pid)
        self._peak_kib = max(self._peak_kib, pss_kib)


def _lives(process: Process) -> bool:
    now = _process(process.pid)
    return now is not None and now.began == process.began


def _trees(pids: list[int]) -> list[Process]:
    """These processes and all below them, each once."""
    everyone = [_process(int(entry.name)) for entry in PROC.iterdir() if entry.name.isdigit()]
    children: dict[int, list[Process]] = {}
    found: dict[int, Process] = {}
    for process in filter(None, everyone):
        children.setdefault(process.parent, []).append(process)
        if process.pid in pids:
            found[process.pid] = process
    rest = list(found.values())
    while rest:
        for child in children.get(rest.pop().pid, []):
            if child.pid not in found:
                found[child.pid] = child
                rest.append(child)
    return list(found.values())


def _process(pid: int) -> Process | None:
    """By /proc/PID/stat (proc(5)), whose second field may hold any text in parentheses."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    return Process(pid, int(fields[1]), int(fields[19]), ticks * TICK_S)


def _pss_kib(pid: int) -> int:
    """Raises OSError."""
    for line in (PROC / str(pid) / "smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    return 0


def _busy_s() -> float | None:
    """CPU time of the whole machine, what was stolen from it included."""
    try:
        fields = (PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return None
    user, nice, system, _, _, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) * TICK_S
