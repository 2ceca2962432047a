"""What a run leaves behind, and how the next one goes on from it."""

from pathlib import Path

import pytest

from benchmarks.peers.results import Answer, Cell, OtherSetup, Reading, Results

SETUP = {"seconds": 20.0, "ours": {}}
CELL = Cell(0, "ours", "base/c1", Reading(30.0, 0.1, 1.0, 0.0, {"requests": {"sent": 3}}))


def test_a_cell_is_there_when_the_run_is_begun_again(tmp_path: Path):
    file = tmp_path / "new" / "results.jsonl"
    first = Results(file, SETUP)
    first.add(CELL)
    first.add_answer(Answer("ours", " Paris."))
    again = Results(file, SETUP)
    assert again.cells == {(0, "ours", "base/c1"): CELL}
    assert again.answers == {"ours": Answer("ours", " Paris.")}
    assert again.has(0, "ours", "base/c1")
    assert not again.has(1, "ours", "base/c1")


def test_what_failed_is_to_be_measured_again_and_then_counts(tmp_path: Path):
    file = tmp_path / "results.jsonl"
    results = Results(file, SETUP)
    results.add(Cell(0, "ours", "base/c1", failure="not ready after 120 s"))
    assert not results.has(0, "ours", "base/c1")
    results.add(CELL)
    assert Results(file, SETUP).cells[0, "ours", "base/c1"] == CELL


def test_cells_measured_in_another_way_are_not_mixed_in(tmp_path: Path):
    file = tmp_path / "results.jsonl"
    Results(file, SETUP)
    with pytest.raises(OtherSetup, match="ours"):
        Results(file, SETUP | {"ours": {"engine.dtype": "bfloat16"}})
    Results(file, SETUP)


def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path):
    file = tmp_path / "results.jsonl"
    results = Results(file, SETUP)
    results.add(CELL)
    whole = file.read_bytes()
    results.add(Cell(1, "ours", "base/c1", Reading(31.0)))
    file.write_bytes(file.read_bytes()[:-7])
    again = Results(file, SETUP)
    assert again.has(0, "ours", "base/c1")
    assert not again.has(1, "ours", "base/c1")
    assert file.read_bytes() == whole
