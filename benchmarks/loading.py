"""Does bringing an adapter in disturb those who are served, and does it delay its own request?

1. Streams run; then they run again while every second a request for an adapter that nobody has
   asked for before comes in: its weights are read, it is copied into the pool, it answers one
   token. Compared is the 99th percentile of the time between the streams' tokens. (Both times that
   request is there; when idle, its adapter is in the pool already.)
2. The first token of a request whose adapter is in host memory but not in the pool, beside one
   whose adapter is in the pool, with nothing else running.

    python -m benchmarks loading [--rounds 3]
"""

import argparse
import json
import random
import statistics
import tempfile
from pathlib import Path

from benchmarks.drive import Drive
from benchmarks.machine import describe
from benchmarks.registered import register
from gateway.engine.engine import Engine
from gateway.engine.messages import AdapterRef, EngineSettings, Sampling, Submit

STREAMS = 8
STREAM_RANK = 16
COLD_RANK = 16
SECONDS = 12
STREAM_TOKENS = 1000
"""More than come in that time, and so few that all streams fit the pool to their ends."""
POOL_MIB = 1024
PROMPT_TOKENS = 32
FIRST_TOKENS = 15
"""Measurements of each kind of first token in a round."""


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks loading", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the base model's GGUF")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    engine = Engine(EngineSettings(model=str(options.model), pool_mib=POOL_MIB))
    with tempfile.TemporaryDirectory() as folder:
        cold = (options.rounds + 1) * SECONDS
        streams = register(Path(folder) / "streams", engine, STREAMS, STREAM_RANK)
        others = register(Path(folder) / "others", engine, cold + 1, COLD_RANK)
        p99: dict[str, list[float]] = {"idle": [], "loading": []}
        first: dict[str, list[float]] = {"warm": [], "cold": []}
        for turn in range(options.rounds + 1):  # the first warms up
            fresh = others[1 + turn * SECONDS : 1 + (turn + 1) * SECONDS]
            for name, arriving in (("idle", others[:1] * SECONDS), ("loading", fresh)):
                value = _p99_between(engine, streams, arriving, f"{turn}-{name}")
                if turn:
                    p99[name].append(value)
            for name, values in _first_tokens(engine, others[0], turn).items():
                first[name] += values if turn else []
    disturbed = _report("p99 between tokens", p99, "loading", "idle")
    delayed = _report("first token", first, "cold", "warm")
    result = {"benchmark": "loading", "p99_ratio": disturbed, "first_token_ratio": delayed}
    print(json.dumps(result | {"p99": p99} | describe()))


def _p99_between(
    engine: Engine, streams: list[AdapterRef], arriving: list[AdapterRef], name: str
) -> float:
    """Seconds. One of `arriving` comes each second."""
    drive = Drive(engine)
    for index, ref in enumerate(streams):
        drive.submit(_request(engine, f"{name}-stream-{index}", ref, STREAM_TOKENS))
    while not all(answer.token_s for answer in drive.answers.values()):
        drive.step()
    streaming = list(drive.answers)
    before = [len(drive.answers[key].token_s) for key in streaming]
    drive.open(
        (second + 0.5, _request(engine, f"{name}-{second}", ref, 1))
        for second, ref in enumerate(arriving)
    )
    gaps = [
        gap
        for key, start in zip(streaming, before, strict=True)
        for gap in drive.answers[key].between_s[start:]
    ]
    for key in streaming:
        engine.scheduler.cancel(key)
    while engine.scheduler.waiting or engine.scheduler.running:  # the last that came
        drive.step()
    return statistics.quantiles(gaps, n=100)[98]


def _first_tokens(engine: Engine, ref: AdapterRef, turn: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"warm": [], "cold": []}
    for index in range(FIRST_TOKENS):
        for name in found:
            if name == "cold":
                engine.pager.evict(ref.digest)
            drive = Drive(engine)
            drive.closed([_request(engine, f"{turn}-{name}-{index}", ref, 1)], 1)
            (answer,) = drive.answers.values()
            found[name].append(answer.first_token_s)
    return found


def _request(engine: Engine, name: str, ref: AdapterRef, output: int) -> Submit:
    chance = random.Random(name)
    prompt = [chance.randrange(100, engine.info.vocab_size) for _ in range(PROMPT_TOKENS)]
    return Submit(name, prompt, output, Sampling(temperature=0), ref)


def _report(what: str, values: dict[str, list[float]], one: str, other: str) -> float:
    medians = {name: statistics.median(found) for name, found in values.items()}
    ratio = medians[one] / medians[other]
    print(
        f"{what}: {one} {medians[one] * 1000:.1f} ms, {other} {medians[other] * 1000:.1f} ms, "
        f"{one} ÷ {other}: {ratio:.2f}"
    )
    return ratio
