"""The loops are compiled once on a machine, and anew when their code has changed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gateway.engine.kernels import compiling, pieces
from gateway.engine.memory.rows import GROUPS
from tests.engine.model.random_decoders import random_weights
from tests.engine.model.test_compiled_decoder import ODD, Case, compiled

ROOT = Path(__file__).parents[3]
KERNELS = ROOT / "gateway" / "engine" / "kernels"
SECOND_PROCESS = """
import json
from numba.core import event
from tests.engine.kernels.test_compiling import forward_passes
with event.install_recorder("numba:compile") as recorder:
    forward_passes()
print(json.dumps([str(item) for _, item in recorder.buffer]))
"""
WITHOUT_A_FOLDER = """
from pathlib import Path

def refuse(*_, **__):
    raise PermissionError

Path.mkdir = refuse
from gateway.engine.kernels import compiling, compiled_step

@compiling.entry
def double(x):
    return 2 * x

assert compiling._folder is None
print(double(21), compiled_step.forward.stats.cache_path)
"""


def forward_passes() -> None:
    """Of each type of element."""
    case = Case(ODD["odd"], random_weights(ODD["odd"]), 5)
    for dtype in torch.float32, torch.bfloat16:
        compiled(case, dtype, 1)


def output_of(program: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_second_process_compiles_nothing():
    forward_passes()
    assert json.loads(output_of(SECOND_PROCESS)) == []


def test_without_a_folder_to_write_all_is_compiled_and_nothing_kept():
    assert output_of(WITHOUT_A_FOLDER).split() == ["42", "None"]


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the kernels' files, and no user's cache yet."""
    folder = tmp_path / "kernels"
    shutil.copytree(KERNELS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(compiling, "_HERE", folder)
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def test_a_change_of_any_file_leads_to_another_folder(code: Path):
    folders = {compiling._cache_folder()}
    assert compiling._cache_folder() in folders
    files = sorted(code.glob("*.py"))
    assert len(files) > 10
    for file in files:
        file.write_text(file.read_text() + "\n")
        folders.add(compiling._cache_folder())
    assert len(folders) == 1 + len(files)
    assert {folder.parent for folder in folders if folder} == {code / "__pycache__"}


def test_numbas_own_setting_says_where(code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "asked"))
    folder = compiling._cache_folder()
    assert folder is not None
    assert folder.parent == tmp_path / "asked"


def test_groups_are_numbered_as_the_layout_of_adapters_has_them():
    names = [name.upper() for name in GROUPS]
    named = {"O": "OUT"}
    assert [int(getattr(pieces, named.get(name, name))) for name in names] == list(
        range(pieces.GROUPS_COUNT)
    )


def test_where_the_code_cant_be_written_beside_the_users_cache_is_taken(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    beside = compiling._cache_folder()
    assert beside is not None
    users = tmp_path / "cache" / "loragate" / beside.name
    access = os.access

    def no_access(path: Any, mode: int) -> bool:
        return not Path(path).is_relative_to(code) and access(path, mode)

    with monkeypatch.context() as patched:
        patched.setattr(os, "access", no_access)
        assert compiling._cache_folder() == users
        assert users.is_dir()
    shutil.rmtree(code / "__pycache__")
    (code / "__pycache__").write_text("a file, so that no folder can be made")
    assert compiling._cache_folder() == users
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("another")
    assert compiling._cache_folder() is None
