"""Where does the time of a step go, and how far is each stage from what it must cost?

Batches that decode, at a context of about 80 tokens: without adapters, all over one, and each
request with its own (ranks 8, 16 and 32 in turn); and 256 tokens of a prompt. Beside the median
milliseconds of each stage stands the share that its floor is of them: the bytes it must read at
the bandwidth, or its operations at the rate of torch's product, whichever takes longer. An
adapter's first product runs with the stage that it belongs to, its second with the one after.

    python -m benchmarks stages [--dtype float32 bfloat16] [--rounds 3]
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from benchmarks import floor
from benchmarks.drive import Drive
from benchmarks.floor import Load, Machine
from benchmarks.machine import describe, measured
from benchmarks.registered import register_in_turn
from benchmarks.steps import watched
from gateway.engine.engine import Engine
from gateway.engine.messages import AdapterRef, EngineSettings, Sampling, Submit
from gateway.engine.model.batch import Batch
from gateway.engine.model.compiled_decoder import CompiledDecoder

BATCHES = (1, 8, 32)
CHUNK = 256
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 32
CHUNKS = 5
"""Prompts of a round."""
POOL_MIB = 1536
BEFORE = ("plan", "pack", "prepare", "start")
"""Preparing: the decoder's own work lists. Starting: until the threads have begun."""
AFTER = ("sample", "commit", "rest")
PART_OF = {"norm": "head", "expand head": "head"}


class Cell(NamedTuple):
    adapters: str
    batch: int
    """Requests that decode; 0: a chunk of a prompt."""
    refs: list[AdapterRef]

    @property
    def title(self) -> str:
        return f"decode {self.batch}" if self.batch else f"prefill {CHUNK}"


class Table(NamedTuple):
    """Of one cell: milliseconds by stage, in order, and floors of those that have one."""

    spent: dict[str, float]
    floor: dict[str, float]
    step: float

    @property
    def share(self) -> float:
        return sum(self.floor.values()) / self.step


class Clock:
    """Seconds by name, until they are taken."""

    def __init__(self) -> None:
        self._spent: dict[str, float] = {}

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                seconds = time.perf_counter() - started
                self._spent[name] = self._spent.get(name, 0.0) + seconds

        return run

    def taken(self) -> dict[str, float]:
        spent, self._spent = self._spent, {}
        return spent


class _TimedTeam:
    def __init__(self, team: Any, clock: Clock) -> None:
        self.threads = team.threads
        self.run = clock.timed("run", team.run)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks stages", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the base model's GGUF")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    results = []
    for dtype in options.dtype:
        with tempfile.TemporaryDirectory() as folder:
            results.append(measure(options.model, dtype, options.rounds, Path(folder)))
    print(json.dumps({"benchmark": "stages", **describe(), "dtypes": results}))


def measure(gguf: Path, dtype: str, rounds: int, folder: Path) -> dict[str, Any]:
    engine = Engine(
        EngineSettings(model=str(gguf), dtype=dtype, pool_mib=POOL_MIB, step_tokens=CHUNK)  # type: ignore[arg-type]
    )
    machine = measured(engine.info)
    refs = register_in_turn(folder, engine, max(BATCHES))
    cells = [
        Cell(name, batch, refs[:count])
        for name, counts in (("none", (0,) * 4), ("one", (1,) * 4), ("own", BATCHES))
        for batch, count in zip((*BATCHES, 0), counts, strict=False)
        if (name, batch) != ("own", 1)
    ]
    seen: list[list[tuple[dict[str, float], Load]]] = [[] for _ in cells]
    for turn in range(rounds + 1):  # the first warms up
        for index, cell in enumerate(cells):
            steps = _decoded(engine, cell) if cell.batch else _prefilled(engine, cell, turn)
            if turn:
                seen[index] += steps
    engine.close()
    tables = [_table(engine, machine, each) for each in seen]
    for name in dict.fromkeys(cell.adapters for cell in cells):
        chosen = [(c, t) for c, t in zip(cells, tables, strict=True) if c.adapters == name]
        _print(f"{dtype}, adapters: {name}", chosen)
    return {
        "dtype": dtype,
        **machine._asdict(),
        "cells": [
            {"adapters": cell.adapters, "what": cell.title, **table._asdict(), "share": table.share}
            for cell, table in zip(cells, tables, strict=True)
        ],
    }


