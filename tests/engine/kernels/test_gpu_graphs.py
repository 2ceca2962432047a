"""What is recorded into a CUDA graph, where there is none: the order of the calls, and that nothing
in them would fail or be left out of a recording."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="Triton comes for Linux only")

from gateway.engine.kernels import gpu, gpu_adapters, gpu_spans
from gateway.engine.kernels.gpu_fixed import FixedTables
from gateway.engine.kernels.gpu_graphs import CudaGraphs, Run
from gateway.engine.model.graphs import DecodeGraphs
from tests.engine.kernels.compiling import compile_for
from tests.engine.kernels.tiny_decoder import MODEL_PROJECTIONS, decoder_with

OF_THE_HOST = {"lift_fresh", "lift_fresh_copy", "_local_scalar_dense", "nonzero", "_pin_memory"}
"""Ops that read values of the host, or bring values to it."""


class Ops(TorchDispatchMode):
    """Notes the ops that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_recorded_step_neither_waits_for_the_host_nor_takes_anything_from_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    decoder = decoder_with(gpu)
    tables = FixedTables(decoder.buffer.pages_NP, 4, MODEL_PROJECTIONS, 2, 64)
    ops = Ops()

    def record(run: Run) -> Run:
        with ops:
            run()
        return run

    def no_upload(*_: object) -> None:
        pytest.fail("a table was made while recording")

    monkeypatch.setattr(gpu_spans, "upload", no_upload)
    monkeypatch.setattr(gpu_adapters, "upload", no_upload)
    with compile_for(90):
        DecodeGraphs(decoder, tables, 2).record(record)
    assert {"embedding", "silu"} <= ops.names
    assert not ops.names & OF_THE_HOST


def test_a_recording_follows_one_run_outside_it_and_its_result_stays_in_place(
    monkeypatch: pytest.MonkeyPatch,
):
    calls: list[str] = []

    class Graph:
        def replay(self) -> None:
            calls.append("replay")

    @contextmanager
    def graph(_: Graph, pool: object) -> Iterator[None]:
        calls.append(f"begin in {pool}")
        yield
        calls.append("end")

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)

    def run() -> Tensor:
        calls.append("run")
        return torch.zeros(1)

    replay = CudaGraphs()(run)
    recorded = ["run", "synchronize", "begin in pool", "run", "end"]
    assert calls == recorded
    assert replay() is replay()
    assert calls == [*recorded, "replay", "replay"]
