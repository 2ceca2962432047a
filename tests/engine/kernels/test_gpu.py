"""The Triton kernels without a GPU: right in the interpreter, compiled for two generations of
GPUs, and never compiled again for another batch."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
triton = pytest.importorskip("triton", reason="Triton comes for Linux only")

from gateway.engine.kernels import gpu, gpu_invariant, reference  # noqa: E402
from gateway.engine.kernels.gpu_adapters import Segments  # noqa: E402
from gateway.engine.kernels.gpu_fixed import FixedTables  # noqa: E402
from gateway.engine.kernels.gpu_graphs import Run  # noqa: E402
from gateway.engine.memory.rows import ALIGNMENT, GROUPS  # noqa: E402
from gateway.engine.model.graphs import DecodeGraphs  # noqa: E402
from gateway.engine.model.warm_up import warm_up  # noqa: E402
from tests.engine.kernels.cases import attention_case, lora, lora_case  # noqa: E402
from tests.engine.kernels.compiling import (  # noqa: E402
    SHARED_BYTES_MAX,
    compile_for,
    resources,
)
from tests.engine.kernels.tiny_decoder import (  # noqa: E402
    MODEL_PROJECTIONS,
    decoder_with,
    mixed_steps,
)

PROJECTIONS = {
    "q_proj": (4096, 4096),
    "k_proj": (1024, 4096),
    "v_proj": (1024, 4096),
    "o_proj": (4096, 4096),
    "gate_proj": (14336, 4096),
    "up_proj": (14336, 4096),
    "down_proj": (4096, 14336),
    "embed_tokens": (4096, 128256),
    "lm_head": (128256, 4096),
}
"""Llama-3-8B."""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: os.environ[key] for key in os.environ if not key.startswith("TRITON")}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    "file", ["interpreted.py", "interpreted_graphs.py", "interpreted_engine.py"]
)
def test_all_is_right_in_the_interpreter(file: str):
    done = run("-m", "pytest", "-q", f"tests/engine/kernels/{file}")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def launch_all(
    lengths: list[tuple[int, int]],
    adapters: list[tuple[int, int]],
    dtype: torch.dtype,
    layers: range = range(2),
    ops: ModuleType = gpu,
) -> None:
    """Every op as a layer of Llama-3-8B calls it, but matrix products that are torch's.
    `adapters`: (rank, tokens)."""
    case = attention_case(lengths, 32, 8, 128, 16, dtype)
    tokens = len(case.q_THE)
    for cache in case.buffer.kv_layers:
        ops.write_kv(case.k_TKE, case.v_TKE, cache, case.page_T, case.slot_T)
        ops.paged_attention(case.q_THE, cache, case.spans, case.scale, None)
    cos_TE = torch.empty(tokens, 128, dtype=dtype)
    for x_THE in case.q_THE, case.k_TKE:
        ops.rotate(x_THE, cos_TE, cos_TE)
        ops.rms_norm(x_THE, cos_TE[0], 1e-5)
    ops.rms_norm(torch.empty(tokens, 4096, dtype=dtype), torch.empty(4096, dtype=dtype), 1e-5)
    if ops is gpu_invariant:
        bias_C = torch.empty(6144, dtype=dtype)
        ops.linear(torch.empty(tokens, 4096, dtype=dtype), bias_C.new_empty(6144, 4096), bias_C)
        ops.linear(torch.empty(tokens, 14336, dtype=dtype), bias_C.new_empty(4096, 14336))
    ranks = [dict.fromkeys(PROJECTIONS, rank) for rank, _ in adapters]
    runs = [(index, count) for index, (_, count) in enumerate(adapters)]
    for group in GROUPS:
        adapted = lora_case(ranks, runs, PROJECTIONS, group, 2**20, dtype)
        for layer in layers:
            lora(ops, adapted, layer, adapted.y_TC)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("ops", [gpu, gpu_invariant], ids=["gpu", "gpu_invariant"])
def test_every_kernel_compiles_without_spilling(
    ops: ModuleType, capability: int, dtype: torch.dtype
):
    with compile_for(capability) as kernels:
        launch_all([(3, 1), (0, 20)], [(8, 1)], dtype, ops=ops)
    found = sorted(resources(kernel) for kernel in kernels.values())
    print(f"\n{'kernel':<12}{'registers':>10}{'stack':>7}{'shared':>8}{'warps':>7}")
    for each in found:
        print(f"{each.name:<12}{each.registers:>10}{each.stack_bytes:>7}"
              f"{each.shared_bytes:>8}{each.warps:>7}")  # fmt: skip
    assert {each.name for each in found} == {
        "_attend", "_expand", "_gather", "_merge", "_rms_norm", "_rotate", "_shrink", "_write_kv",
        *(["_linear"] if ops is gpu_invariant else []),
    }  # fmt: skip
    assert [each for each in found if each.stack_bytes] == []
    assert all(each.shared_bytes <= SHARED_BYTES_MAX[capability] for each in found)


@pytest.mark.parametrize("ops", [gpu, gpu_invariant], ids=["gpu", "gpu_invariant"])
def test_t1_no_batch_compiles_anything_once_one_of_each_kind_has_run(ops: ModuleType):
    launch = partial(launch_all, dtype=torch.bfloat16, ops=ops)
    with compile_for(90) as kernels:
        launch([(3, 1), (0, 20)], [(8, 2)])
        warm = set(kernels)
        launch([(16, 1)], [(1, 1)])
        launch([(15, 1), (31, 16), (700, 1)], [(64, 16), (3, 1), (16, 33)])
        launch([(1, 2)] * 17, [(40, 1)] * 3, layers=range(32))
    assert set(kernels) == warm


@pytest.mark.parametrize("ops", [gpu, gpu_invariant], ids=["gpu", "gpu_invariant"])
def test_t1_the_first_batch_of_an_engine_compiles_all_that_any_batch_needs(ops: ModuleType):
    decoder = decoder_with(ops)
    with compile_for(90) as kernels:
        warm_up(decoder, MODEL_PROJECTIONS)
        warm = set(kernels)
        assert len(list(mixed_steps(decoder))) == 2
    assert set(kernels) == warm


@pytest.mark.parametrize("rank", [1, 3])
def test_t1_the_models_widths_alone_decide_which_rows_are_called_aligned(rank: int):
    """Here the vocabulary alone is no multiple of 16. Else a rank could compile a kernel anew."""
    adapters = [dict.fromkeys(MODEL_PROJECTIONS, rank)]
    for group in GROUPS:
        case = lora_case(adapters, [(0, 1)], MODEL_PROJECTIONS, group, 512, torch.float32)
        work = case.segments.derive(Segments).work(group, case.pages_NP)
        assert work.aligned == (group not in ("embed", "head"))
        fixed = FixedTables(case.pages_NP, 4, MODEL_PROJECTIONS, 1, 64)
        assert fixed.group_work(1, group).aligned == work.aligned
        for segment in case.segments:
            rows = segment.layout.groups[1, group]
            for part in (rows.shrink, *(item.rows for item in rows.expand)):
                assert not any(run.offset % ALIGNMENT for run in part.runs)


def test_t4_two_graphs_of_each_size_are_recorded_and_compile_nothing():
    decoder = decoder_with(gpu)
    tables = FixedTables(decoder.buffer.pages_NP, 4, MODEL_PROJECTIONS, 12, 64)
    recorded: list[Run] = []

    def record(run: Run) -> Run:
        run()
        recorded.append(run)
        return run

    with compile_for(90) as kernels:
        warm_up(decoder, MODEL_PROJECTIONS)
        warm = set(kernels)
        DecodeGraphs(decoder, tables, 12).record(record)
    assert set(kernels) == warm
    assert len(recorded) == 2 * len([1, 2, 4, 8, 12])


@pytest.mark.parametrize("block_tokens", [1, 4])
def test_the_first_batch_leaves_the_pool_as_it_was(block_tokens: int):
    decoder = decoder_with(reference, block_tokens)
    warm_up(decoder, MODEL_PROJECTIONS)
    assert not decoder.buffer.pages_NP.any()


def test_the_first_batch_leaves_out_targets_whose_rows_are_longer_than_a_page():
    decoder = decoder_with(reference, block_tokens=1)
    too_long = dict.fromkeys(MODEL_PROJECTIONS, (1000, 32))
    warm_up(decoder, too_long)
    warm_up(decoder, MODEL_PROJECTIONS | {"o_proj": (1000, 96)})


def test_the_kernels_need_none_of_our_packages_but_torch_triton_and_numpy():
    done = run(
        "-c",
        "import sys\n"
        "sys.modules |= dict.fromkeys(['msgspec', 'safetensors', 'tokenizers', 'numba', 'zmq'])\n"
        "import gateway.engine.kernels.gpu, benchmarks.gpu_check",
    )
    assert done.returncode == 0, done.stderr


def test_the_engine_runs_on_a_cpu_without_triton():
    done = run(
        "-c",
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "import gateway.engine.engine\n"
        "from gateway.engine.kernels import choose\n"
        "print(choose('cpu', True).paged_attention.__name__)",
    )
    assert done.stdout.strip() == "paged_attention", done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where it is missing")
def test_gpu_check_says_that_it_needs_a_gpu():
    done = run("-m", "benchmarks.gpu_check")
    assert done.returncode == 1
    assert done.stderr.startswith("gpu_check needs a CUDA GPU")
