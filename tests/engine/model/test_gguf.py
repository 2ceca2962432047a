import random
import shutil
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from gateway.engine.model import weights
from gateway.engine.model.errors import ModelError
from gateway.engine.model.gguf import GgufFile
from gateway.engine.model.gguf_header import SUPPORTED
from gateway.engine.tokenizer import Tokenizer
from tests.engine.model.files import tiny_gguf, write_gguf

NO_QUANTIZER = ("Q4_K", "Q5_K", "Q6_K")
DAMAGE_BYTES_MAX = 20 << 20


def packed(kind: GGMLQuantizationType, rows: int, width: int) -> NDArray[Any]:
    """A tensor of this type as it lies in a file."""
    generator = np.random.default_rng(int(kind))
    values = generator.standard_normal((rows, width), dtype=np.float32)
    if kind.name not in NO_QUANTIZER:
        return quants.quantize(values, kind)
    # Any bytes are a valid block; only the scales must be numbers and not infinite.
    block, size = GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (rows * width // block, size), dtype=np.uint8)
    scales = generator.uniform(0.01, 0.1, (len(blocks), 2)).astype(np.float16).view(np.uint8)
    if kind.name == "Q6_K":
        blocks[:, -2:] = scales[:, :2]
    else:
        blocks[:, :4] = scales
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", SUPPORTED, ids=lambda kind: kind.name)
def test_a_tensor_is_read_as_the_gguf_package_dequantises_it(
    kind: GGMLQuantizationType, tmp_path: Path
) -> None:
    data = packed(kind, 6, 512)
    path = write_gguf(tmp_path / "m.gguf", "llama", {}, {"a": (data, kind), "b": (data, kind)})
    expected = quants.dequantize(data, kind)
    with GgufFile.open(path) as file:
        assert file.tensors["b"].shape == (6, 512)
        assert np.array_equal(file.rows("b", 0, 6), expected)
        assert np.array_equal(file.rows("b", 2, 3), expected[2:5])
    assert np.isfinite(expected).all()
    assert expected.std() > 0


def test_the_header_is_read_as_the_gguf_package_reads_it(tmp_path: Path) -> None:
    path, _ = tiny_gguf(tmp_path / "m.gguf")
    reader = GGUFReader(path)
    with GgufFile.open(path) as file:
        for name, field in reader.fields.items():
            if name.startswith("GGUF."):
                continue
            value = file.metadata[name]
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents()
        assert {tensor.name for tensor in reader.tensors} == set(file.tensors)
        for tensor in reader.tensors:
            found = file.tensors[tensor.name]
            assert found.start == tensor.data_offset
            assert found.size == tensor.n_bytes
            assert list(found.shape) == tensor.shape.tolist()[::-1]


def test_opening_reads_the_header_only(base_model: Path) -> None:
    tracemalloc.start()
    try:
        with GgufFile.open(base_model) as file:
            assert len(file.tensors) == 272
        assert tracemalloc.get_traced_memory()[1] < DAMAGE_BYTES_MAX
    finally:
        tracemalloc.stop()


def test_a_wide_alignment_is_followed(tmp_path: Path) -> None:
    tensors = {name: (np.full((1, 3), i, np.float32), SUPPORTED[0]) for i, name in enumerate("ab")}
    path = tmp_path / "m.gguf"
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "llama")
    writer.add_custom_alignment(256)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufFile.open(path) as file:
        assert file.rows("b", 0, 1).tolist() == [[1, 1, 1]]


def test_an_unsupported_type_is_named(tmp_path: Path) -> None:
    kind = GGMLQuantizationType.Q2_K
    data = np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8)
    path = write_gguf(tmp_path / "m.gguf", "llama", {}, {"blk.0.attn_q.weight": (data, kind)})
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.weight is stored as Q2_K"):
        GgufFile.open(path)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\0\0\0", b"PK\x03\x04" + b"\0" * 100])
def test_what_is_no_gguf_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError):
        GgufFile.open(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="There is no model at"):
        weights.load(tmp_path / "none.gguf", torch.float32)
    with pytest.raises(ModelError, match="cannot be read"):
        Tokenizer.load(tmp_path / "none.gguf")


def test_big_endian_and_old_versions_are_refused(tmp_path: Path) -> None:
    for version in (0x03000000, 1, 4):
        path = tmp_path / f"{version}.gguf"
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
        with pytest.raises(ModelError, match="version"):
            GgufFile.open(path)


def read_everything(path: Path) -> None:
    """All that starting up does with a file, with its memory measured."""
    tracemalloc.start()
    try:
        weights.load(path, torch.float32)
        Tokenizer.load(path)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < DAMAGE_BYTES_MAX


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, _ = tiny_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", num_hidden_layers=1)
    read_everything(path)
    return path


@pytest.mark.parametrize("seed", range(60))
def test_a_truncated_file_is_a_model_error(seed: int, whole: Path, tmp_path: Path) -> None:
    content = whole.read_bytes()
    path = tmp_path / "m.gguf"
    # The last tensor is followed by padding, whose loss changes nothing.
    path.write_bytes(content[: random.Random(seed).randrange(len(content) - 64)])
    with pytest.raises(ModelError):
        read_everything(path)


@pytest.mark.parametrize("offset", [8, 16])
@pytest.mark.parametrize("count", [-1, 1, 1 << 20, 1 << 40, (1 << 64) - 1])
def test_wrong_counts_are_a_model_error(
    offset: int, count: int, whole: Path, tmp_path: Path
) -> None:
    content = bytearray(whole.read_bytes())
    (right,) = struct.unpack_from("<Q", content, offset)
    struct.pack_into("<Q", content, offset, right + count if abs(count) == 1 else count)
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError):
        read_everything(path)


@pytest.mark.parametrize("offset", [1, 32, 1 << 20, (1 << 64) - 32])
def test_wrong_tensor_offsets_are_a_model_error(offset: int, whole: Path, tmp_path: Path) -> None:
    content = bytearray(whole.read_bytes())
    name = b"blk.0.ffn_up.weight"
    at = content.index(name) + len(name) + 4 + 2 * 8 + 4
    (right,) = struct.unpack_from("<Q", content, at)
    struct.pack_into("<Q", content, at, (right + offset) % (1 << 64))
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError):
        read_everything(path)


@pytest.mark.parametrize("seed", range(150))
def test_a_damaged_header_is_a_model_error_or_harmless(
    seed: int, whole: Path, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    with GgufFile.open(whole) as file:
        header_bytes = min(tensor.start for tensor in file.tensors.values())
    path = Path(shutil.copy(whole, tmp_path / "m.gguf"))
    content = bytearray(path.read_bytes())
    for _ in range(chance.choice((1, 1, 3, 10))):
        content[chance.randrange(header_bytes)] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
    path.write_bytes(content)
    try:
        read_everything(path)
    except ModelError:
        return
