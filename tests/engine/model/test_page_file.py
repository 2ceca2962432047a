"""An adapter's pages, read from its weights once and from their own file from then on."""

import tempfile
from pathlib import Path

import pytest
import torch
from peft import LoraConfig

from gateway.adapters.peft_format import write_manifest
from gateway.engine.engine import Engine
from gateway.engine.memory.buffer import Slab
from gateway.engine.memory.pager import AdapterError
from gateway.engine.messages import (
    MANIFEST_FILE,
    WEIGHTS_FILE,
    AdapterRef,
    EngineSettings,
    ModelInfo,
)
from gateway.engine.model.adapter import read_adapter
from tests.engine.tiny import CONFIGS, save_adapter, save_model

ELEMENTS = 512


class Original:
    """A tiny model's adapter, as an upload leaves it in the store."""

    def __init__(self, folder: Path) -> None:
        model = save_model(CONFIGS["llama"], folder / "model")
        config = LoraConfig(r=5, lora_alpha=3, target_modules="all-linear")
        self.folder = folder / "adapter"
        save_adapter(model, config, self.folder, seed=1)
        engine = Engine(EngineSettings(model=str(folder / "model"), block_tokens=4, pool_mib=1))
        engine.close()
        self.info: ModelInfo = engine.info
        write_manifest(self.folder, self.info)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Original:
    return Original(tmp_path_factory.mktemp("original"))


class Version:
    """A copy of it, to be read and spoilt."""

    def __init__(self, original: Original, folder: Path) -> None:
        for name in (MANIFEST_FILE, WEIGHTS_FILE):
            (folder / name).write_bytes((original.folder / name).read_bytes())
        self.folder = folder
        self._projections = original.info.targets

    def read(self, dtype: torch.dtype = torch.float32) -> Slab:
        return read_adapter(
            AdapterRef("version", str(self.folder)), self._projections, ELEMENTS, dtype
        )

    @property
    def page_files(self) -> list[Path]:
        return sorted(self.folder.glob("pages-*"))


@pytest.fixture
def version(original: Original, tmp_path: Path) -> Version:
    return Version(original, tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_second_read_gives_the_same_pages_without_the_weights(
    version: Version, dtype: torch.dtype
):
    first = version.read(dtype)
    (version.folder / WEIGHTS_FILE).unlink()
    second = version.read(dtype)
    assert torch.equal(first.pages_NP.view(torch.uint8), second.pages_NP.view(torch.uint8))
    assert second.layout is first.layout
    assert first.pages_NP.any()


def test_each_dtype_has_its_own_file(version: Version):
    for dtype in (torch.float32, torch.bfloat16):
        version.read(dtype)
    assert [path.name for path in version.page_files] == [
        "pages-bfloat16-512.bin",
        "pages-float32-512.bin",
    ]


@pytest.mark.parametrize("damage", ["flipped", "cut", "longer", "empty", "header"])
def test_a_damaged_file_is_made_again(version: Version, damage: str):
    sound = version.read()
    (path,) = version.page_files
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[-5] ^= 1
    elif damage == "header":
        content[0] ^= 255
    whole = bytes(content)
    damaged = {"cut": whole[:-9], "longer": whole + b"x", "empty": b""}
    path.write_bytes(damaged.get(damage, whole))
    again = version.read()
    assert torch.equal(again.pages_NP, sound.pages_NP)
    (version.folder / WEIGHTS_FILE).unlink()
    assert torch.equal(version.read().pages_NP, sound.pages_NP)


def test_a_file_of_other_weights_is_not_used(version: Version):
    """As the manifest names the checksum of the weights and their scales, it decides."""
    version.read()
    manifest = version.folder / MANIFEST_FILE
    manifest.write_bytes(manifest.read_bytes().replace(b'"rank":5', b'"rank":5 '))
    (version.folder / WEIGHTS_FILE).unlink()
    with pytest.raises(AdapterError, match="missing from the store"):
        version.read()


def test_a_store_that_cannot_be_written_serves_all_the_same(
    version: Version, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("read only")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    assert version.read().pages_NP.any()
    assert version.page_files == []
