"""Are the GPU kernels right on this machine, and how near are they to its memory bandwidth?

Needs a CUDA GPU, torch ≥ 2.11, triton ≥ 3.6 and numpy, and nothing else of ours. Every kernel is
compared with the reference in plain torch, then timed on layers of Llama-3-8B's shape with random
weights. Caches are flushed before each call, as the base weights flush them in the engine. The
share is the time to move the bytes that must be moved, at the bandwidth measured here, ÷ the time
taken. Whole decoding steps are recorded as CUDA graphs, compared and timed with the same steps
launched one by one. Under 5 minutes.

    python -m benchmarks.gpu_check          all of it
    python -m benchmarks.gpu_check --dry    the comparison alone, in Triton's interpreter, no GPU
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_step import Rows, Steps, difference, times
from gateway.engine.kernels import choose, reference
from gateway.engine.kernels.gpu_graphs import CudaGraphs, Record, Run
from gateway.engine.memory.rows import GROUPS
from tests.engine.kernels.cases import (
    LAYER,
    AttentionCase,
    LoraCase,
    Tolerance,
    attention_case,
    attention_error,
    lora_case,
    lora_error,
)
from tests.engine.kernels.interpreter import use_interpreter


class Model(NamedTuple):
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    page_elements: int
    vocabulary: int

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (q, self.hidden),
            "k_proj": (kv, self.hidden),
            "v_proj": (kv, self.hidden),
            "o_proj": (self.hidden, q),
            "gate_proj": (self.inner, self.hidden),
            "up_proj": (self.inner, self.hidden),
            "down_proj": (self.hidden, self.inner),
            "embed_tokens": (self.hidden, self.vocabulary),
            "lm_head": (self.vocabulary, self.hidden),
        }


LLAMA = Model(4096, 14336, 32, 8, 128, 16, 32 * 2 * 16 * 8 * 128, 128256)
SMALL = Model(96, 160, 6, 2, 16, 16, 2048, 1280)
ODD = Model(40, 56, 6, 2, 20, 5, 400, 333)
"""Nothing in it is a multiple of 16."""

BATCHES = (1, 8, 32, 64)
CONTEXTS = (128, 1024, 4096)
RANKS = (8, 16, 32, 64)
CHUNK = 512
FLUSH_BYTES = 256 * 2**20
REPEATS = 20
MANY = 64
"""Rows of the largest step that is recorded."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_check", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="compare only, without a GPU")
    options = parser.parse_args()
    if options.dry:
        use_interpreter()
        kernels, dtypes = choose("cuda", batch_invariant=False), [torch.float32, torch.bfloat16]
        errors = check(kernels, "cpu", [SMALL, ODD], dtypes)
        _judge(errors | check_graphs(kernels, "cpu", [SMALL, ODD], dtypes, lambda: _again))
        return
    if not torch.cuda.is_available():
        sys.exit(
            f"gpu_check needs a CUDA GPU, and torch {torch.__version__} sees none here. "
            "`--dry` compares the kernels with the reference without one."
        )
    kernels = choose("cuda", batch_invariant=False)
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    errors = check(kernels, "cuda", [SMALL, ODD, LLAMA], dtypes)
    errors |= check_graphs(kernels, "cuda", [SMALL, ODD, LLAMA], dtypes, CudaGraphs)
    bandwidth = memory_bandwidth()
    print(f"\n{torch.cuda.get_device_name()}: {bandwidth / 1e9:.0f} GB/s copied\n")
    rows = [row.over(bandwidth) for row in timings(kernels)]
    steps = list(time_steps(kernels))
    compiled = list(resources())
    result = {"benchmark": "gpu_check", "gpu": torch.cuda.get_device_name(),
              "torch": torch.__version__, "bandwidth": bandwidth, "errors": errors,
              "timings": rows, "steps": steps, "kernels": compiled}  # fmt: skip
    print(json.dumps(result))
    _judge(errors)


def _judge(errors: dict[str, float]) -> None:
    if any(not error <= 1 for error in errors.values()):
        sys.exit("a kernel differs from the reference by more than is allowed")


# --- right? ---------------------------------------------------------------------------------------


