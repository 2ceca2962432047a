"""`loragate adapters push`: in parts or at once, and on again after an interruption."""

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result

from gateway.adapters import push
from gateway.adapters.commands import Api, adapters_group
from tests.adapters.conftest import Site
from tests.adapters.making import config, write_folder
from tests.adapters.packing import CONFIG, files, sharded

PART = 20_000


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "AT_ONCE_BYTES_MAX", 1000)
    monkeypatch.setattr(push, "PART_BYTES", PART)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the command asks of the server."""
    seen: list[str] = []
    original: Callable[..., Any] = Api.call

    def call(self: Api, method: str, path: str, **options: Any) -> Any:
        seen.append(f"{method} {path}")
        return original(self, method, path, **options)

    monkeypatch.setattr(Api, "call", call)
    return seen


def run(site: Site, *arguments: str) -> Result:
    environment = {"LORAGATE_URL": site.live.url, "LORAGATE_API_KEY": site.live.key(site.tenant)}
    return CliRunner().invoke(adapters_group, ["push", *arguments, "--json"], env=environment)


def sharded_folder(folder: Path) -> Path:
    folder.mkdir()
    for name, content in ({CONFIG: files()[CONFIG]} | sharded(2)).items():
        (folder / name).write_bytes(content)
    return folder


def test_at_once_and_in_parts_whole_and_sharded_are_the_same_adapter(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    folders = [write_folder(tmp_path / "whole"), sharded_folder(tmp_path / "sharded")]
    (folders[0] / "README.md").write_text("not sent")
    digests = set()
    for limit in (push.AT_ONCE_BYTES_MAX, 1000):
        monkeypatch.setattr(push, "AT_ONCE_BYTES_MAX", limit)
        for folder in folders:
            pushed = run(site, str(folder), "--name", "pirate")
            assert pushed.exit_code == 0, pushed.output
            digests.add(json.loads(pushed.stdout)["digest"])
    assert len(digests) == 1
    assert digests == {site.upload().json()["digest"]}
    assert [line for line in asked if "adapters" in line] == ["POST /v1/adapters"] * 2
    assert len(site.stored()) == 3


@pytest.mark.usefixtures("in_parts")
def test_after_an_interruption_only_the_rest_is_sent(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    folder = write_folder(tmp_path / "pirate")
    original = httpx.Client.request

    def cut(self: httpx.Client, method: str, url: str, **options: Any) -> httpx.Response:
        if url.endswith("/parts/3"):
            raise httpx.ReadError("cut")
        return original(self, method, url, **options)

    monkeypatch.setattr(httpx.Client, "request", cut)
    broken = run(site, str(folder))
    assert broken.exit_code == 1
    assert "does not answer" in broken.stderr
    assert site.live.key(site.tenant) not in broken.output
    monkeypatch.setattr(httpx.Client, "request", original)
    asked.clear()
    pushed = run(site, str(folder))
    assert pushed.exit_code == 0, pushed.output
    assert [line.rpartition("/")[2] for line in asked] == ["uploads", "3", "4", "complete"]
    assert site.names() == ["pirate"]


@pytest.mark.usefixtures("in_parts")
def test_a_changed_folder_is_another_upload(site: Site, tmp_path: Path, asked: list[str]) -> None:
    folder = write_folder(tmp_path / "pirate")
    assert run(site, str(folder)).exit_code == 0
    write_folder(folder, config(lora_alpha=9))
    asked.clear()
    assert run(site, str(folder)).exit_code == 0
    assert len([line for line in asked if "/parts/" in line]) == 4


@pytest.mark.usefixtures("in_parts")
def test_the_refusal_of_what_came_in_parts_is_shown(site: Site, tmp_path: Path) -> None:
    pushed = run(site, str(write_folder(tmp_path / "pirate", config(use_dora=True))))
    assert pushed.exit_code == 1
    assert "DoRA is not served yet. (422)" in pushed.stderr
    assert site.stored() == []


def test_a_missing_shard_index_is_named(site: Site, tmp_path: Path) -> None:
    folder = sharded_folder(tmp_path / "pirate")
    (folder / "adapter_model.safetensors.index.json").unlink()
    pushed = run(site, str(folder))
    assert pushed.exit_code == 1
    assert "index.json is missing" in pushed.stderr


@pytest.mark.parametrize("size", [0, 1, 511, 512, 513, 5000])
def test_the_tar_that_is_never_written_is_one(tmp_path: Path, size: int) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path, content in zip(paths, (b"x" * size, b"more"), strict=True):
        path.write_bytes(content)
    with push.opened_tar(paths) as tar:
        whole = tar.read(0, tar.size_bytes)
        for step in (1, 7, 512, 1000):
            cut = [tar.read(start, step) for start in range(0, tar.size_bytes, step)]
            assert b"".join(cut) == whole
    with tarfile.open(fileobj=io.BytesIO(whole)) as opened:
        contents = [opened.extractfile(member) for member in opened]
        assert [file.read() for file in contents if file] == [b"x" * size, b"more"]
