"""What do scheduling and page bookkeeping cost, and does it grow with the adapters registered?

1. Share of an iteration that planning and committing take, decoding 64 sequences of 8 adapters.
2. The same time on the scheduler alone, without a model, when 10 to 10,000 adapters were used
   before: 64 running sequences, each request that ends followed by another one. Those in use are
   the same ten, or drawn from all; then most bring their adapter into the pool.

    python -m benchmarks bookkeeping
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.drive import Drive
from benchmarks.machine import describe
from benchmarks.registered import register
from gateway.engine.engine import Engine
from gateway.engine.messages import AdapterRef, EngineSettings, Sampling, Submit
from gateway.engine.steplog import StepRecord
from tests.engine.scheduling.simulation import Simulation

BATCH = 64
STEPS = 60
RANK = 8
REGISTERED = (10, 100, 1000, 10_000)
SIMULATED_STEPS = 3000


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks bookkeeping", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the base model's GGUF")
    options = parser.parse_args(arguments)
    log: list[StepRecord] = []
    engine = Engine(EngineSettings(model=str(options.model), running_max=BATCH), log=log.append)
    with tempfile.TemporaryDirectory() as folder:
        refs = register(Path(folder), engine, 8, RANK)
        log.clear()
        _decode(engine, refs)
    full = [record for record in log if sum(share.decoded for share in record.shares) == BATCH]
    own_ms = 1000 * statistics.median(record.plan_s + record.commit_s for record in full)
    step_ms = 1000 * statistics.median(
        record.plan_s + record.compute_s + record.commit_s for record in full
    )
    print(
        f"decoding {BATCH} sequences: {own_ms:.2f} ms of {step_ms:.0f} ms an iteration "
        f"({own_ms / step_ms:.2%})"
    )
    few = {count: _simulated_us(count, in_use=REGISTERED[0]) for count in REGISTERED}
    drawn = {count: _simulated_us(count, in_use=count) for count in REGISTERED}
    print(f"{'registered':>10}  ten of them in use    all in use")
    for count in REGISTERED:
        print(
            f"{count:>10} {few[count]:9.0f} µs ({few[count] / few[REGISTERED[0]]:.2f})"
            f" {drawn[count]:9.0f} µs"
        )
    result = {"benchmark": "bookkeeping", "own_ms": own_ms, "step_ms": step_ms}
    print(json.dumps(result | {"ten_in_use_us": few, "all_in_use_us": drawn} | describe()))


def _decode(engine: Engine, refs: list[AdapterRef]) -> None:
    drive = Drive(engine)
    for index in range(BATCH):
        prompt = [100 + index] * 16
        drive.submit(
            Submit(str(index), prompt, STEPS, Sampling(temperature=0), refs[index % len(refs)])
        )
    drive.finish()


def _simulated_us(adapters: int, in_use: int) -> float:
    """Median time of planning and committing an iteration."""
    chance = random.Random(1)
    simulation = Simulation(
        pages=4000, step_tokens=256, running_max=BATCH, checked=False, adapter_pages=14
    )
    names = [f"adapter-{index}" for index in range(adapters)]
    for index, name in enumerate(names):  # each has been used once
        simulation.submit("tenant", 1, 1, adapter=name)
        if index % BATCH == 0:
            simulation.finish()
    simulation.finish()
    spent = []
    for _ in range(SIMULATED_STEPS):
        while len(simulation.scheduler.running) + len(simulation.scheduler.waiting) < BATCH + 8:
            tenant = f"tenant-{chance.randrange(20)}"
            simulation.submit(
                tenant,
                chance.randint(16, 64),
                chance.randint(16, 64),
                adapter=chance.choice(names[:in_use]),
            )
        started = time.perf_counter()
        simulation.step()
        spent.append(time.perf_counter() - started)
    return 1e6 * statistics.median(spent)
