"""How does the cost of a step grow with requests, registered adapters, rank and context?

Milliseconds of a decoding step (median) and the output tokens per second that it gives, each beside
its floor: the weights, each distinct adapter and the running requests' KV read once at the
bandwidth, or all operations at the rate of torch's product, whichever takes longer. Where the floor
grows and the share does not fall, the growth is what the work needs.

Over registered adapters the loop is closed, and steps with a prompt or a load count as well, since
these are what many adapters could make dearer: mean step, rate of the whole run.

    python -m benchmarks growth [--dtype bfloat16] [--rounds 2]
"""

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks import floor
from benchmarks.drive import Drive
from benchmarks.floor import Load, Machine
from benchmarks.machine import describe, measured
from benchmarks.registered import register
from benchmarks.steps import Step, watched
from gateway.engine.engine import Engine
from gateway.engine.messages import AdapterRef, EngineSettings, Sampling, Submit
from gateway.engine.scheduling.plan import Slice

CONCURRENT = (1, 2, 4, 8, 16, 32, 64)
RANK = 16
REGISTERED = (1, 5, 25, 125, 1000)
REGISTERED_RANK = 8
REGISTERED_CONCURRENT = 32
RANKS = (1, 4, 16, 64, 256)
CONTEXTS = (128, 512, 2048, 8192)
CONCURRENT_OF_REST = 8
"""Requests of the tables over rank and context."""
PROMPT_TOKENS = 32
OUTPUT_TOKENS = 32
POOL_MIB = {"bfloat16": 2048, "float32": 4096}
"""Holds the KV of the longest contexts, or the adapters of the largest rank."""


class Row(NamedTuple):
    of: int
    step_ms: float
    tokens_per_s: float
    floor_ms: float

    @property
    def share(self) -> float:
        return self.floor_ms / self.step_ms


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks growth", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the base model's GGUF")
    parser.add_argument("--dtype", default="bfloat16", choices=list(POOL_MIB))
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args(arguments)
    tables: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory() as folder:
        engine = _engine(options.model, options.dtype)
        machine = measured(engine.info)
        tables |= _Growth(engine, machine, options.rounds).of_adapters(Path(folder))
        engine.close()
        del engine  # its pool, before there is another
    # all prompts in one step, so that no request is done before the last one decodes
    engine = _engine(options.model, options.dtype, CONCURRENT_OF_REST * max(CONTEXTS))
    tables |= _Growth(engine, machine, options.rounds).of_context()
    engine.close()
    rows = {name: [row._asdict() for row in table] for name, table in tables.items()}
    result = {"benchmark": "growth", "dtype": options.dtype, **machine._asdict(), **describe()}
    print(json.dumps(result | {"tables": rows}))


def _engine(gguf: Path, dtype: str, step_tokens: int = 256) -> Engine:
    pool_mib = POOL_MIB[dtype]
    return Engine(
        EngineSettings(model=str(gguf), dtype=dtype, pool_mib=pool_mib, step_tokens=step_tokens)  # type: ignore[arg-type]
    )


