"""What does it cost that a request's bits depend on nothing else in the batch?

Two engines of the same model, one with `batch_invariant` on and one with it off, take iterations
in turn in the same process: decodes of 1, 8 and 32 requests, and prompts of 256 tokens, all of
the bare base model. The ratio is that of the medians.

    python -m benchmarks invariance [--dtype float32|bfloat16] [--iterations 40]
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.machine import describe
from gateway.engine.engine import Engine
from gateway.engine.messages import EngineSettings, Failed, Sampling, Submit

CONCURRENCY = (1, 8, 32)
PROMPT_TOKENS = 64
CHUNK = 256


class Row(NamedTuple):
    work: str
    on_ms: float
    off_ms: float
    ratio: float
    """Above 1: the mode costs time."""


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks invariance", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the base model's GGUF")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--iterations", type=int, default=40)
    options = parser.parse_args(arguments)
    on, off = (
        Engine(
            EngineSettings(
                model=str(options.model),
                dtype=options.dtype,
                pool_mib=512,
                step_tokens=512,
                batch_invariant=mode,
            )
        )
        for mode in ("on", "off")
    )
    print(f"{'work':<16}{'on, ms':>9}{'off, ms':>9}{'ratio':>7}")
    rows = []
    for row in _rows(on, off, options.iterations):
        print(f"{row.work:<16}{row.on_ms:>9.1f}{row.off_ms:>9.1f}{row.ratio:>7.2f}", flush=True)
        rows.append(row._asdict())
    result = {"benchmark": "invariance", "dtype": options.dtype, **describe(), "rows": rows}
    print(json.dumps(result))
    on.close()
    off.close()


def _rows(on: Engine, off: Engine, iterations: int) -> list[Row]:
    rows = []
    for count in CONCURRENCY:
        for engine in on, off:
            for index in range(count):
                _submit(engine, f"{index}", PROMPT_TOKENS, iterations + 2)
            while any(each.pending > 1 for each in engine.scheduler.running.values()) or (
                engine.scheduler.waiting
            ):
                _step_ms(engine)
        rows.append(_row(f"decode {count}", on, off, iterations))
        for engine in on, off:
            for index in range(count):
                engine.scheduler.cancel(f"{index}")
    times: list[tuple[float, float]] = []
    for index in range(max(3, iterations // 4)):
        for engine in on, off:
            _submit(engine, f"prompt {index}", CHUNK, 1)
        times.append((_step_ms(on), _step_ms(off)))
    rows.append(_summed(f"prefill {CHUNK}", times))
    return rows


def _row(work: str, on: Engine, off: Engine, iterations: int) -> Row:
    return _summed(work, [(_step_ms(on), _step_ms(off)) for _ in range(iterations)])


def _summed(work: str, times: list[tuple[float, float]]) -> Row:
    on_ms, off_ms = (statistics.median(each) for each in zip(*times, strict=True))
    return Row(work, on_ms, off_ms, on_ms / off_ms)


def _submit(engine: Engine, request_id: str, tokens: int, max_tokens: int) -> None:
    generator = torch.Generator().manual_seed(len(request_id) + tokens)
    prompt = torch.randint(100, engine.info.vocab_size, (tokens,), generator=generator).tolist()
    greedy = Sampling(temperature=0)
    assert not engine.submit(Submit(request_id, prompt, max_tokens, greedy)), "refused"


def _step_ms(engine: Engine) -> float:
    started = time.perf_counter()
    events = engine.step()
    elapsed_s = time.perf_counter() - started
    assert not any(isinstance(event, Failed) for event in events)
    return elapsed_s * 1e3
