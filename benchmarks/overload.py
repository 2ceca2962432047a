"""At half as much again as the engine can serve: how many get their first token in time?

First the rate at which a closed loop is answered, then requests arriving at random (Poisson) at
1.5 times that rate, from two tenants, twice: refused early if their first token can't come in time,
and never refused. A refusal counts as a miss, as does a first token that is late.

    python -m benchmarks overload [--seconds 90]
"""

import argparse
import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec

from benchmarks.drive import Answer, Drive
from benchmarks.machine import describe
from gateway.engine.engine import Engine
from gateway.engine.messages import EngineSettings, Sampling, Submit

LOAD = 1.5
FIRST_TOKEN_S = 6.0
"""As in S-LoRA's evaluation (arXiv 2311.03285, section 7.1)."""
PROMPT_TOKENS = (8, 128)
OUTPUT_TOKENS = (8, 128)
RUNNING_MAX = 16
CLOSED_REQUESTS = 60


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks overload", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the base model's GGUF")
    parser.add_argument("--seconds", type=float, default=90)
    options = parser.parse_args(arguments)
    engine = Engine(EngineSettings(model=str(options.model), running_max=RUNNING_MAX))
    capacity = _capacity(engine)
    rate = LOAD * capacity
    print(f"capacity {capacity:.2f} requests/s; arriving {rate:.2f} for {options.seconds:.0f} s")
    attained: dict[str, float] = {}
    for name, deadline_s in (("refusing early", FIRST_TOKEN_S), ("never refusing", None)):
        drive = Drive(engine)
        drive.open(_arrivals(engine, rate, options.seconds, name, deadline_s))
        drive.finish()
        answers = list(drive.answers.values())
        attained[name] = sum(answer.first_token_s <= FIRST_TOKEN_S for answer in answers) / len(
            answers
        )
        print(f"{name}: {attained[name]:.2f} of {len(answers)} in time, {_rest(answers)}")
    result = {"benchmark": "overload", "capacity": capacity, "attained": attained}
    print(json.dumps(result | describe()))


def _rest(answers: list[Answer]) -> str:
    refused = sum(answer.failed is not None for answer in answers)
    late = sum(FIRST_TOKEN_S < answer.first_token_s < float("inf") for answer in answers)
    return f"{refused} refused, {late} late"


def _capacity(engine: Engine) -> float:
    """Requests per second, answered as fast as they can be."""
    for _ in range(2):  # the first warms up
        drive = Drive(engine)
        requests = islice(_requests(engine, "closed"), CLOSED_REQUESTS)
        seconds = drive.closed(requests, 2 * RUNNING_MAX)
    return CLOSED_REQUESTS / seconds


def _arrivals(
    engine: Engine, rate: float, seconds: float, name: str, deadline_s: float | None
) -> Iterator[tuple[float, Submit]]:
    chance, due_s = random.Random(1), 0.0
    for request in _requests(engine, name):
        due_s += chance.expovariate(rate)
        if due_s > seconds:
            return
        yield due_s, msgspec.structs.replace(request, first_token_s=deadline_s)


def _requests(engine: Engine, name: str) -> Iterator[Submit]:
    chance, index = random.Random(0), 0
    while True:
        prompt = [
            chance.randrange(100, engine.info.vocab_size)
            for _ in range(chance.randint(*PROMPT_TOKENS))
        ]
        yield Submit(
            f"{name}-{index}",
            prompt,
            chance.randint(*OUTPUT_TOKENS),
            Sampling(temperature=0),
            fairness_key=chance.choice(("one tenant", "another")),
        )
        index += 1
