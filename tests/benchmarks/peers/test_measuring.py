"""Who is measured when, and what is left of a peer that does not do as it should."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from benchmarks.peers.child import Failed
from benchmarks.peers.layout import Layout
from benchmarks.peers.loads import Load, select
from benchmarks.peers.measuring import estimate_s, measure, turns_of
from benchmarks.peers.results import Answer, Cell, Reading, Results


@dataclass
class FakePeer:
    """Fails at what it is told to."""

    name: str
    starts: tuple[tuple[str, ...], ...] = (("base",), ("adapters-32", "adapters-128"))
    start_s: float = 10.0
    fails: tuple[str, ...] = ()
    measured: list[str] = field(default_factory=list)

    @contextmanager
    def started(self, kinds: tuple[str, ...]) -> Iterator["FakePeer"]:
        if "start" in self.fails:
            raise Failed("stopped while starting: no such library")
        yield self
        if "stop" in self.fails:
            raise Failed("processes [7] are left of it")

    def measure(self, load: Load, seconds: float, round: int) -> Reading:
        if load.name in self.fails:
            raise Failed("no request was answered in time")
        self.measured.append(load.name)
        return Reading(10.0 + round)

    def go_on(self, prompt: list[int], tokens: int) -> str:
        return f"{len(prompt)} then {tokens}"


def folder(path: Path) -> Layout:
    layout = Layout(path)
    layout.hf_model.mkdir(parents=True)
    Tokenizer(WordLevel({"x": 0}, unk_token="x")).save(str(layout.hf_model / "tokenizer.json"))
    return layout


def results(layout: Layout) -> Results:
    return Results(layout.results, {})


def test_like_loads_are_near_and_every_other_round_is_in_reverse(tmp_path: Path):
    one, other = FakePeer("one"), FakePeer("other", starts=(("base",), ("adapters-32",)))
    turns = turns_of(
        [one, other], select(["base", "adapters-32"]), 2, Results(tmp_path / "results", {})
    )
    assert [(turn.round, turn.peer.name, turn.kinds) for turn in turns] == [
        (0, "one", ("base",)),
        (0, "other", ("base",)),
        (0, "one", ("adapters-32", "adapters-128")),
        (0, "other", ("adapters-32",)),
        (1, "other", ("base",)),
        (1, "one", ("base",)),
        (1, "other", ("adapters-32",)),
        (1, "one", ("adapters-32", "adapters-128")),
    ]


def test_a_stopped_run_goes_on_with_what_is_missing(tmp_path: Path):
    layout, loads = folder(tmp_path), select(["base"])
    peer = FakePeer("one")
    (turn,) = turns_of([peer], loads, 1, results(layout))
    measure(turn, 1.0, layout, results(layout))
    assert turns_of([peer], loads, 1, results(layout)) == []
    (turn,) = turns_of([peer], [*loads, Load("adapters-32", 8)], 1, results(layout))
    assert [load.name for load in turn.loads] == ["adapters-32/c8"]
    assert len(turns_of([peer], loads, 2, results(layout))) == 1


def test_the_estimate_is_of_what_is_left(tmp_path: Path):
    layout, loads = folder(tmp_path), select(["base"])
    peer = FakePeer("one")
    turns = turns_of([peer], loads, 2, results(layout))
    whole = estimate_s(turns, 20.0)
    assert whole > 2 * (10 + 3 * 20)
    measure(turns[0], 20.0, layout, results(layout))
    assert estimate_s(turns_of([peer], loads, 2, results(layout)), 20.0) == whole / 2


def test_a_peer_that_does_not_start_has_the_reason_in_every_cell(tmp_path: Path):
    layout = folder(tmp_path)
    (turn,) = turns_of([FakePeer("one", fails=("start",))], select(["base"]), 1, results(layout))
    measure(turn, 1.0, layout, results(layout))
    cells = results(layout).cells.values()
    assert {cell.load for cell in cells} == {"base/c1", "base/c8", "base/c32"}
    assert {cell.failure for cell in cells} == {"stopped while starting: no such library"}
    assert turns_of([FakePeer("one")], select(["base"]), 1, results(layout)) == [
        turn.__class__(0, FakePeer("one"), ("base",), turn.loads)
    ]


def test_one_load_that_fails_leaves_the_others(tmp_path: Path):
    layout = folder(tmp_path)
    peer = FakePeer("one", fails=("base/c8",))
    (turn,) = turns_of([peer], select(["base"]), 1, results(layout))
    measure(turn, 1.0, layout, results(layout))
    assert peer.measured == ["base/c1", "base/c32"]
    found = results(layout).cells[0, "one", "base/c8"]
    assert found == Cell(0, "one", "base/c8", failure="no request was answered in time")


def test_a_peer_that_does_not_stop_keeps_its_readings(tmp_path: Path):
    layout = folder(tmp_path)
    (turn,) = turns_of([FakePeer("one", fails=("stop",))], select(["base"]), 1, results(layout))
    measure(turn, 1.0, layout, results(layout))
    assert all(cell.reading is not None for cell in results(layout).cells.values())


def test_a_server_with_adapters_is_asked_once_how_it_goes_on(tmp_path: Path):
    layout = folder(tmp_path)
    turns = turns_of([FakePeer("one")], select(["base", "adapters-32"]), 2, results(layout))
    for turn in turns:
        measure(turn, 1.0, layout, results(layout))
    assert results(layout).answers == {"one": Answer("one", "1 then 12")}
    lines = layout.results.read_text().splitlines()
    assert sum('"answer"' in line for line in lines) == 1
