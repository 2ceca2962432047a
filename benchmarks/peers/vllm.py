"""vLLM's CPU build."""

import ctypes.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmarks.peers.child import answers, child, local_url
from benchmarks.peers.closed_loop import Model
from benchmarks.peers.layout import ADAPTERS, Layout, adapter_name
from benchmarks.peers.loads import KINDS
from benchmarks.peers.running import HttpServer

BASE = "base"
READY_S = 600.0
"""The first start compiles, for minutes."""
KV_GIB = 3
LORA_SLOTS = 32
"""Distinct adapters in a batch; as many as there are requests."""
RANK_MAX = 32


class Vllm:
    name = "vllm"
    starts = (("base",), ("adapters-32", "adapters-128"))
    start_s = 60.0

    def __init__(self, layout: Layout, port: int) -> None:
        self._layout = layout
        self._port = port

    @contextmanager
    def started(self, kinds: tuple[str, ...]) -> Iterator[HttpServer]:
        adapters = max(KINDS[kind] for kind in kinds)
        log = self._layout.logs / f"{self.name}-{kinds[0]}.log"
        url = local_url(self._port)
        with child(self._command(adapters), self._environ(), log) as server:
            server.wait_for(lambda: answers(f"{url}/health"), READY_S)
            yield HttpServer(server, url, _models)

    def _command(self, adapters: int) -> list[str]:
        command = [str(self._layout.vllm / "bin" / "vllm"), "serve", str(self._layout.hf_model)]
        command += ["--host", "127.0.0.1", "--port", str(self._port)]
        command += ["--served-model-name", BASE, "--dtype", "bfloat16"]
        command += ["--max-model-len", "2048", "--max-num-seqs", "64", "--no-enable-prefix-caching"]
        if adapters:
            command += ["--enable-lora", "--max-loras", str(LORA_SLOTS)]
            command += ["--max-lora-rank", str(RANK_MAX), "--max-cpu-loras", str(ADAPTERS)]
            names = [adapter_name(index) for index in range(adapters)]
            command += ["--lora-modules"]
            command += [f"{name}={self._layout.adapters / name}" for name in names]
        return command

    def _environ(self) -> dict[str, str]:
        cores = sorted(os.sched_getaffinity(0))
        preload = [str(self._layout.vllm / "lib" / "libiomp5.so")]
        if allocator := ctypes.util.find_library("tcmalloc_minimal"):
            preload.append(allocator)
        return {
            **os.environ,
            "LD_PRELOAD": ":".join(preload),
            "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_CACHE_ROOT": str(self._layout.folder / "vllm-cache"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }


def _models(kind: str) -> Sequence[Model]:
    if kind == "base":
        return [Model(BASE)]
    return [Model(adapter_name(index)) for index in range(KINDS[kind])]
