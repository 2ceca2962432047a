"""Which matrix product is the fastest, for the matrices of this model and rows from 1 to 256?

Ours as the forward pass runs it (packed panels, all matrices of a kind in one compiled call) beside
torch's on the same numbers and threads: `F.linear`, and oneDNN's on weights it has packed (a
private call of torch's; absent where torch lacks it). What fewer bits could bring stands beside:
torch's products with weights of 8 and 4 bits (private as well), whose answers are other ones.

Each side goes through so many copies of its matrix that none is found in a cache. Sides alternate;
medians. The headline is the sum over all products of a step, and a prefill step of the engine as a
whole: its floating-point operations over its time, as a share of torch's rate at as many rows.

    python -m benchmarks matmul [--dtype float32 bfloat16] [--rounds 5]
"""

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import floor
from benchmarks.drive import Drive
from benchmarks.machine import describe, read_bandwidth
from benchmarks.steps import watched
from gateway.engine.engine import Engine
from gateway.engine.kernels import panels
from gateway.engine.kernels.compiled_step import _multiply
from gateway.engine.kernels.compiling import entry
from gateway.engine.kernels.step_data import Array, Units, flat
from gateway.engine.kernels.team import Team, team
from gateway.engine.messages import EngineSettings, ModelInfo, Sampling, Submit
from gateway.engine.model.compiled_decoder import CompiledDecoder

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CHUNK = ROWS[-1]
CHUNKS = 5
LEAST_BYTES = 64 * 2**20
"""Of all copies of a matrix in 4 bits: more than the third-level cache."""
WHOLE_ROUND_ROWS = 8
"""Up to so many rows a sample goes through all copies; with more, through fewer."""
SETTLE_S = 0.01
"""Between two samples: torch's threads look for more work for some milliseconds after an operation,
and would keep a core from the side that comes next."""
GROUP = 64
"""Weights of 4 bits that share a scale; a common choice."""
OTHER_NUMBERS = ("8 bit", "4 bit")
Side = Callable[[Tensor, int, int], object]
"""Products of these rows with the copies [first, stop)."""


class Shape(NamedTuple):
    columns: int
    width: int
    of_step: int
    """How many such products a step has."""
    panels_of_item: int

    @property
    def weights(self) -> int:
        return self.columns * self.width


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks matmul", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the base model's GGUF")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    print(f"reading memory: {read_bandwidth() / 1e9:.1f} GB/s; {describe()}", flush=True)
    results = [measure(options.model, dtype, options.rounds) for dtype in options.dtype]
    print(json.dumps({"benchmark": "matmul", **describe(), "dtypes": results}))


@torch.inference_mode()
def measure(gguf: Path, dtype: str, rounds: int) -> dict[str, Any]:
    engine = Engine(EngineSettings(model=str(gguf), dtype=dtype, pool_mib=64, step_tokens=CHUNK))  # type: ignore[arg-type]
    shapes = _shapes(engine.info)
    seconds: dict[str, dict[int, dict[str, float]]] = {}
    for name, shape in shapes.items():
        print(f"\n{dtype}, {name}: {shape.width} to {shape.columns}", flush=True)
        seconds[name] = _of_shape(engine, shape, getattr(torch, dtype), rounds)
    _print_steps(dtype, shapes, seconds)
    shares = _prefill(engine, shapes, seconds)
    engine.close()
    return {"dtype": dtype, "seconds": seconds, **shares}


def _shapes(info: ModelInfo) -> dict[str, Shape]:
    of_layers = {
        name: Shape(columns, width, info.layers, 1)
        for name, (columns, width) in floor.products(info).items()
    }
    return of_layers | {"head": Shape(info.vocab_size, info.hidden_size, 1, 8)}


def _of_shape(
    engine: Engine, shape: Shape, dtype: torch.dtype, rounds: int
) -> dict[int, dict[str, float]]:
    """Median seconds of one product, by rows and side. Prints them."""
    copies = math.ceil(LEAST_BYTES / (shape.weights / 2))
    weight = torch.randn(shape.columns, shape.width) / shape.width**0.5
    sides = _sides(engine, shape, weight, dtype, copies)
    print(f"{'rows':>5}" + "".join(f"{name:>22}" for name in sides) + f"{'ours ÷ torch':>14}")
    found: dict[int, dict[str, float]] = {}
    for rows in ROWS:
        x = torch.randn(rows, shape.width).to(dtype)
        found[rows] = _medians(sides, x, copies, rounds)
        cells = ""
        for name, spent in found[rows].items():
            size = shape.weights * _bytes_of_weight(name, dtype)
            rate = 2 * shape.weights * rows / spent
            cells += f"{rate / 1e9:>8.0f} GF {size / spent / 1e9:>5.1f} GB/s"
        print(f"{rows:>5}{cells}{_ratio(found[rows]):>14.2f}", flush=True)
    return found


