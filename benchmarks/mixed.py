"""What do many adapters at once cost, beside none?

A closed loop of 32 requests over 200 registered adapters of ranks 8, 16 and 32, whose popularity
is a power law (the i-th is asked for in proportion to 1/i), beside the same requests without
adapters. Rounds alternate. Of the time beyond the base's, what it takes to read each step's
distinct adapters once at the measured bandwidth is not ours to save: the corrected ratio leaves
it out.

    python -m benchmarks mixed [--dtype bfloat16] [--rounds 3]
"""

import argparse
import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.drive import Drive
from benchmarks.floor import adapter_bytes
from benchmarks.machine import describe, read_bandwidth
from benchmarks.registered import register_in_turn
from benchmarks.steps import watched
from gateway.engine.engine import Engine
from gateway.engine.messages import AdapterRef, EngineSettings, Sampling, Submit

REGISTERED = 200
ALPHA = 1.0
CONCURRENT = 32
REQUESTS = 128
PROMPT_TOKENS = (32, 96)
OUTPUT_TOKENS = (32, 96)
POOL_MIB = {"bfloat16": 2560, "float32": 5120}
"""Holds all of the adapters, and the KV."""


class Round(NamedTuple):
    rate: float
    """Output tokens per second."""
    corrected: float
    """The same, had reading the adapters taken no time."""
    distinct: float
    """Adapters of a step, on average."""
    loads: int


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks mixed", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the base model's GGUF")
    parser.add_argument("--dtype", default="bfloat16", choices=list(POOL_MIB))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    engine = Engine(
        EngineSettings(
            model=str(options.model), dtype=options.dtype, pool_mib=POOL_MIB[options.dtype]
        )
    )
    bandwidth = read_bandwidth()
    print(f"reading memory: {bandwidth / 1e9:.1f} GB/s; {describe()}", flush=True)
    rounds: list[tuple[Round, Round]] = []
    with tempfile.TemporaryDirectory() as folder:
        refs = register_in_turn(Path(folder), engine, REGISTERED)
        for turn in range(options.rounds + 1):  # the first warms up
            requests = _requests(refs, turn, engine.info.vocab_size)
            plain = [msgspec.structs.replace(request, adapter=None) for request in requests]
            pair = _round(engine, plain, bandwidth), _round(engine, requests, bandwidth)
            if turn:
                rounds.append(pair)
    engine.close()
    raw = statistics.median(mixed.rate / base.rate for base, mixed in rounds)
    corrected = statistics.median(mixed.corrected / base.rate for base, mixed in rounds)
    for name, each in zip(("base only", f"{REGISTERED} adapters"), zip(*rounds, strict=True),
                          strict=True):  # fmt: skip
        print(
            f"{name:>12}: {statistics.median(r.rate for r in each):6.1f} output tokens/s, "
            f"{statistics.mean(r.distinct for r in each):.1f} distinct in a step, "
            f"{sum(r.loads for r in each)} loads for {len(each) * REQUESTS} requests"
        )
    print(f"adapters ÷ base: {raw:.2f}; without the time to read them {corrected:.2f}")
    result = {"benchmark": "mixed", "dtype": options.dtype, "raw": raw, "corrected": corrected}
    pairs = [[base._asdict(), mixed._asdict()] for base, mixed in rounds]
    print(json.dumps(result | {"bandwidth": bandwidth, "rounds": pairs} | describe()))


def _round(engine: Engine, requests: list[Submit], bandwidth: float) -> Round:
    drive, before = Drive(engine), engine.pager.loads
    with watched(engine) as steps:
        seconds = drive.closed(requests, CONCURRENT)
    for answer in drive.answers.values():
        assert answer.failed is None, answer.failed
    reading_s = sum(adapter_bytes(engine.info, step.load) for step in steps) / bandwidth
    return Round(
        drive.tokens / seconds,
        drive.tokens / (seconds - reading_s),
        statistics.mean(len(step.load.uses) for step in steps),
        engine.pager.loads - before,
    )


def _requests(refs: list[AdapterRef], turn: int, vocabulary: int) -> list[Submit]:
    chance = random.Random(turn)
    shuffled = random.Random(0).sample(refs, len(refs))
    drawn = chance.choices(
        shuffled, [(place + 1) ** -ALPHA for place in range(len(refs))], k=REQUESTS
    )
    return [
        Submit(
            f"{turn}-{index}",
            [chance.randrange(100, vocabulary) for _ in range(chance.randint(*PROMPT_TOKENS))],
            chance.randint(*OUTPUT_TOKENS),
            Sampling(temperature=0),
            adapter,
        )
        for index, adapter in enumerate(drawn)
    ]