def check(
    kernels: ModuleType, device: str, models: list[Model], dtypes: list[torch.dtype]
) -> dict[str, float]:
    """The largest error of each op, as a share of what is allowed."""
    print(f"{'op':<28}{'model':>6}{'dtype':>10}   error ÷ allowed")
    errors: dict[str, float] = {}
    for model in models:
        for dtype in dtypes:
            for op, error in _errors(kernels, device, model, dtype):
                name = {LLAMA: "llama", SMALL: "small", ODD: "odd"}[model]
                kind = str(dtype).removeprefix("torch.")
                errors[f"{op} {name} {kind}"] = error
                verdict = "" if error <= 1 else "   WRONG"
                print(f"{op:<28}{name:>6}{kind:>10}   {error:.3f}{verdict}", flush=True)
    return errors


def _errors(
    kernels: ModuleType, device: str, model: Model, dtype: torch.dtype
) -> Iterator[tuple[str, float]]:
    large = model is LLAMA
    shape = model.heads, model.kv_heads, model.head_dim, model.block_tokens, dtype, device
    decodes = [(context, 1) for context in ((0, 127, 1024, 4095) if large else (0, 5, 300))]
    prefills = [(0, CHUNK), (3000, 300), (1, 2)] if large else [(0, 9), (30, 4)]
    for name, lengths in ("decode", decodes), ("prefill", prefills), ("both", decodes + prefills):
        case = attention_case(lengths, *shape)
        yield f"attention {name}", attention_error(kernels, case, None)
    case = attention_case(decodes + prefills, *shape)
    yield "attention window", attention_error(kernels, case, 20)
    names = list(model.projections)
    ranks = [dict.fromkeys(names, rank) for rank in (1, 3, 12, 64)] + [{"q_proj": 4, "up_proj": 2}]
    tokens = [(None, 2), (0, 1), (1, 3), (2, 0), (3, 17), (4, 2), (0, 1)]
    for group in GROUPS:
        adapted = lora_case(
            ranks, tokens, model.projections, group, model.page_elements, dtype, device
        )
        yield f"lora {group}", lora_error(kernels, adapted)
    yield from _row_errors(kernels, case, model, dtype)


