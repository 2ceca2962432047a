"""How busy this machine is with what is not measured."""

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class OtherCores:
    def __init__(self, pids: Iterable[int]) -> None:
        """From now on, beside these processes and this one."""
        self._pids = [*pids, os.getpid()]
        self._begun = (time.perf_counter(), _busy_s() - self._own_s())

    def mean(self) -> float:
        """Cores' worth of time that others have used since. Whoever has ended meanwhile counts as
        another."""
        begun, others = self._begun
        used = _busy_s() - self._own_s() - others
        return max(0.0, used / (time.perf_counter() - begun))

    def _own_s(self) -> float:
        return sum(map(_process_s, self._pids))


def _busy_s() -> float:
    """Of all cores: user, nice, system, irq and softirq."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, irq, softirq = map(int, fields[:7])
    return (user + nice + system + irq + softirq) / TICKS_PER_S


def _process_s(pid: int) -> float:
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return 0.0
