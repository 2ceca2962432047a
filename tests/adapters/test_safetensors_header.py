import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from gateway.adapters.safetensors_header import CHUNK_BYTES, peaks, read_header
from gateway.errors import InvalidAdapter
from tests.adapters.making import packed


def written(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(data)
    return path


def test_tensors_are_found_where_safetensors_put_them(tmp_path: Path) -> None:
    made = {"b": np.arange(6, dtype="float32").reshape(2, 3), "a": np.ones((4,), "float16")}
    path = written(tmp_path, save(made, metadata={"format": "pt"}))
    entries = read_header(path)
    assert {entry.name: (entry.dtype, entry.shape) for entry in entries} == {
        "a": ("F16", (4,)),
        "b": ("F32", (2, 3)),
    }
    for entry in entries:
        raw = path.read_bytes()[entry.start : entry.end]
        assert raw == made[entry.name].tobytes()


def test_an_empty_file_list_is_sound(tmp_path: Path) -> None:
    assert read_header(written(tmp_path, packed({}))) == []


@pytest.mark.parametrize("length", [0x280, 0x380, 0x480])
def test_a_header_whose_length_looks_like_a_pickle_is_still_read(
    tmp_path: Path, length: int
) -> None:
    header = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    data = length.to_bytes(8, "little") + header.ljust(length) + b"\0"
    assert data[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04")
    assert [entry.name for entry in read_header(written(tmp_path, data))] == ["a"]


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_one_bad_value_of_a_large_tensor_is_found(
    tmp_path: Path, dtype: str, bad: float
) -> None:
    count = CHUNK_BYTES  # more than one chunk of any dtype
    values = np.zeros(count, "float32")
    values[-3] = bad
    raw = {
        "F32": lambda: values.tobytes(),
        "F16": lambda: values.astype("float16").tobytes(),
        "BF16": lambda: (values.view("uint32") >> 16).astype("uint16").tobytes(),
    }[dtype]()
    path = written(tmp_path, packed({"good": (dtype, [2], b"\0" * (len(raw) // count * 2)),
                                     "bad": (dtype, [count], raw)}))  # fmt: skip
    found = {peak.name: peak.value for peak in peaks(path, read_header(path))}
    assert found["good"] == 0
    assert math.isnan(found["bad"]) if math.isnan(bad) else found["bad"] == math.inf


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_the_peak_is_the_largest_absolute_value(tmp_path: Path, dtype: str) -> None:
    values = np.array([0.5, -2.0, 1.0], "float32")
    raw = {
        "F32": values.tobytes(),
        "F16": values.astype("float16").tobytes(),
        "BF16": (values.view("uint32") >> 16).astype("uint16").tobytes(),
    }[dtype]
    path = written(tmp_path, packed({"x": (dtype, [3], raw)}))
    assert [peak.value for peak in peaks(path, read_header(path))] == [2.0]


def test_a_header_of_the_largest_counts_is_refused_before_it_is_used(tmp_path: Path) -> None:
    many = {f"t{index}": ("U8", [0], b"") for index in range(20_001)}
    with pytest.raises(InvalidAdapter, match="20001 tensors"):
        read_header(written(tmp_path, packed(many)))
