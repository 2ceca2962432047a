"""llama.cpp's server, with the model in bfloat16 or in the project's own Q4_1."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.peers.child import answers, child, local_url
from benchmarks.peers.closed_loop import Model
from benchmarks.peers.layout import Layout
from benchmarks.peers.loads import KINDS
from benchmarks.peers.running import HttpServer

READY_S = 120.0
SLOTS = 32
KV_TOKENS = 16384


class Llama:
    starts = (("base",), ("adapters-32",), ("adapters-128",))
    start_s = 5.0

    def __init__(self, name: str, layout: Layout, model: Path, port: int) -> None:
        self.name = name
        self._layout = layout
        self._model = model
        self._port = port

    @contextmanager
    def started(self, kinds: tuple[str, ...]) -> Iterator[HttpServer]:
        (kind,) = kinds
        log = self._layout.logs / f"{self.name}-{kind}.log"
        url = local_url(self._port)
        with child(self._command(KINDS[kind]), os.environ, log) as server:
            server.wait_for(lambda: answers(f"{url}/health"), READY_S)
            yield HttpServer(server, url, _models)

    def _command(self, adapters: int) -> list[str]:
        cores = str(len(os.sched_getaffinity(0)))
        command = [str(self._layout.llama_server), "-m", str(self._model)]
        command += ["--host", "127.0.0.1", "--port", str(self._port), "--no-webui"]
        command += ["-t", cores, "-tb", cores, "-np", str(SLOTS), "-c", str(KV_TOKENS), "-kvu"]
        command += ["--cache-ram", "0", "--no-cache-prompt"]
        if adapters:
            command.append("--lora-init-without-apply")
            for index in range(adapters):
                command += ["--lora", str(self._layout.gguf_adapter(index))]
        return command


def _models(kind: str) -> Sequence[Model]:
    """A request that names no adapter would get all of them at once."""
    if kind == "base":
        return [Model("base")]
    return [Model("base", {"lora": [{"id": index, "scale": 1.0}]}) for index in range(KINDS[kind])]
