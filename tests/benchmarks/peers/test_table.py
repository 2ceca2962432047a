"""Medians, the best peer, and what is met, out of cells."""

import json

from benchmarks.peers.loads import Load
from benchmarks.peers.results import Cell, Reading
from benchmarks.peers.table import best_of, data_of, lines_of, rows_of, summary
from benchmarks.peers.targets import target_of

SERVERS = ["ours", "vllm", "llama-bf16", "llama-q4_1"]


def cells(load: Load, server: str, rates: list[float], in_time: float = 1.0) -> list[Cell]:
    return [
        Cell(round, server, load.name, Reading(rate, 0.5, in_time))
        for round, rate in enumerate(rates)
    ]


def test_a_figure_is_the_median_over_the_rounds():
    load = Load("base", 8)
    measured = cells(load, "ours", [90.0, 210.0, 100.0]) + cells(load, "vllm", [40.0, 60.0])
    (row,) = rows_of([load], SERVERS, measured)
    ours, vllm = row.figures
    assert (ours.median, ours.lowest, ours.highest, ours.rounds) == (100.0, 90.0, 210.0, 3)
    assert vllm.median == 50.0
    assert row.needed.found == 2.0


def test_the_best_peer_has_the_highest_median_and_is_not_ours():
    load = Load("base", 8)
    measured = (
        cells(load, "ours", [500.0, 500.0, 500.0])
        + cells(load, "vllm", [10.0, 300.0, 20.0])
        + cells(load, "llama-bf16", [60.0, 61.0, 59.0])
        + cells(load, "llama-q4_1", [45.0, 46.0, 47.0])
    )
    (row,) = rows_of([load], SERVERS, measured)
    best = best_of(row.figures)
    assert best is not None
    assert best.server == "llama-bf16"
    assert best_of(row.figures, "vllm") == row.figures[1]
    assert best_of(row.figures, "peft") is None


def test_one_request_at_a_time_needs_a_multiple_of_vllm_and_parity_with_the_best_llama_cpp():
    load = Load("adapters-128", 1)
    measured = (
        cells(load, "ours", [40.0])
        + cells(load, "vllm", [10.0])
        + cells(load, "llama-bf16", [39.0])
        + cells(load, "llama-q4_1", [50.0])
    )
    (row,) = rows_of([load], SERVERS, measured)
    assert (row.needed.peer, row.needed.found, row.needed.met) == ("vllm", 4.0, True)
    assert (row.stretch.peer, row.stretch.found, row.stretch.met) == ("llama-q4_1", 0.8, False)


def test_a_ratio_that_is_just_reached_is_met():
    load = Load("adapters-32", 8)
    ratio = target_of(load).needed.ratio
    for ours, met in ((ratio * 50.0, True), (ratio * 50.0 - 0.1, False)):
        measured = cells(load, "ours", [ours]) + cells(load, "vllm", [50.0])
        (row,) = rows_of([load], SERVERS, measured)
        assert row.needed.met is met


def test_a_fast_server_whose_first_token_is_late_has_missed():
    load = Load("adapters-128", 32)
    for in_time, met in ((0.5, True), (0.49, False)):
        measured = cells(load, "ours", [900.0], in_time) + cells(load, "vllm", [1.0], 0.0)
        (row,) = rows_of([load], SERVERS, measured)
        assert row.needed.met is True
        assert row.in_time_met is met


def test_a_peer_that_failed_is_a_row_with_its_reason_and_no_best_peer():
    load = Load("base", 32)
    measured = [
        *cells(load, "ours", [100.0]),
        Cell(0, "vllm", load.name, failure="not ready after 360 s"),
    ]
    (row,) = rows_of([load], SERVERS, measured)
    assert row.failures == {"vllm": "not ready after 360 s"}
    assert row.needed.found is None
    text = "\n".join(lines_of(row))
    assert "failed: not ready after 360 s" in text
    assert "not measured" in text


def test_a_round_that_failed_leaves_the_others():
    load = Load("base", 32)
    measured = [*cells(load, "vllm", [100.0]), Cell(1, "vllm", load.name, failure="a fault")]
    (row,) = rows_of([load], SERVERS, measured)
    assert row.failures == {}
    assert row.figures[0].rounds == 1


def test_a_cell_beside_a_busy_process_is_shown_as_noisy():
    load = Load("base", 1)
    quiet = Cell(0, "ours", load.name, Reading(50.0, 0.1, other_cores=0.02))
    noisy = Cell(1, "ours", load.name, Reading(20.0, 0.4, other_cores=1.1))
    (row,) = rows_of([load], SERVERS, [quiet, noisy])
    assert row.figures[0].noisy == 1
    assert "noisy in 1 of 2" in "\n".join(lines_of(row))


def test_the_data_is_json_and_says_what_the_text_says():
    load = Load("static", 8)
    measured = cells(load, "ours", [80.0]) + cells(load, "peft-bfloat16", [20.0])
    (row,) = rows_of([load], ["ours", "peft-bfloat16"], measured)
    data = json.loads(json.dumps(data_of(row)))
    assert data["load"] == "static/c8"
    assert data["needed"]["found"] == 4.0
    assert data["needed"]["goal"] == {"ratio": 5.0, "peers": "peft"}
    assert data["needed"]["met"] is False
    assert [server["server"] for server in data["servers"]] == ["ours", "peft-bfloat16"]


def test_the_summary_counts_only_what_is_met_in_full():
    fast, late, unmeasured = Load("base", 8), Load("adapters-32", 32), Load("base", 32)
    measured = [
        *cells(fast, "ours", [130.0]),
        *cells(fast, "vllm", [100.0]),
        *cells(late, "ours", [700.0], in_time=0.4),
        *cells(late, "vllm", [100.0]),
    ]
    rows = rows_of([fast, late, unmeasured], SERVERS, measured)
    assert summary(rows) == "needed met in 1 of 3 loads, stretch met in 1 of 3 loads"
