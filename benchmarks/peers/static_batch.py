"""Batches of requests that arrive and end together: the form in which transformers mixes adapters.

All prompts of a batch have one length, all answers another, and each has an adapter of its own.
"""

import asyncio
import random
import time
from collections.abc import Callable
from itertools import count
from typing import TypeVar

from msgspec import Struct

from benchmarks.peers.child import Failed
from benchmarks.peers.layout import adapter_name
from benchmarks.peers.loads import VOCABULARY, Load
from benchmarks.peers.results import Reading
from gateway.bench.processes import ProcessesError, ProcessWatch, Usage

T = TypeVar("T")

PROMPT_TOKENS = 80
OUTPUT_TOKENS = 48
"""The means of the other loads."""


class Batch(Struct, frozen=True):
    prompts: list[list[int]]
    adapters: list[str]
    """The adapter of each."""
    tokens: int
    """How many each is continued by."""


def batch_of(requests: int, seed: int, tokens: int = OUTPUT_TOKENS) -> Batch:
    chance = random.Random(seed)
    prompts = [
        [chance.randrange(*VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(requests)
    ]
    return Batch(prompts, [adapter_name(index) for index in range(requests)], tokens)


def rate(
    answer: Callable[[Batch], object], pid: int, load: Load, seconds: float, round: int
) -> Reading:
    """Whole batches, at least one, until so many seconds have passed. A short one warms up, which
    brings in every adapter. `pid`: the server, which is watched with all processes below it.

    Raises Failed, and what `answer` raises.
    """
    seeds = count(load.seed(round))
    answer(batch_of(load.concurrency, next(seeds), tokens=2))

    def work() -> tuple[int, float]:
        begun, passed, batches = time.perf_counter(), 0.0, 0
        while not batches or passed < seconds:
            answer(batch_of(load.concurrency, next(seeds)))
            batches, passed = batches + 1, time.perf_counter() - begun
        return batches, passed

    try:
        (batches, passed), usage = asyncio.run(_watched(work, pid))
    except ProcessesError as error:
        raise Failed(str(error)) from None
    return Reading(
        batches * load.concurrency * OUTPUT_TOKENS / passed,
        other_cores=usage.other_cores or 0.0,
        report={
            "batches": batches,
            "duration_s": passed,
            "server": {"peak_pss_mib": usage.peak_pss_mib, "mean_cores": usage.mean_cores},
        },
    )


async def _watched(work: Callable[[], T], pid: int) -> tuple[T, Usage]:
    async with ProcessWatch((pid,)) as watch:
        done = await asyncio.to_thread(work)
        return done, watch.usage()
