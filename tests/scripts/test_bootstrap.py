import ast
import json
import sys
from pathlib import Path

import pytest

from gateway.demo.progress import StepFailed
from scripts import bootstrap


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of its own for the set-up, with nothing in it but what it reads."""
    for name, path in {
        "ROOT": tmp_path,
        "VENV": tmp_path / ".venv",
        "PYTHON": tmp_path / ".venv" / "bin" / "python",
        "STAMP": tmp_path / ".venv" / ".loragate-setup",
        "LOG": tmp_path / ".cache" / "setup.log",
        "LOCK": tmp_path / ".cache" / "setup.lock",
    }.items():
        monkeypatch.setattr(bootstrap, name, path)
    monkeypatch.setattr(bootstrap, "has_nvidia_gpu", lambda: False)
    monkeypatch.delenv("LORAGATE_MODEL", raising=False)
    monkeypatch.delenv("LORAGATE_DATA_DIR", raising=False)
    (tmp_path / "pyproject.toml").write_text("[project]")
    (tmp_path / "constraints.txt").write_text("six==1.16.0")
    return tmp_path


def finish(root: Path) -> None:
    """What a set-up that went through leaves behind."""
    (root / ".venv" / "bin").mkdir(parents=True)
    bootstrap.PYTHON.symlink_to(sys.executable)
    bootstrap.STAMP.write_text(json.dumps(bootstrap.fingerprint()))
    (root / ".loragate" / "models").mkdir(parents=True)
    (root / ".loragate" / "models" / "model.gguf").touch()


def test_it_can_be_read_by_an_older_python() -> None:
    source = Path(bootstrap.__file__).read_text()
    ast.parse(source, feature_version=(3, 7))


def test_a_finished_set_up_has_nothing_to_do(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish(root)
    monkeypatch.setattr(bootstrap, "find_python", lambda: pytest.fail("looked for a Python"))
    assert bootstrap.main() == 0


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_a_changed_list_of_packages_is_installed(root: Path, name: str) -> None:
    finish(root)
    (root / name).write_text("changed")
    assert not bootstrap.is_done(bootstrap.fingerprint())


def test_a_new_gpu_brings_another_torch(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish(root)
    monkeypatch.setattr(bootstrap, "has_nvidia_gpu", lambda: True)
    assert not bootstrap.is_done(bootstrap.fingerprint())


def test_a_python_that_was_removed_is_noticed(root: Path) -> None:
    finish(root)
    bootstrap.PYTHON.unlink()
    bootstrap.PYTHON.symlink_to(root / "gone")
    assert not bootstrap.is_done(bootstrap.fingerprint())


def test_a_missing_model_is_noticed_unless_another_is_named(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(root)
    (root / ".loragate" / "models" / "model.gguf").unlink()
    assert not bootstrap.is_done(bootstrap.fingerprint())
    monkeypatch.setenv("LORAGATE_MODEL", "/models/other")
    assert bootstrap.is_done(bootstrap.fingerprint())


def test_no_fitting_python_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bootstrap, "usable", lambda _: False)
    assert bootstrap.find_python() is None
    assert "needs Python 3.11 or 3.12" in capsys.readouterr().err


def test_a_command_that_is_no_python_is_not_usable(tmp_path: Path) -> None:
    shim = tmp_path / "python3.12"
    shim.write_text("#!/bin/sh\necho 'not installed' >&2\nexit 127\n")
    shim.chmod(0o755)
    assert not bootstrap.usable(str(shim))
    assert bootstrap.usable(sys.executable)


# --- what happens to a .venv that is there --------------------------------------------------------


@pytest.fixture
def made(root: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would make a virtual environment; pip always answers."""
    commands: list[list[str]] = []
    monkeypatch.setattr("subprocess.check_call", commands.append)
    monkeypatch.setattr(bootstrap, "answers", lambda _: True)
    return commands


def test_an_interrupted_set_up_is_begun_again(root: Path, made: list[list[str]]) -> None:
    finish(root)
    bootstrap.STAMP.write_text(json.dumps(bootstrap.BEGUN))
    bootstrap.make_venv(bootstrap.fingerprint())
    assert made == [[sys.executable, "-m", "venv", "--clear", str(bootstrap.VENV)]]


def test_a_folder_that_was_moved_gets_a_new_venv(root: Path, made: list[list[str]]) -> None:
    finish(root)
    bootstrap.STAMP.write_text(json.dumps({**bootstrap.fingerprint(), "root": "/elsewhere"}))
    bootstrap.make_venv(bootstrap.fingerprint())
    assert len(made) == 1


def test_a_venv_with_older_packages_is_kept(root: Path, made: list[list[str]]) -> None:
    finish(root)
    (root / "constraints.txt").write_text("changed")
    bootstrap.make_venv(bootstrap.fingerprint())
    assert made == []


def test_a_venv_that_somebody_else_made_is_kept(root: Path, made: list[list[str]]) -> None:
    finish(root)
    bootstrap.STAMP.unlink()
    bootstrap.make_venv(bootstrap.fingerprint())
    assert made == []


def test_a_venv_whose_pip_is_broken_is_made_anew(
    root: Path, made: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    finish(root)
    bootstrap.STAMP.unlink()
    monkeypatch.setattr(bootstrap, "answers", lambda _: False)
    bootstrap.make_venv(bootstrap.fingerprint())
    assert len(made) == 1


# --- which torch ----------------------------------------------------------------------------------


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The pip commands that were given; all of them fail."""
    commands: list[list[str]] = []

    def fail(arguments: list[str], title: str) -> None:
        commands.append(arguments)
        raise StepFailed("no")

    monkeypatch.setattr(bootstrap, "pip", fail)
    monkeypatch.setattr("sys.platform", "linux")
    return commands


def test_without_a_gpu_a_cpu_build_is_tried_before_any_other(
    root: Path, pip: list[list[str]]
) -> None:
    with pytest.raises(StepFailed, match="free disk space"):
        bootstrap.install_torch("cpu")
    at_hand, index, plain = pip
    assert at_hand[-1] == f"torch=={bootstrap.TORCH}+cpu"
    assert index[-3:] == ["--index-url", bootstrap.CPU_INDEX, f"torch=={bootstrap.TORCH}"]
    assert plain[-1] == f"torch=={bootstrap.TORCH}"
    assert "--index-url" not in plain


def test_with_a_gpu_the_common_build_is_installed(root: Path, pip: list[list[str]]) -> None:
    with pytest.raises(StepFailed):
        bootstrap.install_torch("cuda")
    assert [arguments[-1] for arguments in pip] == [f"torch=={bootstrap.TORCH}"]


def test_a_torch_that_fits_stays(root: Path, pip: list[list[str]]) -> None:
    packages = root / ".venv" / "lib" / "python3.11" / "site-packages"
    (packages / f"torch-{bootstrap.TORCH}+cpu.dist-info").mkdir(parents=True)
    bootstrap.install_torch("cpu")
    assert pip == []


def test_a_cpu_build_is_replaced_when_a_gpu_appears(root: Path, pip: list[list[str]]) -> None:
    packages = root / ".venv" / "lib" / "python3.11" / "site-packages"
    (packages / f"torch-{bootstrap.TORCH}+cpu.dist-info").mkdir(parents=True)
    with pytest.raises(StepFailed):
        bootstrap.install_torch("cuda")
    assert pip[0] == ["uninstall", "--yes", "torch"]


def test_the_pinned_torch_is_the_one_that_is_installed() -> None:
    pins = (Path(bootstrap.__file__).parent.parent / "constraints.txt").read_text().splitlines()
    assert f"torch=={bootstrap.TORCH}" in pins