def _bytes_of_weight(side: str, dtype: torch.dtype) -> float:
    return {"8 bit": 1.0, "4 bit": 0.5}.get(side, dtype.itemsize)


def _medians(sides: dict[str, Side], x: Tensor, copies: int, rounds: int) -> dict[str, float]:
    count = max(1, copies * min(WHOLE_ROUND_ROWS, len(x)) // len(x))
    spent: dict[str, list[float]] = {name: [] for name in sides}
    first = 0
    for turn in range(rounds + 1):  # the first warms up
        for name, side in sides.items():
            time.sleep(SETTLE_S)
            started = time.perf_counter()
            side(x, first, first + count)
            if turn:
                spent[name].append((time.perf_counter() - started) / count)
        first = 0 if first + 2 * count > copies else first + count
    return {name: statistics.median(values) for name, values in spent.items()}


def _sides(
    engine: Engine, shape: Shape, weight: Tensor, dtype: torch.dtype, copies: int
) -> dict[str, Side]:
    """Those that there are; each that computes the same numbers is checked to do so."""
    weights = [weight.to(dtype).clone() for _ in range(copies)]
    sides: dict[str, Side] = {"ours": _Ours(engine, shape, weights[0], copies)}

    def plain(x: Tensor, first: int, stop: int) -> Tensor:
        for each in weights[first:stop]:
            y = F.linear(x, each)
        return y

    sides["F.linear"] = plain
    makers: dict[str, Callable[[], Side]] = {
        "oneDNN packed": lambda: _one_dnn(weights),
        "8 bit": lambda: _eight_bits(weight, dtype, copies),
        "4 bit": lambda: _four_bits(shape, dtype, copies),
    }
    x = torch.randn(4, shape.width).to(dtype)
    expected = F.linear(x.float(), weights[0].float())
    for name, make in makers.items():
        try:
            side = make()
            side(x, 0, 1)
        except (AttributeError, RuntimeError, NotImplementedError) as error:
            print(f"no {name}: {str(error).splitlines()[0]}")
        else:
            sides[name] = side
    for name in ("ours", "oneDNN packed"):
        if name in sides:
            y: Any = sides[name](x, 0, 1)
            torch.testing.assert_close(y.float(), expected, rtol=2e-2, atol=2e-2)
    return sides


@entry
def _run(
    claims: Any, x: Any, rows: Any, packed: Any, at_X: Any, width: Any, columns: Any,
    panels_of_item: Any, pool: Any, place: Any, units: Any, scratch: Any, out: Any,
) -> None:  # fmt: skip
    for index in range(len(at_X)):
        _multiply(claims, index, x, rows, packed, at_X[index], width, columns, panels_of_item,
                  pool, place, units, scratch, out)  # fmt: skip


class _Ours:
    """The forward pass's own loop, without adapters."""

    def __init__(self, engine: Engine, shape: Shape, weight: Tensor, copies: int) -> None:
        decoder = engine._decoder
        assert isinstance(decoder, CompiledDecoder)
        self._decoder, self._shape = decoder, shape
        self._team: Team = team(torch.get_num_threads())
        size = panels.elements(shape.columns, shape.width, weight.dtype)
        packed = torch.empty(copies * size, dtype=weight.dtype)
        panels.pack(weight, packed[:size])
        packed.view(copies, size)[1:] = packed[:size]
        self._packed = flat(packed)
        self._at_X: Array = np.arange(copies, dtype=np.int64) * size
        self._out: Array = np.zeros(max(ROWS) * shape.columns, dtype=np.float32)
        none = np.zeros(0, dtype=np.int64)
        self._units = Units(none, none, none, np.zeros((0, 7), dtype=np.int64), 0, 1)

    def __call__(self, x: Tensor, first: int, stop: int) -> Tensor:
        shape = self._shape
        assert x.shape[1] % 2 == 0, "rows of 16 bits are made of pairs"
        self._team.run(
            stop - first,
            _run,
            flat(x),
            np.int64(len(x)),
            self._packed,
            self._at_X[first:stop],
            np.int64(shape.width),
            np.int64(shape.columns),
            np.int64(shape.panels_of_item),
            self._decoder._pool,
            (np.int64(0), np.int64(0)),
            self._units,
            self._decoder._scratch,
            self._out,
        )
        return torch.from_numpy(self._out)[: len(x) * shape.columns].view(len(x), -1)


def _one_dnn(weights: list[Tensor]) -> Side:
    operations = torch.ops.mkldnn
    # packed for a number of rows, so for each anew, as a server might keep two of them
    packed: dict[int, list[Tensor]] = {}

    def run(x: Tensor, first: int, stop: int) -> Tensor:
        rows = len(x)
        if rows not in packed:
            packed.clear()
            packed[rows] = [operations._reorder_linear_weight(each, rows) for each in weights]
        for each in packed[rows][first:stop]:
            y: Tensor = operations._linear_pointwise(x, each, None, "none", [], "")
        return y

    return run


def _eight_bits(weight: Tensor, dtype: torch.dtype, copies: int) -> Side:
    scale_C = weight.abs().amax(1) / 127
    whole = (weight / scale_C[:, None]).round().to(torch.int8)
    weights, scale = [whole.clone() for _ in range(copies)], scale_C.to(dtype)

    def run(x: Tensor, first: int, stop: int) -> Tensor:
        for each in weights[first:stop]:
            y: Tensor = torch._weight_int8pack_mm(x, each, scale)
        return y

    return run


def _four_bits(shape: Shape, dtype: torch.dtype, copies: int) -> Side:
    whole = torch.randint(0, 16, (shape.columns, shape.width), dtype=torch.int32)
    packed: Tensor = torch._convert_weight_to_int4pack_for_cpu(whole, 1)
    weights = [packed.clone() for _ in range(copies)]
    scales_and_zeros = torch.rand(shape.width // GROUP, shape.columns, 2).to(dtype)

    def run(x: Tensor, first: int, stop: int) -> Tensor:
        for each in weights[first:stop]:
            y: Tensor = torch._weight_int4pack_mm_for_cpu(x, each, GROUP, scales_and_zeros)
        return y

    return run


def _best_of_torch(spent: dict[str, float]) -> float:
    """Seconds of the fastest that computes the same numbers."""
    return min(spent[name] for name in spent if name not in ("ours", *OTHER_NUMBERS))


def _ratio(spent: dict[str, float]) -> float:
    """Our speed over the best of torch's."""
    return _best_of_torch(spent) / spent["ours"]


def _print_steps(
    dtype: str, shapes: dict[str, Shape], seconds: dict[str, dict[int, dict[str, float]]]
) -> None:
    """Milliseconds of all products of a step, the output embeddings' for each row."""
    sides = [name for name in seconds["qkv"][1] if all(name in s[1] for s in seconds.values())]
    print(f"\n{dtype}, all products of a step, ms")
    print(f"{'rows':>5}" + "".join(f"{name:>15}" for name in sides) + f"{'ours ÷ torch':>14}")
    for rows in ROWS:
        total = {
            side: sum(shape.of_step * seconds[name][rows][side] for name, shape in shapes.items())
            for side in sides
        }
        cells = "".join(f"{1000 * spent:>15.2f}" for spent in total.values())
        print(f"{rows:>5}{cells}{_ratio(total):>14.2f}", flush=True)


def _prefill(
    engine: Engine, shapes: dict[str, Shape], seconds: dict[str, dict[int, dict[str, float]]]
) -> dict[str, float]:
    """Share of torch's rate that a whole step of CHUNK tokens comes to, and its products alone."""
    chance, drive = random.Random(0), Drive(engine)
    with watched(engine) as steps:
        for index in range(CHUNKS + 1):
            prompt = [chance.randrange(100, engine.info.vocab_size) for _ in range(CHUNK)]
            drive.submit(Submit(str(index), prompt, 1, Sampling(temperature=0)))
            drive.finish()
    step_s = statistics.median(step.seconds for step in steps[1:])
    flops = floor.step(engine.info, steps[0].load).flops
    layers = {name: shape for name, shape in shapes.items() if name != "head"}
    best = max(
        2 * CHUNK * shape.weights / _best_of_torch(seconds[name][CHUNK])
        for name, shape in layers.items()
    )
    products_s = sum(s.of_step * seconds[name][CHUNK]["ours"] for name, s in layers.items())
    of_products = 2 * CHUNK * sum(s.of_step * s.weights for s in layers.values())
    shares = {
        "prefill_share": flops / step_s / best,
        "prefill_products_share": of_products / products_s / best,
    }
    print(
        f"prefill of {CHUNK} tokens: {1000 * step_s:.1f} ms, {flops / step_s / 1e9:.0f} of torch's "
        f"{best / 1e9:.0f} GFLOP/s at best: {shares['prefill_share']:.2f} of it; "
        f"the layers' products alone {shares['prefill_products_share']:.2f}",
        flush=True,
    )
    return shares
