"""transformers + PEFT: `generate(adapter_names=…)` on static batches, in a process of its own."""

import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from benchmarks.peers.child import Child, Failed, child
from benchmarks.peers.layout import Layout, adapter_name, python
from benchmarks.peers.loads import KINDS, Load
from benchmarks.peers.results import Reading
from benchmarks.peers.static_batch import Batch, rate

SCRIPT = Path(__file__).parent / "generate_batches.py"
READY_S = 240.0
ANSWER_S = 240.0


class Peft:
    starts = (("static",),)
    start_s = 40.0

    def __init__(self, dtype: str, layout: Layout) -> None:
        self.name = f"peft-{dtype}"
        self._dtype = dtype
        self._layout = layout

    @contextmanager
    def started(self, kinds: tuple[str, ...]) -> Iterator["Generating"]:
        adapters = max(KINDS[kind] for kind in kinds)
        command = [str(python(self._layout.hf)), "-P", str(SCRIPT), "--dtype", self._dtype]
        command += ["--model", str(self._layout.hf_model)]
        command += [str(self._layout.adapters / adapter_name(index)) for index in range(adapters)]
        log = self._layout.logs / f"{self.name}.log"
        environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
        with child(command, environ, log, stdout=subprocess.PIPE) as process:
            tokenizer = Tokenizer.from_file(str(self._layout.hf_model / "tokenizer.json"))
            generating = Generating(process, tokenizer)
            generating.receive(READY_S)
            yield generating


class Generating:
    def __init__(self, child: Child, tokenizer: Tokenizer) -> None:
        self._child = child
        self._tokenizer = tokenizer

    def measure(self, load: Load, seconds: float, round: int) -> Reading:
        pid = self._child.process.pid
        return rate(self._answer, pid, load, seconds, round)

    def go_on(self, prompt: list[int], tokens: int) -> str:
        ids = self._answer(Batch([prompt], [adapter_name(0)], tokens))[0]
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def _answer(self, batch: Batch) -> list[list[int]]:
        stdin = self._child.process.stdin
        assert stdin is not None
        try:
            stdin.write(msgspec.json.encode(batch) + b"\n")
            stdin.flush()
        except BrokenPipeError:
            raise Failed(f"ended: {self._child.log_end()}") from None
        ids: list[list[int]] = self.receive(ANSWER_S)["ids"]
        assert all(len(answer) == batch.tokens for answer in ids)
        return ids

    def receive(self, limit_s: float) -> dict[str, Any]:
        """Its next line, which it writes whole. Raises Failed."""
        stdout = self._child.process.stdout
        assert stdout is not None
        begun = time.monotonic()
        if not select.select([stdout], [], [], limit_s)[0]:
            raise Failed(f"no answer after {time.monotonic() - begun:.0f} s")
        line = stdout.readline()
        if not line:
            raise Failed(f"ended: {self._child.log_end()}")
        answer: dict[str, Any] = json.loads(line)
        return answer
