"""Progress on long steps, for a terminal and for a log alike. Standard library only."""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Self, TextIO

QUIET_S = 10.0
"""Where lines cannot be rewritten, a running step says so this often."""
NOTE_CHARACTERS = 60
TAIL_LINES = 25


class StepFailed(Exception):
    """A step of the set-up or of the demo did not work; the message says what to do."""


class Status:
    """One line that is rewritten while a step runs, and stays when it is done."""

    def __init__(self, title: str, out: TextIO | None = None) -> None:
        self._title = title
        self._out = out or sys.stdout
        self._rewrites = self._out.isatty()
        self._begun = self._shown = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    def __enter__(self) -> Self:
        self._write(f"{self._title} …")
        return self

    def show(self, note: str = "") -> None:
        now = time.monotonic()
        if not self._rewrites and now - self._shown < QUIET_S:
            return
        self._shown = now
        self._write(f"{self._title} … {self.seconds:.0f} s  {note[:NOTE_CHARACTERS]}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._write(f"{self._title}: {'done' if kind is None else 'failed'}, {self.seconds:.1f} s")
        if self._rewrites:
            print(file=self._out)

    def _write(self, text: str) -> None:
        if self._rewrites:
            width = shutil.get_terminal_size().columns
            print(f"\r\x1b[2K{text[: width - 1]}", end="", file=self._out, flush=True)
        else:
            print(text.rstrip(), file=self._out, flush=True)


def run(command: list[str], title: str, log: Path, environ: Mapping[str, str] | None = None) -> str:
    """Run a command with its last line as the progress; all of its output is added to `log`.

    Returns the end of the output. Raises StepFailed with it when the command fails.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    tail: deque[str] = deque(maxlen=TAIL_LINES)
    with (
        log.open("a", encoding="utf-8") as record,
        Status(title) as status,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **(environ or {})},
        ) as process,
    ):
        assert process.stdout is not None
        reader = threading.Thread(target=_collect, args=(process.stdout, record, tail), daemon=True)
        reader.start()
        while reader.is_alive():
            reader.join(0.25)
            status.show(tail[-1] if tail else "")
        if process.wait() != 0:
            raise StepFailed("\n".join(tail))
    return "\n".join(tail)


def _collect(source: IO[str], record: IO[str], tail: deque[str]) -> None:
    for line in source:
        record.write(line)
        if line.strip() and not line.startswith("WARNING"):  # pip warns much; the log has it
            tail.append(line.strip())
