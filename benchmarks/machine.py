"""What this machine can do at most, and what else it is doing."""

import os
import statistics
import time

import torch
import torch.nn.functional as F

from benchmarks.floor import Machine, products
from gateway.engine.messages import ModelInfo

ROWS = (256, 1024)
"""Of a product that computing bounds, not reading."""


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


def multiply_rate(info: ModelInfo) -> float:
    """Floating-point operations per second of torch's product in the model's dtype: the best of
    its layers' matrices, median of five each."""
    dtype = getattr(torch, info.dtype)
    rates = []
    for columns, width in products(info).values():
        weight = torch.randn(columns, width).to(dtype)
        for rows in ROWS:
            x = torch.randn(rows, width).to(dtype)
            spent = []
            for _ in range(6):
                started = time.perf_counter()
                F.linear(x, weight)
                spent.append(time.perf_counter() - started)
            rates.append(2 * rows * columns * width / statistics.median(spent[1:]))
    return max(rates)


def measured(info: ModelInfo) -> Machine:
    """What floors are counted with. Says so."""
    found = Machine(read_bandwidth(), multiply_rate(info))
    print(
        f"reading memory: {found.bandwidth / 1e9:.1f} GB/s; torch's products in {info.dtype}: "
        f"{found.rate / 1e9:.0f} GFLOP/s; {describe()}",
        flush=True,
    )
    return found


def describe() -> dict[str, object]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "load_1min": round(os.getloadavg()[0], 2),
    }
