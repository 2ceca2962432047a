"""The command as an operator meets it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gateway.cli import main
from tests.bench.scripted import Call, answers, serving, text

KEY = "sk-proj-0123456789"
MODEL_KEY = "sk-model-9876543210"
ONE_LOAD = ["--model", "m", "--concurrency", "2", "--requests", "6"]
SMALL = ["--prompt-tokens", "8:8", "--output-tokens", "4:4"]


def bench(*arguments: str | int | Path, **environ: str) -> Result:
    return CliRunner().invoke(
        main, ["bench", "serve", *map(str, arguments)], env={"LORAGATE_API_KEY": None, **environ}
    )


def report_of(file: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(file.read_text())
    return report


def test_a_run_gives_a_table_and_a_report(tmp_path: Path):
    with serving(answers) as server:
        result = bench(
            "--url", server.url, *ONE_LOAD, *SMALL, "--pid", os.getpid(), "--json", tmp_path / "r"
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "6 sent: 6 completed, 0 failed" in result.output
    assert "time to first token" in result.output
    report = report_of(tmp_path / "r")
    assert report["requests"]["completed"] == 6
    assert report["output_tokens"] == 24
    assert report["output_tokens_by"] == "usage"
    assert report["output_tokens_per_s"] == pytest.approx(24 / report["duration_s"], rel=1e-3)
    assert report["prompt_tokens_per_s"] == pytest.approx(48 / report["duration_s"], rel=1e-3)
    assert len(server.calls) == 8  # two to warm up


def test_the_report_has_what_scripts_rely_on(tmp_path: Path):
    with serving(answers) as server:
        bench(
            "--url", server.url, *ONE_LOAD, *SMALL, "--pid", os.getpid(), "--json", tmp_path / "r"
        )  # fmt: skip
    report = report_of(tmp_path / "r")
    assert report.keys() >= {"settings", "started_at", "duration_s", "requests_per_s"}
    assert report["requests"].keys() >= {"sent", "completed", "failed", "failures"}
    for name in ("ttft_s", "inter_token_s", "tpot_s", "e2e_s"):
        assert report[name].keys() >= {"mean", "p50", "p90", "p99"}
        assert all(isinstance(value, int | float) for value in report[name].values())
    assert report["slo"].keys() >= {"ttft_s", "inter_token_s", "attained_ttft", "attained_both"}
    assert report["server"]["peak_pss_mib"] > 10
    assert report["server"]["mean_cores"] >= 0
    assert report["client"].keys() >= {"cpu_share", "other_cores"}


def test_two_servers_get_the_same_requests():
    bodies = []
    for _ in range(2):
        with serving(answers) as server:
            bench("--url", server.url, "--model", "a", "--model", "b", "--requests", "12",
                  "--concurrency", "1", *SMALL)  # fmt: skip
            bodies.append([call.body for call in server.calls])
    assert bodies[0] == bodies[1]
    assert len(bodies[0]) == 14
    assert {body["model"] for body in bodies[0]} == {"a", "b"}
    assert all(body["ignore_eos"] is True and body["temperature"] == 0 for body in bodies[0])


def test_an_open_loop_is_run(tmp_path: Path):
    with serving(answers) as server:
        result = bench("--url", server.url, "--model", "m", "--rate", "40", "--duration", "0.5",
                       *SMALL, "--json", tmp_path / "r", "--quiet")  # fmt: skip
    assert (result.exit_code, result.output) == (0, "")
    report = report_of(tmp_path / "r")
    assert report["requests"]["sent"] == report["requests"]["completed"] > 4
    assert report["client"]["late_s"]["count"] == report["requests"]["sent"]


def test_a_file_gives_each_model_its_key_and_its_body(tmp_path: Path):
    models = tmp_path / "models.jsonl"
    models.write_text(
        '{"model": "x", "extra": {"lora": [{"id": 3, "scale": 1.0}]}}\n\n'
        f'{{"model": "y", "api_key": "{MODEL_KEY}"}}\n'
    )
    with serving(answers) as server:
        bench("--url", server.url, "--models", models, "--alpha", "0", "--requests", "20",
              "--concurrency", "2", *SMALL, LORAGATE_API_KEY=KEY)  # fmt: skip
    for call in server.calls:
        is_x = call.body["model"] == "x"
        assert call.body.get("lora") == ([{"id": 3, "scale": 1.0}] if is_x else None)
        assert f"authorization: Bearer {KEY if is_x else MODEL_KEY}\r\n" in call.head
    assert {call.body["model"] for call in server.calls} == {"x", "y"}


def test_no_key_is_shown_anywhere(tmp_path: Path):
    async def repeats(call: Call) -> None:
        await call.refuse(401, f"what is {call.head}?".encode())

    models = tmp_path / "models.jsonl"
    models.write_text(
        f'{{"model": "x", "extra": {{"note": "{KEY}"}}}}\n'
        f'{{"model": "y", "api_key": "{MODEL_KEY}"}}\n'
    )
    with serving(repeats) as server:
        for warmup in ("0", "2"):
            result = bench("--url", server.url, "--models", models, "--alpha", "0", "--warmup",
                           warmup, "--requests", "20", "--concurrency", "2", "--api-key", KEY,
                           "--json", tmp_path / "r")  # fmt: skip
            assert result.exit_code == 1
            assert "http_401" in result.output
            shown = result.output + (tmp_path / "r").read_text()
            assert KEY not in shown
            assert MODEL_KEY not in shown


def test_failures_are_counted_and_explained(tmp_path: Path):
    async def turns_every_other_away(call: Call) -> None:
        if len(server.calls) % 2:
            await call.refuse(503, b'{"error": {"message": "too busy"}}')
        else:
            await answers(call)

    with serving(turns_every_other_away) as server:
        result = bench("--url", server.url, "--model", "m", "--concurrency", "1", "--requests",
                       "6", "--warmup", "0", *SMALL, "--json", tmp_path / "r")  # fmt: skip
    assert result.exit_code == 0
    assert "6 sent: 3 completed, 3 failed" in result.output
    assert "refused: 503: too busy" in result.output
    report = report_of(tmp_path / "r")
    assert report["requests"]["failures"] == {"refused": 3}
    assert report["slo"]["attained_ttft"] == 0.5


def test_a_server_that_answers_nothing_is_told_after_the_warm_up(tmp_path: Path):
    async def refuses(call: Call) -> None:
        await call.refuse(404, b'{"error": {"message": "no model m"}}')

    with serving(refuses) as server:
        result = bench("--url", server.url, *ONE_LOAD, "--json", tmp_path / "r")
    assert result.exit_code == 1
    assert result.output == (
        "Error: Every warm-up request failed, so nothing was measured. http_404: 404: no model m\n"
    )
    assert len(server.calls) == 2


def test_plots_without_matplotlib_say_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("gateway.bench.plots.available", lambda: False)
    result = bench(*ONE_LOAD, "--plots", tmp_path / "plots")
    assert result.exit_code == 1
    assert result.output == "Error: --plots needs matplotlib: pip install 'loragate[bench]'\n"


BAD_OPTIONS: dict[str, tuple[list[str], str]] = {
    "no_load": (["--model", "m", "--requests", "1"], "Give one of --concurrency and --rate."),
    "two_loads": (
        ["--model", "m", "--requests", "1", "--concurrency", "1", "--rate", "1"],
        "Give one of --concurrency and --rate.",
    ),
    "no_end": (["--model", "m", "--rate", "1"], "Give one of --requests and --duration."),
    "no_model": (["--rate", "1", "--requests", "1"], "Give the models by --model"),
    "empty_model": (["--model", "", "--rate", "1", "--requests", "1"], "the name is empty"),
    "rate_zero": (["--rate", "0"], "--rate"),
    "rate_nan": (["--rate", "nan"], "--rate"),
    "rate_infinite": (["--rate", "inf"], "not a finite number"),
    "cv_zero": (["--cv", "0"], "--cv"),
    "lengths_reversed": (["--prompt-tokens", "9:3"], "HIGH no less than LOW"),
    "lengths_zero": (["--output-tokens", "0:3"], "LOW must be at least 1"),
    "lengths_one": (["--prompt-tokens", "9"], "is not LOW:HIGH"),
    "lengths_words": (["--prompt-tokens", "a:b"], "is not LOW:HIGH"),
    "prefix": (["--shared-prefix", "0:3"], "both must be at least 1"),
    "prefix_too_long": (
        [*ONE_LOAD, "--shared-prefix", "64:2"],
        "--prompt-tokens must begin above it",
    ),
    "extra_text": (["--extra", "{x"], "this is not JSON"),
    "extra_list": (["--extra", "[]"], "must be a JSON object"),
    "extra_fixed": ([*ONE_LOAD, "--extra", '{"stream": false}'], "stream cannot be set"),
    "url": ([*ONE_LOAD, "--url", "localhost:8080"], "must begin with http:// or https://"),
    "url_password": ([*ONE_LOAD, "--url", "http://u:secret@h/v1"], "no user"),
    "key": ([*ONE_LOAD, "--api-key", "a\nb"], "characters that no key has"),
    "pid": ([*ONE_LOAD, "--pid", "4194304"], "There is no process 4194304"),
    "json_folder": ([*ONE_LOAD, "--json", "/nowhere/r.json"], "there is no folder /nowhere"),
    "plots_file": ([*ONE_LOAD, "--plots", __file__], "--plots"),
    "models_file": (["--models", "/nowhere.jsonl"], "/nowhere.jsonl"),
}


@pytest.mark.parametrize("fault", BAD_OPTIONS)
def test_a_bad_option_gets_one_clear_line(fault: str):
    arguments, words = BAD_OPTIONS[fault]
    result = bench(*arguments)
    assert result.exit_code == 2
    errors = [line for line in result.output.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 1
    assert words in errors[0]
    assert "secret" not in result.output
    assert result.output.splitlines()[-1] == errors[0]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"model": "a"}\n{"model": 1}', "line 2: Expected `str`, got `int`"),
        ('{"name": "a"}', "line 1: Object contains unknown field `name`"),
        ("{", "line 1"),
        ('{"model": "a", "extra": {"prompt": "x"}}', "line 1: prompt cannot be set"),
        ('{"model": "a", "api_key": "x y"}', "line 1: the API key has characters"),
        ('{"model": ""}', "line 1: the model has no name"),
        ("\n\n", "has no models"),
    ],
)
def test_a_bad_file_of_models_is_told_where(tmp_path: Path, line: str, words: str):
    file = tmp_path / "models.jsonl"
    file.write_text(line)
    result = bench("--models", file, "--rate", "1", "--requests", "1")
    assert result.exit_code == 2
    assert words in result.output


def test_ctrl_c_shows_what_was_measured_so_far(tmp_path: Path):
    async def slowly(call: Call) -> None:
        await call.begin()
        await call.send(text("a"), after_s=0.1)
        await call.send(text("b"), b"data: [DONE]\n\n", after_s=0.1)
        await call.end()

    with serving(slowly) as server:
        process = subprocess.Popen(
            [sys.executable, "-m", "gateway", "bench", "serve", "--url", server.url, "--model", "m",
             "--concurrency", "2", "--duration", "60", "--json", str(tmp_path / "r")],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + 60
            while len(server.calls) < 8 and time.monotonic() < deadline:
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130, output
    assert "2 cut off at the end" in output
    report = report_of(tmp_path / "r")
    assert report["interrupted"] is True
    assert report["requests"]["completed"] >= 2
    assert report["duration_s"] < 50
