"""How long is it from the start of `loragate serve` to Ready, how fast are the first ten requests,
and what does the server hold in memory at rest?

The real server with the real engine, started anew in each round; the first start, which may still
have code to compile, does not count. Memory is PSS of all its processes, beside the weights and the
pool that it must have.

    python -m benchmarks start [--dtype bfloat16] [--rounds 3]
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx

from gateway import settings
from gateway.bench.processes import ProcessWatch
from tests.databases import free_port
from tests.serving import issue_key

START_S = 120.0
REQUESTS = 10
POOL_MIB = 256
WEIGHTS_MIB = {"float32": 513.0, "bfloat16": 256.7}
"""Of SmolLM2-135M, whose output embeddings are the input's too."""
SETTLE_S = 1.0


class Round(NamedTuple):
    ready_s: float
    first_bytes_ms: list[float]
    pss_mib: float


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks start", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="SmolLM2-135M's GGUF")
    parser.add_argument("--dtype", default="bfloat16", choices=list(WEIGHTS_MIB))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        environ = {
            "LORAGATE_DATA_DIR": folder,
            "LORAGATE_MODEL": str(options.model.absolute()),
            "LORAGATE_SERVER__PORT": str(free_port()),
            "LORAGATE_ENGINE__DTYPE": options.dtype,
            "LORAGATE_ENGINE__POOL_MIB": str(POOL_MIB),
        }
        with _serving(environ):
            key = asyncio.run(issue_key(settings.load(environ=environ))).text.reveal()
        rounds = [_round(environ, key) for _ in range(options.rounds)]
    must_mib = WEIGHTS_MIB[options.dtype] + POOL_MIB
    first, tenth = (statistics.median(r.first_bytes_ms[at] for r in rounds) for at in (0, -1))
    ready_s = statistics.median(r.ready_s for r in rounds)
    pss_mib = statistics.median(r.pss_mib for r in rounds)
    print(f"ready after {ready_s:.1f} s")
    print(f"first bytes of the first request after {first:.0f} ms, of the tenth {tenth:.0f} ms")
    print(f"at rest {pss_mib:.0f} MiB: {pss_mib - must_mib:.0f} beside weights and pool")
    result = {
        "benchmark": "start",
        "dtype": options.dtype,
        "must_mib": must_mib,
        "rounds": [each._asdict() for each in rounds],
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": round(os.getloadavg()[0], 2),
    }
    print(json.dumps(result))


def _round(environ: dict[str, str], key: str) -> Round:
    began = time.perf_counter()
    with _serving(environ) as server:
        ready_s = time.perf_counter() - began
        first_bytes_ms = [_first_bytes_ms(environ, key, number) for number in range(REQUESTS)]
        return Round(ready_s, first_bytes_ms, asyncio.run(_pss_mib(server.pid)))


@contextmanager
def _serving(environ: dict[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    server = subprocess.Popen(
        [sys.executable, "-m", "gateway", "serve"],
        env=os.environ | {"PYTHONPATH": str(Path.cwd())} | environ,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + START_S
        while not _is_ready(environ):
            assert server.poll() is None, "the server did not start"
            assert time.monotonic() < deadline, "the server was not ready in time"
            time.sleep(0.02)
        yield server
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def _url(environ: dict[str, str]) -> str:
    return f"http://127.0.0.1:{environ['LORAGATE_SERVER__PORT']}"


def _is_ready(environ: dict[str, str]) -> bool:
    try:
        return httpx.get(f"{_url(environ)}/health/ready").is_success
    except httpx.TransportError:
        return False


def _first_bytes_ms(environ: dict[str, str], key: str, number: int) -> float:
    body = {
        "model": Path(environ["LORAGATE_MODEL"]).stem,
        "messages": [{"role": "user", "content": f"Hello, this is request {number}. Who is it?"}],
        "max_tokens": 4,
        "stream": True,
    }
    began = time.perf_counter()
    with httpx.stream(
        "POST",
        f"{_url(environ)}/v1/chat/completions",
        json=body,
        headers={"authorization": f"Bearer {key}"},
        timeout=30,
    ) as response:
        pieces = response.iter_raw()
        next(pieces)
        waited_ms = (time.perf_counter() - began) * 1000
        for _ in pieces:
            pass
    assert response.is_success, response.status_code
    return waited_ms


async def _pss_mib(pid: int) -> float:
    await asyncio.sleep(SETTLE_S)
    async with ProcessWatch((pid,)) as watch:
        peak_mib = watch.usage().peak_pss_mib
    assert peak_mib is not None
    return peak_mib
