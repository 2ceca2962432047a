"""Medians and ratios of the cells, as text and as data."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from benchmarks.peers.loads import FIRST_TOKEN_S, Load
from benchmarks.peers.results import Cell
from benchmarks.peers.targets import Goal, Target, target_of

OURS = "ours"


class Figure(Struct, frozen=True):
    """One server under one load, over all rounds."""

    server: str
    rounds: int
    """How many were measured."""
    median: float
    """Output tokens per second, as are `lowest` and `highest`."""
    lowest: float
    highest: float
    first_token_s: float | None
    """Median over the rounds of each round's median, as is `in_time` of its share."""
    in_time: float | None
    noisy: int
    """How many rounds other processes disturbed."""


class Finding(Struct, frozen=True):
    """A goal, and what was found."""

    goal: Goal
    peer: str | None
    """The best of those that it names; None: none was measured, or ours was not."""
    found: float | None
    met: bool | None


class Row(Struct, frozen=True):
    load: Load
    figures: list[Figure]
    failures: dict[str, str]
    """Server → why it has no figure."""
    needed: Finding
    stretch: Finding
    in_time_met: bool | None
    """None: not asked for, or nothing measured."""

    @property
    def ours(self) -> Figure | None:
        return next((figure for figure in self.figures if figure.server == OURS), None)


def rows_of(loads: Iterable[Load], servers: Sequence[str], cells: Iterable[Cell]) -> list[Row]:
    cells = list(cells)
    return [
        _row(load, servers, [cell for cell in cells if cell.load == load.name]) for load in loads
    ]


def _row(load: Load, servers: Sequence[str], cells: list[Cell]) -> Row:
    figures, failures = [], {}
    for server in servers:
        own = [cell for cell in cells if cell.server == server]
        figure = _figure(server, own)
        if figure is not None:
            figures.append(figure)
        elif own:
            failures[server] = own[-1].failure
    target = target_of(load)
    return Row(
        load,
        figures,
        failures,
        _finding(target.needed, figures),
        _finding(target.stretch, figures),
        _in_time_met(target, figures),
    )


def _figure(server: str, cells: list[Cell]) -> Figure | None:
    readings = [cell.reading for cell in cells if cell.reading is not None]
    if not readings:
        return None
    rates = [reading.tokens_per_s for reading in readings]
    first = [reading.first_token_s for reading in readings if reading.first_token_s is not None]
    in_time = [reading.in_time for reading in readings if reading.in_time is not None]
    return Figure(
        server,
        len(rates),
        statistics.median(rates),
        min(rates),
        max(rates),
        statistics.median(first) if first else None,
        statistics.median(in_time) if in_time else None,
        sum(cell.is_noisy for cell in cells),
    )


def _finding(goal: Goal, figures: Sequence[Figure]) -> Finding:
    ours = next((figure for figure in figures if figure.server == OURS), None)
    best = best_of(figures, goal.peers)
    if ours is None or best is None:
        return Finding(goal, None, None, None)
    found = ours.median / best.median
    return Finding(goal, best.server, found, found >= goal.ratio)


def best_of(figures: Sequence[Figure], peers: str = "") -> Figure | None:
    """The peer with the highest median, of those whose name begins so."""
    named = [f for f in figures if f.server != OURS and f.server.startswith(peers)]
    return max(named, key=lambda figure: figure.median, default=None)


def _in_time_met(target: Target, figures: Sequence[Figure]) -> bool | None:
    ours = next((figure for figure in figures if figure.server == OURS), None)
    if not target.in_time or ours is None or ours.in_time is None:
        return None
    return ours.in_time >= target.in_time


# --- as text --------------------------------------------------------------------------------------


def lines_of(row: Row) -> list[str]:
    lines = [
        f"{row.load.name:<20}{'tokens/s (min–max)':>24}{'first token':>13}"
        f"{f'in {FIRST_TOKEN_S:g} s':>8}{'ours ÷ it':>11}"
    ]
    lines += [_line(figure, row.ours) for figure in row.figures]
    lines += [f"  {server:<18}failed: {why}" for server, why in row.failures.items()]
    lines += [f"  {name}: {_words(finding)}" for name, finding in _findings(row)]
    if row.in_time_met is not None:
        wanted = f"{target_of(row.load).in_time:.0%} of first tokens in {FIRST_TOKEN_S:g} s"
        lines.append(f"  needed: {wanted}, {_met(row.in_time_met)}")
    return lines


def _line(figure: Figure, ours: Figure | None) -> str:
    spread = f"{figure.median:.1f} ({figure.lowest:.1f}–{figure.highest:.1f})"
    first = "" if figure.first_token_s is None else f"{figure.first_token_s:.2f} s"
    in_time = "" if figure.in_time is None else f"{figure.in_time:.0%}"
    ratio = "" if ours is None or ours is figure else f"{ours.median / figure.median:.2f}"
    note = f"   noisy in {figure.noisy} of {figure.rounds}" if figure.noisy else ""
    return f"  {figure.server:<18}{spread:>24}{first:>13}{in_time:>8}{ratio:>11}{note}".rstrip()


def _findings(row: Row) -> list[tuple[str, Finding]]:
    return [("needed", row.needed), ("stretch", row.stretch)]


def _words(finding: Finding) -> str:
    against = f"{finding.goal.peers or 'the best peer'}"
    wanted = f"{finding.goal.ratio:g} × {against}"
    if finding.found is None or finding.met is None:
        return f"{wanted}: not measured"
    return f"{wanted}: {finding.found:.2f} × {finding.peer}, {_met(finding.met)}"


def _met(met: bool) -> str:
    return "met" if met else "missed"


def summary(rows: Sequence[Row]) -> str:
    counts = []
    for name, met in (
        ("needed", [row.needed.met is True and row.in_time_met is not False for row in rows]),
        ("stretch", [row.stretch.met is True for row in rows]),
    ):
        counts.append(f"{name} met in {sum(met)} of {len(rows)} loads")
    return ", ".join(counts)


# --- as data --------------------------------------------------------------------------------------


def data_of(row: Row) -> dict[str, Any]:
    return {
        "load": row.load.name,
        "servers": [asdict(figure) for figure in row.figures],
        "failures": row.failures,
        "in_time_met": row.in_time_met,
    } | {name: asdict(finding) | {"goal": asdict(finding.goal)} for name, finding in _findings(row)}