class _Growth:
    def __init__(self, engine: Engine, machine: Machine, rounds: int) -> None:
        self._engine = engine
        self._machine = machine
        self._rounds = rounds
        self._chance = random.Random(0)
        self._submitted = 0

    def of_adapters(self, folder: Path) -> Iterator[tuple[str, list[Row]]]:
        own = register(folder, self._engine, max(CONCURRENT), RANK, files=2)
        for name, refs in (("base only", []), (f"each its own adapter of rank {RANK}", own)):
            title = f"concurrent requests, {name}"
            yield title, self._table(title, {n: self._requests(n, refs) for n in CONCURRENT})
        self._forget(own)
        title = f"registered adapters, {REGISTERED_CONCURRENT} concurrent"
        many = register(folder, self._engine, max(REGISTERED), REGISTERED_RANK)
        yield title, self._print(title, (self._closed(many[:count]) for count in REGISTERED))
        self._forget(many)
        title = f"rank, {CONCURRENT_OF_REST} concurrent, each its own adapter"
        of_ranks = {
            rank: register(folder / "ranks", self._engine, CONCURRENT_OF_REST, rank, files=1)
            for rank in RANKS
        }
        cells = {r: self._requests(len(refs), refs) for r, refs in of_ranks.items()}
        yield title, self._table(title, cells)

    def of_context(self) -> Iterator[tuple[str, list[Row]]]:
        title = f"context, {CONCURRENT_OF_REST} concurrent, base only"
        with _prompts_not_computed(self._engine):
            cells = {
                tokens: self._requests(CONCURRENT_OF_REST, [], tokens - OUTPUT_TOKENS)
                for tokens in CONTEXTS
            }
            yield title, self._table(title, cells)

    def _table(self, title: str, cells: dict[int, list[Submit]]) -> list[Row]:
        """The cells alternate, so that what else the machine does meets all of them."""
        steps: dict[int, list[Step]] = {of: [] for of in cells}
        for turn in range(self._rounds + 1):  # the first warms up
            for of, requests in cells.items():
                seen = self._run(requests, len(requests))
                if turn:
                    steps[of] += [
                        step
                        for step in seen
                        if step.load.decodes and step.load.tokens == len(requests)
                    ]
        return self._print(title, (self._row(of, each) for of, each in steps.items()))

    def _row(self, of: int, steps: list[Step]) -> Row:
        step_s = statistics.median(step.seconds for step in steps)
        floor_s = statistics.median(self._floor_s(step.load) for step in steps)
        return Row(of, 1000 * step_s, steps[0].load.samples / step_s, 1000 * floor_s)

    def _closed(self, refs: list[AdapterRef]) -> Row:
        steps: list[Step] = []
        seconds, answered = 0.0, 0
        for turn in range(self._rounds + 1):
            requests = self._requests(2 * REGISTERED_CONCURRENT, refs)
            drive = Drive(self._engine)
            with watched(self._engine) as seen:
                spent = drive.closed(requests, REGISTERED_CONCURRENT)
            if turn:
                steps += seen
                seconds += spent
                answered += drive.tokens
        floor_s = statistics.mean(self._floor_s(step.load) for step in steps)
        return Row(len(refs), 1000 * seconds / len(steps), answered / seconds, 1000 * floor_s)

    def _floor_s(self, load: Load) -> float:
        return floor.step(self._engine.info, load).seconds(self._machine)

    def _run(self, requests: list[Submit], outstanding: int) -> list[Step]:
        drive = Drive(self._engine)
        with watched(self._engine) as steps:
            drive.closed(requests, outstanding)
        for answer in drive.answers.values():
            assert answer.failed is None, answer.failed
        return steps

    def _requests(
        self, count: int, refs: Sequence[AdapterRef], tokens: int = PROMPT_TOKENS
    ) -> list[Submit]:
        """Over the adapters in a random order, one after another."""
        order = self._chance.sample(refs, len(refs))
        made = []
        for index in range(count):
            self._submitted += 1
            prompt = [
                self._chance.randrange(100, self._engine.info.vocab_size) for _ in range(tokens)
            ]
            made.append(
                Submit(
                    str(self._submitted),
                    prompt,
                    OUTPUT_TOKENS,
                    Sampling(temperature=0),
                    order[index % len(order)] if order else None,
                )
            )
        return made

    def _print(self, title: str, rows: Iterator[Row]) -> list[Row]:
        print(f"\n{title}\n{'':>6} {'step ms':>9} {'tokens/s':>9} {'floor ms':>9} {'share':>6}")
        shown = []
        for row in rows:
            shown.append(row)
            print(f"{row.of:>6} {row.step_ms:>9.2f} {row.tokens_per_s:>9.1f}"
                  f" {row.floor_ms:>9.2f} {row.share:>6.2f}", flush=True)  # fmt: skip
        return shown

    def _forget(self, refs: list[AdapterRef]) -> None:
        for ref in refs:
            self._engine.unload(ref.digest)


@contextmanager
def _prompts_not_computed(engine: Engine) -> Iterator[None]:
    """Prompts get random KV at no cost: a decoding step takes as long with it, and to compute
    eight prompts of 8,000 tokens would take minutes."""
    pages_NP = engine._buffer.pages_NP
    pages_NP[0].normal_()
    # all of the pool, so that no page is one that the system has not given memory yet
    pages_NP[1:] = pages_NP[0]
    forward = engine._forward

    def decode_only(slices: list[Slice]) -> Tensor:
        if all(item.length == 1 for item in slices):
            return forward(slices)
        return torch.zeros(sum(item.samples for item in slices), engine.info.vocab_size)

    with patch.object(engine, "_forward", decode_only):
        yield
