"""The cells that were measured, kept in a file of JSON Lines: a run that was stopped goes on."""

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

NOISE_CORES = 0.3
"""A cell beside which other processes used more than so many cores is marked as noisy."""


class Reading(Struct, frozen=True):
    tokens_per_s: float
    """Output tokens."""
    first_token_s: float | None = None
    """Median of those that came; None where answers come as a whole."""
    in_time: float | None = None
    """Share of requests whose first token came within FIRST_TOKEN_S. One that had none when time
    was up has missed it, as it is not in the median."""
    other_cores: float = 0.0
    """Cores that processes other than the server and its client used meanwhile."""
    report: dict[str, Any] = {}
    """All that the load generator said."""


class Cell(Struct, frozen=True):
    """One server under one load, once."""

    round: int
    server: str
    load: str
    reading: Reading | None = None
    failure: str = ""
    """Why there is no reading."""

    @property
    def is_noisy(self) -> bool:
        return self.reading is not None and self.reading.other_cores > NOISE_CORES


class Answer(Struct, frozen=True):
    """How a server went on from the one prompt that all of them are given."""

    server: str
    text: str


class _Line(Struct, frozen=True, omit_defaults=True):
    setup: dict[str, Any] | None = None
    cell: Cell | None = None
    answer: Answer | None = None


class OtherSetup(Exception):
    """The file holds cells that were measured in another way."""


class Results:
    """Written line by line, so what is measured is kept however the run ends."""

    def __init__(self, file: Path, setup: dict[str, Any]) -> None:
        """Reads what is there. Raises OtherSetup if it can't be put beside what is to come."""
        self._file = file
        self.setup = setup
        self.cells: dict[tuple[int, str, str], Cell] = {}
        self.answers: dict[str, Answer] = {}
        found = None
        for line in _read(file):
            if line.setup is not None:
                found = line.setup
            elif line.cell is not None:
                self._keep(line.cell)
            elif line.answer is not None:
                self.answers[line.answer.server] = line.answer
        if found is None:
            self._append(_Line(setup=setup))
        elif found != setup:
            differing = {name for name in found | setup if found.get(name) != setup.get(name)}
            raise OtherSetup(
                f"{file} was measured with other {', '.join(sorted(differing))}: name another "
                "file, --results FILE, or remove it."
            )

    def has(self, round: int, server: str, load: str) -> bool:
        """Whether it was measured; what failed is tried again."""
        cell = self.cells.get((round, server, load))
        return cell is not None and cell.reading is not None

    def add(self, cell: Cell) -> None:
        self._keep(cell)
        self._append(_Line(cell=cell))

    def add_answer(self, answer: Answer) -> None:
        self.answers[answer.server] = answer
        self._append(_Line(answer=answer))

    def _keep(self, cell: Cell) -> None:
        self.cells[cell.round, cell.server, cell.load] = cell

    def _append(self, line: _Line) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("ab") as out:
            out.write(msgspec.json.encode(line) + b"\n")


def _read(file: Path) -> list[_Line]:
    """A last line that a stopped run left half written is not there."""
    if not file.exists():
        return []
    decoder = msgspec.json.Decoder(_Line)
    whole = file.read_bytes()
    lines, rest = whole[: whole.rfind(b"\n") + 1], whole[whole.rfind(b"\n") + 1 :]
    if rest:
        file.write_bytes(lines)
    return [decoder.decode(line) for line in lines.splitlines()]
