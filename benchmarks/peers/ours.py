"""Loragate itself: `loragate serve` with a fresh database, one tenant, and its adapters."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import httpx

from benchmarks.peers.child import Failed, answers, child, local_url
from benchmarks.peers.closed_loop import REPOSITORY, Model
from benchmarks.peers.layout import Layout, adapter_name
from benchmarks.peers.loads import KINDS, Load
from benchmarks.peers.results import Reading
from benchmarks.peers.running import HttpServer
from benchmarks.peers.static_batch import Batch, rate

READY_S = 300.0
SHELL_S = 60.0
UPLOAD_S = 120.0
ANSWER_S = 240.0
TENANT = "bench"


class Ours:
    name = "ours"
    starts = (("base",), ("adapters-32", "adapters-128"), ("static",))
    start_s = 20.0

    def __init__(self, layout: Layout, port: int, options: Mapping[str, str]) -> None:
        """`options`: settings other than the defaults, `{"engine.dtype": "bfloat16"}`."""
        self._layout = layout
        self._port = port
        self._options = options
        self._uploaded = 0
        self._key = ""

    def __enter__(self) -> Self:
        """Its data last from the first start to the last."""
        self._layout.folder.mkdir(parents=True, exist_ok=True)
        self._data = TemporaryDirectory(prefix="ours-", dir=self._layout.folder)
        (Path(self._data.name) / "loragate.toml").touch()
        return self

    def __exit__(self, *_: object) -> None:
        self._data.cleanup()

    @contextmanager
    def started(self, kinds: tuple[str, ...]) -> Iterator["OurServer"]:
        self._key = self._key or self._make_key()
        log = self._layout.logs / f"{self.name}-{kinds[0]}.log"
        command = [*self._loragate(), "serve", "--until-stdin-ends"]
        url = local_url(self._port)
        with child(command, self._environ(), log) as server:
            server.wait_for(lambda: answers(f"{url}/health/ready"), READY_S)
            self._upload(url, max(KINDS[kind] for kind in kinds))
            yield OurServer(server, url, self._models, self._key)

    def _loragate(self) -> list[str]:
        config = Path(self._data.name) / "loragate.toml"  # else one in this folder would count
        return [sys.executable, "-m", "gateway", "--config", str(config)]

    def _environ(self) -> dict[str, str]:
        ours = ("LORAGATE_", "DATABASE_URL", "ADAPTER_STORE")
        environ = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        settings = {"server.port": str(self._port), "engine.model": str(self._layout.gguf)}
        for name, value in (settings | dict(self._options)).items():
            environ[f"LORAGATE_{name.replace('.', '__').upper()}"] = value
        environ["LORAGATE_DATA_DIR"] = str(Path(self._data.name) / "data")
        environ["PYTHONPATH"] = str(REPOSITORY)
        return environ

    def _make_key(self) -> str:
        self._shell("tenants", "create", TENANT)
        key: str = json.loads(self._shell("keys", "create", TENANT, "--json"))["key"]
        return key

    def _shell(self, *arguments: str) -> str:
        try:
            done = subprocess.run(
                [*self._loragate(), *arguments],
                env=self._environ(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=SHELL_S,
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"{' '.join(arguments)}: not done after {SHELL_S:.0f} s") from None
        if done.returncode != 0:
            raise Failed(f"{' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def _upload(self, url: str, adapters: int) -> None:
        """Those that are not there yet."""
        with _client(url, self._key, UPLOAD_S) as client:
            for index in range(self._uploaded, adapters):
                folder = self._layout.adapter(index)
                files = {
                    "config": (folder / "adapter_config.json").read_bytes(),
                    "weights": (folder / "adapter_model.safetensors").read_bytes(),
                }
                _post(client, "/v1/adapters", data={"name": adapter_name(index)}, files=files)
                self._uploaded = index + 1

    def _models(self, kind: str) -> Sequence[Model]:
        if kind == "base":
            return [Model(self._layout.gguf.stem)]
        return [Model(adapter_name(index)) for index in range(KINDS[kind])]


class OurServer(HttpServer):
    def measure(self, load: Load, seconds: float, round: int) -> Reading:
        if load.kind == "static":
            pid = self.child.process.pid
            return rate(self._answer, pid, load, seconds, round)
        return super().measure(load, seconds, round)

    def _answer(self, batch: Batch) -> None:
        """All at the same time."""
        with (
            _client(self.url, self.key, ANSWER_S) as client,
            ThreadPoolExecutor(len(batch.prompts)) as threads,
        ):
            ask = [
                threads.submit(_complete, client, prompt, adapter, batch.tokens)
                for prompt, adapter in zip(batch.prompts, batch.adapters, strict=True)
            ]
            for asked in ask:
                asked.result()


def _complete(client: httpx.Client, prompt: list[int], model: str, tokens: int) -> None:
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    answer = _post(client, "/v1/completions", json=body | {"ignore_eos": True})
    assert answer["usage"]["completion_tokens"] == tokens


def _post(client: httpx.Client, path: str, **content: Any) -> dict[str, Any]:
    try:
        response = client.post(path, **content)
    except httpx.HTTPError as error:
        raise Failed(f"{path}: {error or type(error).__name__}") from None
    if response.is_error:
        raise Failed(f"{path}: {response.text}")
    answer: dict[str, Any] = response.json()
    return answer


def _client(url: str, key: str, limit_s: float) -> httpx.Client:
    return httpx.Client(
        base_url=url,
        headers={"authorization": f"Bearer {key}"},
        timeout=limit_s,
        limits=httpx.Limits(max_connections=None),
        trust_env=False,
    )