def _decoded(engine: Engine, cell: Cell) -> list[tuple[dict[str, float], Load]]:
    """The same prompts each time, which are then found in the cache."""
    chance = random.Random(0)
    requests = [_request(engine, chance, cell, index, OUTPUT_TOKENS) for index in range(cell.batch)]
    steps = _run(engine, requests, cell.batch)
    return [(spent, load) for spent, load in steps if load.decodes and load.tokens == cell.batch]


def _prefilled(engine: Engine, cell: Cell, turn: int) -> list[tuple[dict[str, float], Load]]:
    chance = random.Random(turn)
    requests = [_request(engine, chance, cell, index, 1) for index in range(CHUNKS)]
    return _run(engine, requests, 1)


def _request(engine: Engine, chance: random.Random, cell: Cell, index: int, output: int) -> Submit:
    tokens = PROMPT_TOKENS if cell.batch else CHUNK
    return Submit(
        str(index),
        [chance.randrange(100, engine.info.vocab_size) for _ in range(tokens)],
        output,
        Sampling(temperature=0),
        cell.refs[index % len(cell.refs)] if cell.refs else None,
        cache_namespace="same" if cell.batch else None,
    )


def _run(
    engine: Engine, requests: list[Submit], outstanding: int
) -> list[tuple[dict[str, float], Load]]:
    drive = Drive(engine)
    with _clocked(engine) as found:
        drive.closed(requests, outstanding)
    assert not any(answer.failed for answer in drive.answers.values())
    return found


@contextmanager
def _clocked(engine: Engine) -> Iterator[list[tuple[dict[str, float], Load]]]:
    """A list that gets seconds by stage, and the load, of every step."""
    clock, decoder, found = Clock(), engine._decoder, []
    assert isinstance(decoder, CompiledDecoder)

    with ExitStack() as patches:
        steps = patches.enter_context(watched(engine))
        step = engine.step

        def noted() -> Any:
            before = len(steps)
            clock.taken()
            events = step()
            if len(steps) > before:
                spent, last = clock.taken(), steps[-1]
                found.append((_by_stage(spent, last.seconds, decoder.stages()), last.load))
            return events

        for owner, name, label in (
            (engine.scheduler, "plan", "plan"),
            (engine.scheduler, "commit", "commit"),
            (decoder, "forward", "forward"),
            (engine, "_sample", "sample"),
        ):
            function = clock.timed(label, getattr(owner, name))
            patches.enter_context(patch.object(owner, name, function))
        pack = staticmethod(clock.timed("pack", Batch.pack))
        patches.enter_context(patch.object(Batch, "pack", pack))
        patches.enter_context(patch.object(decoder, "_team", _TimedTeam(decoder._team, clock)))
        patches.enter_context(patch.object(engine, "step", noted))
        yield found


def _by_stage(spent: dict[str, float], step_s: float, shares: dict[str, float]) -> dict[str, float]:
    whole = ("plan", "pack", "forward", "sample", "commit")
    stages = {
        "plan": spent["plan"],
        "pack": spent["pack"],
        "prepare": spent["forward"] - spent["run"],
    }
    for name, share in shares.items():
        name = PART_OF.get(name, name)
        stages[name] = stages.get(name, 0.0) + share * spent["run"]
    stages |= {"sample": spent["sample"], "commit": spent["commit"]}
    stages["rest"] = step_s - sum(spent[name] for name in whole)
    return stages


def _table(engine: Engine, machine: Machine, steps: list[tuple[dict[str, float], Load]]) -> Table:
    def median_ms(values: list[float]) -> float:
        return 1000 * statistics.median(values)

    spent = {name: median_ms([each[name] for each, _ in steps]) for name in steps[0][0]}
    step = median_ms([sum(each.values()) for each, _ in steps])
    floors = [
        {name: cost.seconds(machine) for name, cost in floor.stages(engine.info, load).items()}
        for _, load in steps
    ]
    least = {name: median_ms([each[name] for each in floors]) for name in floors[0]}
    return Table(spent, {name: ms for name, ms in least.items() if ms}, step)


def _print(title: str, columns: list[tuple[Cell, Table]]) -> None:
    print(f"\n{title}: ms, and the floor's share of them")
    print(f"{'':>10}" + "".join(f"{cell.title:>20}" for cell, _ in columns))
    for name in columns[0][1].spent:
        line = f"{name:>10}"
        for _, table in columns:
            share = f"{table.floor[name] / table.spent[name]:.2f}" if name in table.floor else ""
            line += f"{table.spent[name]:>13.3f}{share:>7}"
        print(line)
    totals = (f"{table.step:>13.3f}{table.share:>7.2f}" for _, table in columns)
    print(f"{'step':>10}{''.join(totals)}", flush=True)
