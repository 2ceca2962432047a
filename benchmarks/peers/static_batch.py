"""Batches of requests that arrive and end together: the form in which transformers mixes adapters.

All prompts of a batch have one length, all answers another, and each has an adapter of its own.
"""

import random
import time
from collections.abc import Callable
from itertools import count

from msgspec import Struct

from benchmarks.peers.layout import adapter_name
from benchmarks.peers.loads import VOCABULARY
from benchmarks.peers.other_cores import OtherCores
from benchmarks.peers.results import Reading

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
    answer: Callable[[Batch], object], pids: list[int], requests: int, seconds: float, seed: int
) -> Reading:
    """Whole batches, at least one, until so many seconds have passed. A short one warms up, which
    brings in every adapter."""
    answer(batch_of(requests, seed=-1, tokens=2))
    others = OtherCores(pids)
    batches, begun = 0, time.perf_counter()
    for number in count():
        answer(batch_of(requests, seed=1000 * seed + number))
        batches = number + 1
        passed = time.perf_counter() - begun
        if passed >= seconds:
            break
    return Reading(
        batches * requests * OUTPUT_TOKENS / passed,
        other_cores=others.mean(),
        report={"batches": batches, "seconds": passed},
    )
