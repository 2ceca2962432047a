"""One cell of a server: `loragate bench serve` as a client in a process of its own."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from benchmarks.peers.child import Failed
from benchmarks.peers.loads import FIRST_TOKEN_S, OUTPUT_TOKENS, PROMPT_TOKENS, VOCABULARY
from benchmarks.peers.results import Reading

REPOSITORY = Path(__file__).resolve().parent.parent.parent
POPULARITY_ALPHA = 1.0
EXTRA = {"ignore_eos": True, "temperature": 0}
WARM_UP_REQUESTS = 4
OVERTIME_S = 150.0
"""What the warm-up and the answers that are still running when time is up may take."""


class Model(Struct, frozen=True):
    """Who is asked: a name, and what else a request for it says."""

    model: str
    extra: dict[str, Any] = {}


def closed_loop(
    url: str,
    key: str,
    models: Sequence[Model],
    concurrency: int,
    seconds: float,
    seed: int,
    pid: int,
) -> Reading:
    """`pid`: the server, which is watched with all processes below it.

    Raises Failed if a request failed, no token came, or it took far too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked, report = Path(folder) / "models.jsonl", Path(folder) / "report.json"
        lines = [{"model": model.model, "extra": model.extra} for model in models]
        asked.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        command = [sys.executable, "-m", "gateway", "bench", "serve", "--url", f"{url}/v1"]
        command += ["--models", str(asked), "--alpha", str(POPULARITY_ALPHA)]
        command += ["--endpoint", "completions", "--extra", json.dumps(EXTRA)]
        command += ["--concurrency", str(concurrency), "--duration", str(seconds)]
        command += ["--warmup", str(WARM_UP_REQUESTS), "--seed", str(seed)]
        command += ["--prompt-tokens", _range(PROMPT_TOKENS)]
        command += ["--output-tokens", _range(OUTPUT_TOKENS), "--vocab", _range(VOCABULARY)]
        command += ["--slo-ttft", str(FIRST_TOKEN_S)]
        command += ["--pid", str(pid), "--json", str(report), "--quiet"]
        environ = {**os.environ, "LORAGATE_API_KEY": key}
        try:
            done = subprocess.run(
                command,
                cwd=REPOSITORY,
                env=environ,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=seconds + OVERTIME_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Failed(f"not done {OVERTIME_S:.0f} s after its time was up") from None
        if not report.exists():  # it has one even if every request failed
            raise Failed(f"bench serve: {done.stderr.strip()}")
        return reading_of(json.loads(report.read_text()))


def reading_of(report: dict[str, Any]) -> Reading:
    """What the load generator reports. Raises Failed if a request failed, or no token came."""
    requests = report["requests"]
    if requests["failed"]:
        raise Failed(f"{requests['failed']} requests failed: {requests['examples']}")
    if not report["output_tokens_per_s"]:
        raise Failed("not one token came in time")
    return Reading(
        report["output_tokens_per_s"],
        report["ttft_s"]["p50"],
        report["slo"]["attained_ttft"],
        report["client"]["other_cores"],
        report,
    )


def _range(bounds: tuple[int, int]) -> str:
    return f"{bounds[0]}:{bounds[1]}"