def _row_errors(
    kernels: ModuleType, case: AttentionCase, model: Model, dtype: torch.dtype
) -> Iterator[tuple[str, float]]:
    q_THE, allowed = case.q_THE, Tolerance.of(dtype)
    x_TD = q_THE.flatten(1).contiguous()
    for name, x in ("rms_norm", x_TD), ("rms_norm of heads", q_THE):
        weight = torch.rand(x.shape[-1], device=x.device).to(dtype)
        expected = reference.rms_norm(x, weight, 1e-5)
        yield name, allowed.share(kernels.rms_norm(x, weight, 1e-5), expected)
    angles = torch.rand(len(q_THE), model.head_dim // 2, device=q_THE.device) * 6
    both = torch.cat((angles, angles), dim=-1)
    cos_TE, sin_TE = both.cos().to(dtype), both.sin().to(dtype)
    expected = reference.rotate(q_THE.double(), cos_TE.double(), sin_TE.double())
    yield "rotate", allowed.share(kernels.rotate(q_THE, cos_TE, sin_TE), expected)


def check_graphs(
    kernels: ModuleType,
    device: str,
    models: list[Model],
    dtypes: list[torch.dtype],
    recorder: Callable[[], Record],
) -> dict[str, float]:
    """Of steps with no adapter, 1, 2 and one for each row, after larger and after smaller ones."""
    errors: dict[str, float] = {}
    for model in models:
        for dtype in dtypes:
            rows, context = (MANY, 700) if model is LLAMA else (3, 270)
            mixes = [Rows(rows, 5, rows), Rows(1, context, 1), Rows(2, 40, 2), Rows(rows - 1, 9, 0)]
            with torch.inference_mode():
                steps = Steps(kernels, model, dtype, device, rows, context)
                error = difference(steps, recorder(), [*mixes, *mixes[::-1]])
            name = {LLAMA: "llama", SMALL: "small", ODD: "odd"}[model]
            kind = str(dtype).removeprefix("torch.")
            errors[f"graph of a step {name} {kind}"] = error
            verdict = "" if error <= 1 else "   WRONG"
            print(f"{'graph of a step':<28}{name:>6}{kind:>10}   {error:.3f}{verdict}", flush=True)
    return errors


def _again(run: Run) -> Run:
    """In place of a recording where there is no GPU."""
    run()
    return run


# --- fast? ----------------------------------------------------------------------------------------


class Timing(NamedTuple):
    op: str
    batch: str
    seconds: float
    bytes: float
    """That must be moved at least."""
    flops: float = 0.0

    def over(self, bandwidth: float) -> dict[str, Any]:
        """Print the row of the table, and give it as a dictionary."""
        share = self.bytes / bandwidth / self.seconds
        rate = f"{self.flops / self.seconds / 1e12:>10.1f}" if self.flops else f"{'':>10}"
        print(f"{self.op:<20}{self.batch:<28}{self.seconds * 1e6:>10.1f}"
              f"{self.bytes / 1e6:>10.2f}{share:>8.2f}{rate}", flush=True)  # fmt: skip
        return {**self._asdict(), "share": share}


def timings(kernels: ModuleType) -> Iterator[Timing]:
    print(f"{'op':<20}{'batch':<28}{'µs':>10}{'MB':>10}{'share':>8}{'TFLOP/s':>10}")
    clock = Clock()
    for context in CONTEXTS:
        for batch in BATCHES:
            name = f"{batch} × context {context}"
            yield _time_attention(clock, kernels, name, [(context - 1, 1)] * batch)
    for past in (0, 4096 - CHUNK):
        name = f"chunk {CHUNK} after {past}"
        yield _time_attention(clock, kernels, name, [(past, CHUNK)])
    for group in (name for name in GROUPS if name != "embed"):  # it reads next to nothing
        for batch in BATCHES:
            yield from _time_lora(clock, kernels, group, [1] * batch)
        yield from _time_lora(clock, kernels, group, [CHUNK])
    for tokens in (1, 64, CHUNK):
        yield from _time_rows(clock, kernels, tokens)


def time_steps(kernels: ModuleType) -> Iterator[dict[str, Any]]:
    """Layers of a step on the host's clock, tables included."""
    print(f"\n{'step':<36}{'launched, µs':>14}{'graph, µs':>12}{'×':>7}")
    for rows in BATCHES:
        for adapters in sorted({0, 1, rows}):
            with torch.inference_mode():
                steps = Steps(kernels, LLAMA, torch.bfloat16, "cuda", rows, 1024)
                launched, graph = times(steps, CudaGraphs(), Rows(rows, 1024, adapters))
            name = f"{rows} × context 1024, {adapters} adapters"
            print(f"{name:<36}{launched * 1e6:>14.0f}{graph * 1e6:>12.0f}"
                  f"{launched / graph:>7.2f}", flush=True)  # fmt: skip
            yield {"step": name, "launched": launched, "graph": graph}


def _time_attention(
    clock: "Clock", kernels: ModuleType, name: str, lengths: list[tuple[int, int]]
) -> Timing:
    case = attention_case(
        lengths, LLAMA.heads, LLAMA.kv_heads, LLAMA.head_dim, LLAMA.block_tokens,
        torch.bfloat16, "cuda",
    )  # fmt: skip
    cache = case.buffer.kv_layers[LAYER]
    kernels.write_kv(case.k_TKE, case.v_TKE, cache, case.page_T, case.slot_T)
    seconds = clock.time(
        lambda: kernels.paged_attention(case.q_THE, cache, case.spans, case.scale, None)
    )
    keys = sum(past + new for past, new in lengths)
    kv_bytes = 2 * keys * LLAMA.kv_heads * LLAMA.head_dim * 2
    pairs = sum(new * past + new * (new + 1) / 2 for past, new in lengths)
    flops = 4 * pairs * LLAMA.heads * LLAMA.head_dim
    q_bytes = 2 * len(case.q_THE) * LLAMA.heads * LLAMA.head_dim * 2
    return Timing("paged_attention", name, seconds, kv_bytes + q_bytes, flops)


def _time_lora(
    clock: "Clock", kernels: ModuleType, group: str, runs: list[int]
) -> Iterator[Timing]:
    """Every run of tokens has an adapter of its own; beside it the base's own product."""
    ranks = [RANKS[index % len(RANKS)] for index in range(len(runs))]
    names = list(LLAMA.projections)
    case: LoraCase = lora_case(
        [dict.fromkeys(names, rank) for rank in ranks], list(enumerate(runs)),
        LLAMA.projections, group, LLAMA.page_elements, torch.bfloat16, "cuda",
    )  # fmt: skip
    place = case.pages_NP, case.segments, LAYER, group
    shrunk = kernels.lora_shrink(case.x_TD, *place)
    targets = len(GROUPS[group])
    width, columns = case.x_TD.shape[1], case.y_TC.shape[1]
    tokens, rank_sum = sum(runs), sum(ranks)
    h_bytes = 4 * targets * sum(run * rank for run, rank in zip(runs, ranks, strict=True))
    name = f"{group}, {len(runs)} adapters, {tokens} tokens"
    yield Timing(
        "lora_shrink",
        name,
        clock.time(lambda: kernels.lora_shrink(case.x_TD, *place)),
        2 * (targets * rank_sum * width + tokens * width) + h_bytes,
    )
    yield Timing(
        "lora_expand",
        name,
        clock.time(lambda: kernels.lora_expand(shrunk, *place, case.y_TC)),
        2 * (rank_sum * columns + 2 * tokens * columns) + h_bytes,
    )
    base_CD = torch.randn(columns, width, device="cuda", dtype=torch.bfloat16)
    yield Timing(
        "base, torch's linear",
        name,
        clock.time(lambda: F.linear(case.x_TD, base_CD)),
        2 * (columns * width + tokens * (width + columns)),
        2.0 * tokens * columns * width,
    )


def _time_rows(clock: "Clock", kernels: ModuleType, tokens: int) -> Iterator[Timing]:
    case = attention_case(
        [(0, tokens)], LLAMA.heads, LLAMA.kv_heads, LLAMA.head_dim, LLAMA.block_tokens,
        torch.bfloat16, "cuda",
    )  # fmt: skip
    cache, name = case.buffer.kv_layers[LAYER], f"{tokens} tokens"
    x_TD: Tensor = case.q_THE.flatten(1).contiguous()
    cos_TE = torch.rand(tokens, LLAMA.head_dim, device="cuda", dtype=torch.bfloat16)
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "write_kv": (
            lambda: kernels.write_kv(case.k_TKE, case.v_TKE, cache, case.page_T, case.slot_T),
            4 * case.k_TKE.numel() * 2,
        ),
        "rotate": (lambda: kernels.rotate(case.q_THE, cos_TE, cos_TE), 2 * x_TD.nbytes),
        "rms_norm": (lambda: kernels.rms_norm(x_TD, x_TD[0], 1e-5), 2 * x_TD.nbytes),
    }
    for op, (call, moved) in calls.items():
        yield Timing(op, name, clock.time(call), moved)


