"""Does it cost anything that a thousand adapters are registered, far more than the pool holds?

Closed loop over as many running requests, each with another adapter: once over 5 adapters, which
stay in the pool, once over 1,000 of the same rank with uniform popularity, so that nearly every
request needs an adapter that has to be brought in. Rounds alternate.

    python -m benchmarks many_adapters [--rounds 3]
"""

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.drive import Drive
from benchmarks.machine import describe
from benchmarks.registered import register
from gateway.engine.engine import Engine
from gateway.engine.messages import AdapterRef, EngineSettings, Sampling, Submit

REGISTERED = 1000
FEW = 5
"""So many adapters, and so many running requests: each batch has as many distinct adapters."""
QUEUED = 5
"""Requests in the queue beside: their adapters are read while they wait."""
RANK = 8
POOL_MIB = 512
"""Holds about 45 such adapters beside the KV."""
HOST_MIB = 1024
"""And host memory about 100."""
REQUESTS = 40
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 64


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks many_adapters", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the base model's GGUF")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    engine = Engine(
        EngineSettings(
            model=str(options.model),
            pool_mib=POOL_MIB,
            host_adapters_mib=HOST_MIB,
            running_max=FEW,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        refs = register(Path(folder), engine, REGISTERED, RANK)
        rates: dict[int, list[float]] = {FEW: [], REGISTERED: []}
        loads: dict[int, int] = {}
        for turn in range(options.rounds + 1):  # the first warms up
            for count in (FEW, REGISTERED):
                before = engine.pager.loads
                rate = _round(engine, refs[:count], turn)
                loads[count] = engine.pager.loads - before
                if turn:
                    rates[count].append(rate)
        resident = engine.pager.resident_count
    for count, values in rates.items():
        print(
            f"{count:>5} adapters: {statistics.median(values):6.1f} output tokens/s, "
            f"{loads[count]} loads for {REQUESTS} requests"
        )
    ratio = statistics.median(rates[REGISTERED]) / statistics.median(rates[FEW])
    print(f"{REGISTERED} ÷ {FEW}: {ratio:.2f} ({resident} adapters in the pool at the end)")
    result = {"benchmark": "many_adapters", "ratio": ratio, "rates": rates, "loads": loads}
    print(json.dumps(result | describe()))


def _round(engine: Engine, refs: list[AdapterRef], turn: int) -> float:
    drive = Drive(engine)
    seconds = drive.closed(_requests(refs, turn, engine.info.vocab_size), FEW + QUEUED)
    assert not any(answer.failed for answer in drive.answers.values())
    return drive.tokens / seconds


def _requests(refs: list[AdapterRef], turn: int, vocabulary: int) -> Iterator[Submit]:
    chance = random.Random(turn)
    for index in range(REQUESTS):
        if index % FEW == 0:
            drawn = chance.sample(refs, FEW)
        prompt = [chance.randrange(100, vocabulary) for _ in range(PROMPT_TOKENS)]
        yield Submit(
            f"{turn}-{len(refs)}-{index}",
            prompt,
            OUTPUT_TOKENS,
            Sampling(temperature=0),
            drawn[index % FEW],
        )
