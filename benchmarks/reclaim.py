"""Which idle pages should go first, and what does the wrong answer cost?

Replays requests on a simulated page pool (no model, no clock) and adds up the seconds that a policy
spends on bringing back what it let go: adapters copied from host memory or read from the store,
prefixes computed again. The pool holds 5, 10 or 25 % of all that is asked for more than once, and
at least the largest request.

    python -m benchmarks reclaim [--seed 1] [--requests 1500] [--record FOLDER] [--trace FILE]
                                 [--prefill-rate 300] [--copy-rate 5] [--read-rate 0.3]

`--record` writes the traces as JSON lines, `--trace` replays one; `benchmarks/reclaim_trace.py`
documents the format. The rates are tokens/s, GB/s from host memory to the pool, and GB/s from the
store to host memory.
"""

import argparse
import json
from pathlib import Path
from typing import NamedTuple

from benchmarks.reclaim_pool import (
    POLICIES,
    Costs,
    Result,
    held_pages,
    simulate,
    working_set,
)
from benchmarks.reclaim_trace import TRACES, Request, read, write

SHARES = (0.05, 0.10, 0.25)
BASELINE = "LRU"


class Cell(NamedTuple):
    trace: str
    share: float
    pages: int
    policy: str
    adapter_s: float
    prefix_s: float
    misses: int
    adapter_hits: float
    prefix_hits: float
    ratio: float
    """Seconds ÷ the baseline's."""


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks reclaim", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--record", type=Path, help="folder to write the traces to")
    parser.add_argument("--trace", type=Path, help="replay this one instead")
    parser.add_argument("--prefill-rate", type=float, default=300.0)
    parser.add_argument("--copy-rate", type=float, default=5.0)
    parser.add_argument("--read-rate", type=float, default=0.3)
    options = parser.parse_args(arguments)
    costs = Costs(
        prefill_tokens_per_s=options.prefill_rate,
        copy_bytes_per_s=options.copy_rate * 1e9,
        read_bytes_per_s=options.read_rate * 1e9,
    )
    traces = _traces(options.trace, options.seed, options.requests)
    if options.record:
        options.record.mkdir(parents=True, exist_ok=True)
        for name, requests in traces.items():
            write(options.record / f"{name.replace(' ', '-')}.jsonl", requests)
    measure(traces, costs)


def _traces(file: Path | None, seed: int, count: int) -> dict[str, list[Request]]:
    if file:
        return {file.stem: read(file)}
    return {name: list(make(seed, count)) for name, make in TRACES.items()}


def measure(traces: dict[str, list[Request]], costs: Costs) -> None:
    print(f"{'trace':<14} {'pool':>5} {'pages':>6} {'policy':<12} {'seconds':>8} {'ratio':>6}"
          f" {'adapters':>9} {'prefixes':>9} {'misses':>7}"
          f" {'hits: adapter':>14} {'prefix':>7}")  # fmt: skip
    cells = []
    for name, requests in traces.items():
        pages_wanted = working_set(requests, costs)
        largest = max(held_pages(request, costs) for request in requests)
        for share in SHARES:
            pages = max(largest, int(share * pages_wanted))
            for cell in _cells(name, requests, share, pages, costs):
                cells.append(cell)
                print(f"{name:<14} {share:>5.0%} {cell.pages:>6} {cell.policy:<12}"
                      f" {cell.adapter_s + cell.prefix_s:>8.1f} {cell.ratio:>6.2f}"
                      f" {cell.adapter_s:>9.1f} {cell.prefix_s:>9.1f} {cell.misses:>7}"
                      f" {cell.adapter_hits:>14.2f} {cell.prefix_hits:>7.2f}",
                      flush=True)  # fmt: skip
    result = {"benchmark": "reclaim", "costs": costs._asdict()}
    print(json.dumps(result | {"cells": [cell._asdict() for cell in cells]}))


def _cells(
    name: str, requests: list[Request], share: float, pages: int, costs: Costs
) -> list[Cell]:
    results = {policy: simulate(requests, pages, policy, costs) for policy in POLICIES}
    baseline = results[BASELINE].seconds
    return [
        _cell(name, share, pages, policy, result, baseline) for policy, result in results.items()
    ]


def _cell(
    name: str, share: float, pages: int, policy: str, result: Result, baseline: float
) -> Cell:
    return Cell(
        name,
        share,
        pages,
        policy,
        round(result.adapter_s, 2),
        round(result.prefix_s, 2),
        result.misses.total(),
        round(result.hit_rate("adapter"), 3),
        round(result.hit_rate("prefix"), 3),
        # a pool that never lost anything leaves nothing to compare
        round(result.seconds / baseline, 3) if baseline else 1.0,
    )