class Clock:
    """Times calls as the GPU sees them: in a CUDA graph, so that Python's part does not count."""

    def __init__(self) -> None:
        self._flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        self._flush_s = self._replay_s(self._flush.zero_)

    def time(self, call: Callable[[], object]) -> float:
        """Seconds of one call with cold caches."""

        def flushed() -> None:
            self._flush.zero_()
            call()

        return max(self._replay_s(flushed) - self._flush_s, 1e-7)

    def _replay_s(self, call: Callable[[], object]) -> float:
        call()  # compiles, and builds the tables of the batch
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(REPEATS):
                call()
        graph.replay()
        return statistics.median(_elapsed_s(graph.replay) for _ in range(7)) / REPEATS


def memory_bandwidth() -> float:
    """Bytes per second, read and written, of copies far larger than the caches."""
    from_, to = torch.ones(2, 2**28, dtype=torch.float32, device="cuda")
    copies = [_elapsed_s(lambda: to.copy_(from_)) for _ in range(11)]
    moved: int = 2 * from_.nbytes
    return moved / statistics.median(copies[1:])


def _elapsed_s(call: Callable[[], object]) -> float:
    event: Any = torch.cuda.Event  # has no annotations
    begin, end = event(enable_timing=True), event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def resources() -> Iterator[dict[str, object]]:
    """Registers, spills and shared memory of every kernel that was compiled."""
    from triton.runtime.jit import JITFunction

    from gateway.engine.kernels import gpu_attention, gpu_lora, gpu_rows

    print(f"\n{'kernel':<20}{'registers':>10}{'spills':>8}{'shared':>8}")
    for module in (gpu_attention, gpu_lora, gpu_rows):
        for name, function in vars(module).items():
            if not isinstance(function, JITFunction):
                continue
            for caches in function.device_caches.values():
                for kernel in caches[0].values():
                    shared = kernel.metadata.shared
                    print(f"{name:<20}{kernel.n_regs:>10}{kernel.n_spills:>8}{shared:>8}")
                    yield {"kernel": name, "registers": kernel.n_regs, "shared": shared,
                           "spills": kernel.n_spills}  # fmt: skip


if __name__ == "__main__":
    started = time.perf_counter()
    main()
    print(f"{time.perf_counter() - started:.0f} s", file=sys.stderr)
