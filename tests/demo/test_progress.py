import io
import sys
from pathlib import Path

import pytest

from gateway.demo.progress import Status, StepFailed, run


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_step_says_when_it_begins_and_how_it_ended() -> None:
    out = io.StringIO()
    with Status("Doing it", out):
        pass
    begun, ended = out.getvalue().splitlines()
    assert begun == "Doing it …"
    assert ended.startswith("Doing it: done, ")


def test_a_step_that_fails_says_so() -> None:
    out = io.StringIO()
    with pytest.raises(ValueError, match="why"), Status("Doing it", out):
        raise ValueError("why")
    assert "Doing it: failed, " in out.getvalue()


def test_a_terminal_gets_one_line_that_is_rewritten() -> None:
    out = Terminal()
    with Status("Doing it", out) as status:
        status.show("still at it")
    assert "still at it" in out.getvalue()
    assert out.getvalue().count("\n") == 1


def test_a_log_is_not_flooded_by_a_quick_step() -> None:
    out = io.StringIO()
    with Status("Doing it", out) as status:
        for _ in range(100):
            status.show("still at it")
    assert len(out.getvalue().splitlines()) == 2


def test_a_command_that_works_leaves_its_output_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "setup.log"
    run([sys.executable, "-c", "print('WARNING: old'); print('fine')"], "Trying", log)
    assert log.read_text() == "WARNING: old\nfine\n"


def test_a_command_that_fails_raises_with_the_end_of_its_output(tmp_path: Path) -> None:
    program = "for i in range(100): print('line', i)\nraise SystemExit(3)"
    with pytest.raises(StepFailed, match="line 99") as caught:
        run([sys.executable, "-c", program], "Trying", tmp_path / "log")
    assert "line 1\n" not in str(caught.value)


def test_a_command_never_waits_for_input(tmp_path: Path) -> None:
    with pytest.raises(StepFailed, match="EOFError"):
        run([sys.executable, "-c", "input()"], "Trying", tmp_path / "log")
