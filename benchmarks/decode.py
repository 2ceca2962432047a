"""How fast are many requests over several adapters answered, beside transformers + PEFT?

Both sides get the same prompts, adapters, numbers (dtype) and threads in the same process, one
after the other. A round is: `concurrency` prompts of 32 tokens arrive together, each is continued
greedily by 32 tokens; the rate is all output tokens over the whole time, prefill included.
PEFT's side is `generate(adapter_names=…)` on a static batch, its way of mixing adapters.

    python -m benchmarks decode [--dtype float32|bfloat16] [--rounds 3]
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import floor
from benchmarks.adapters import RANKS, make_adapters
from benchmarks.drive import Drive
from benchmarks.machine import describe, read_bandwidth
from gateway.adapters.peft_format import write_manifest
from gateway.engine.engine import Engine
from gateway.engine.messages import (
    AdapterRef,
    EngineSettings,
    ModelInfo,
    Sampling,
    Submit,
)
from tests.reference import load_reference, make_reference

PROMPT_TOKENS = 32
OUTPUT_TOKENS = 32
CONCURRENCY = (1, 8, 32)
ADAPTERS = (0, 1, 8)


class Cell(NamedTuple):
    concurrency: int
    adapters: int
    ours: float
    """Output tokens per second, median over the rounds."""
    peft: float
    floor_share: float
    """Time that moving the bytes would take at least ÷ time of our decoding steps."""
    equal: float
    """Share of the answers that are the same on both sides, token for token."""


class Ours:
    def __init__(self, engine: Engine, adapters: list[AdapterRef]) -> None:
        self.info = engine.info
        self._engine = engine
        self._adapters = adapters
        self.decode_s: list[float] = []

    def answer(self, prompts: list[list[int]], adapters: int) -> list[list[int]]:
        drive = Drive(self._engine)
        for index, prompt in enumerate(prompts):
            adapter = self._adapters[index % adapters] if adapters else None
            drive.submit(
                Submit(str(index), prompt, OUTPUT_TOKENS, Sampling(temperature=0), adapter)
            )
        while self._engine.scheduler.waiting or self._engine.scheduler.running:
            decoding = all(s.pending == 1 for s in self._engine.scheduler.running.values())
            started = time.perf_counter()
            drive.step()
            if decoding and not self._engine.scheduler.waiting:
                self.decode_s.append(time.perf_counter() - started)
        for answer in drive.answers.values():
            assert answer.failed is None, answer.failed
        return [answer.ids for answer in drive.answers.values()]


class Peft:
    """transformers, wrapped by PEFT once there are adapters."""

    def __init__(self, model: Any, folders: list[Path]) -> None:
        self._model = model
        self._folders = folders
        self._wrapped: Any = None

    def answer(self, prompts: list[list[int]], adapters: int) -> list[list[int]]:
        options: dict[str, Any] = {}
        if adapters:
            options["adapter_names"] = [f"a{i % adapters}" for i in range(len(prompts))]
        batch = torch.tensor(prompts)
        model = self._wrap() if adapters else self._model
        with torch.inference_mode():
            out = model.generate(
                input_ids=batch,
                attention_mask=torch.ones_like(batch),
                do_sample=False,
                max_new_tokens=OUTPUT_TOKENS,
                min_new_tokens=OUTPUT_TOKENS,
                **options,
            )
        answers: list[list[int]] = out[:, PROMPT_TOKENS:].tolist()
        return answers

    def _wrap(self) -> Any:
        """Once wrapped, even the base pays PEFT's detours, so this waits until it is needed."""
        from peft import PeftModel

        if self._wrapped is None:
            self._wrapped = PeftModel.from_pretrained(self._model, self._folders[0], "a0")
            for index, folder in enumerate(self._folders[1:], start=1):
                self._wrapped.load_adapter(folder, f"a{index}")
        return self._wrapped


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks decode", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the base model's GGUF")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        measure(options.model, options.dtype, options.rounds, Path(folder))


def measure(gguf: Path, dtype: str, rounds: int, folder: Path) -> None:
    bandwidth = read_bandwidth()
    print(f"reading memory: {bandwidth / 1e9:.1f} GB/s; {describe()}", flush=True)
    engine = Engine(EngineSettings(model=str(gguf), dtype=dtype, pool_mib=1024, step_tokens=512))  # type: ignore[arg-type]
    folders = make_adapters(folder, engine.info, max(ADAPTERS))
    ours = Ours(engine, [write_manifest(path, engine.info) for path in folders])
    model = load_reference(make_reference(gguf)).to(getattr(torch, dtype))
    model.generation_config.eos_token_id = None
    peft = Peft(model, folders)
    print(f"{'concurrent':>10} {'adapters':>8} {'ours':>8} {'PEFT':>8} {'ratio':>6}"
          f" {'of floor':>8} {'equal':>6}")  # fmt: skip
    cells = []
    for adapters in ADAPTERS:
        for concurrency in CONCURRENCY:
            prompts = _prompts(concurrency, engine.info.vocab_size)
            cell = _cell(ours, peft, prompts, adapters, rounds, bandwidth)
            cells.append(cell)
            print(f"{concurrency:>10} {adapters:>8} {cell.ours:>8.1f} {cell.peft:>8.1f}"
                  f" {cell.ours / cell.peft:>6.2f} {cell.floor_share:>8.2f} {cell.equal:>6.2f}",
                  flush=True)  # fmt: skip
    engine.close()
    result = {"benchmark": "decode", "dtype": dtype, "bandwidth": bandwidth, **describe()}
    print(json.dumps(result | {"cells": [cell._asdict() for cell in cells]}))


def _cell(
    ours: Ours, peft: Peft, prompts: list[list[int]], adapters: int, rounds: int, bandwidth: float
) -> Cell:
    warm = ours.answer(prompts, adapters)
    theirs = peft.answer(prompts, adapters)
    ours.decode_s.clear()
    rates: dict[str, list[float]] = {"ours": [], "peft": []}
    for _ in range(rounds):
        rates["ours"].append(_rate(ours.answer, prompts, adapters))
        rates["peft"].append(_rate(peft.answer, prompts, adapters))
    floor_s = _bytes_per_step(ours.info, len(prompts), adapters) / bandwidth
    return Cell(
        len(prompts),
        adapters,
        statistics.median(rates["ours"]),
        statistics.median(rates["peft"]),
        floor_s / statistics.median(ours.decode_s),
        sum(a == b for a, b in zip(warm, theirs, strict=True)) / len(prompts),
    )


def _bytes_per_step(info: ModelInfo, sequences: int, adapters: int) -> float:
    """What a decoding step must read at least, half way through the answers."""
    ranks = [RANKS[index % len(RANKS)] for index in range(adapters)]
    load = floor.decoding(sequences, PROMPT_TOKENS + OUTPUT_TOKENS / 2, ranks)
    return floor.step(info, load).bytes


def _rate(
    answer: Callable[[list[list[int]], int], object], prompts: list[list[int]], adapters: int
) -> float:
    started = time.perf_counter()
    answer(prompts, adapters)
    return len(prompts) * OUTPUT_TOKENS / (time.perf_counter() - started)


def _prompts(count: int, vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(100, vocabulary, (count, PROMPT_TOKENS), generator=generator).tolist()
