"""What this machine can do at most, and what else it is doing."""

import os
import statistics
import time

import torch


def read_bandwidth() -> float:
    """Bytes per second that all cores together read from memory: median of five sums over a
    gigabyte, far more than the caches hold."""
    data = torch.ones(2**28, dtype=torch.float32)
    rates = []
    for _ in range(6):
        started = time.perf_counter()
        data.sum()
        rates.append(data.nbytes / (time.perf_counter() - started))
    return statistics.median(rates[1:])


def describe() -> dict[str, object]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "load_1min": round(os.getloadavg()[0], 2),
    }
