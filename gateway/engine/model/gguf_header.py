"""The header of a GGUF file, read without believing it. Needs no torch.

The `gguf` package's reader makes one numpy object per array element (seconds and hundreds of MB for
a vocabulary) and trusts the counts it reads. Here each count and offset is compared with the file's
size before anything is made of it, so that a corrupt file is a `ModelError` and costs no more
memory than its own size.

Layout, little-endian: magic, u32 version, u64 tensors, u64 metadata entries; entries of key, u32
type, value; tensors of name, u32 dimensions, u64 sizes (fastest first), u32 type, u64 offset; then
the data, each tensor at its offset and aligned.
"""

import mmap
import struct
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from gateway.engine.model.errors import ModelError

Value = str | int | float | bool | list[str] | NDArray[Any]

SUPPORTED = tuple(
    GGMLQuantizationType[name]
    for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")
)
VERSIONS = (2, 3)
DIMENSIONS_MAX = 4
ARRAY_ITEMS_MAX = 1 << 24
STRING_BYTES_MAX = 1 << 24
ALIGNMENT_MAX = 1 << 20

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip


class TensorInfo(NamedTuple):
    """Where a tensor lies: `shape` slowest dimension first, `start` and `size` in bytes."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    size: int


class Metadata(Mapping[str, Value]):
    """The key-value part of a GGUF file, with typed access. Raises ModelError on a wrong type."""

    def __init__(self, path: Path, values: dict[str, Value]) -> None:
        self.path = path
        self._values = values

    def __getitem__(self, key: str) -> Value:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(key, "an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(key, "a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def texts(self, key: str) -> list[str]:
        value = self._get(key, None)
        if not isinstance(value, list):
            raise self._wrong(key, "a list of strings")
        return value

    def integers(self, key: str) -> list[int]:
        value = self._get(key, None)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
            raise self._wrong(key, "a list of integers")
        return [int(item) for item in value]

    def numbers(self, key: str) -> list[float]:
        value = self._get(key, None)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iuf":
            raise self._wrong(key, "a list of numbers")
        return [float(item) for item in value]

    def _get(self, key: str, default: Value | None) -> Value:
        value = self._values.get(key, default)
        if value is None:
            raise ModelError(f"{self.path} has no metadata {key}.")
        return value

    def _wrong(self, key: str, expected: str) -> ModelError:
        return ModelError(f"{self.path}: metadata {key} must be {expected}.")


class Header:
    """One pass over a header; `_at` is the position of the next unread byte."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._end = len(data)
        self._at = 0

    def read(self) -> tuple[Metadata, dict[str, TensorInfo]]:
        if self._take(4) != b"GGUF":
            raise ModelError(f"{self._path} is not a GGUF file.")
        version = self._scalar("<I")
        if version not in VERSIONS:
            raise self._corrupt(f"its version is {version}, and 2 and 3 (little-endian) are read")
        tensor_count, entry_count = self._scalar("<Q"), self._scalar("<Q")
        values: dict[str, Value] = {}
        for _ in range(self._count(entry_count, 13)):
            key = self._string()
            if key in values:
                raise self._corrupt(f"metadata {key[:100]!r} appears twice")
            values[key] = self._value(self._scalar("<I"))
        metadata = Metadata(self._path, values)
        if metadata.integer("split.count", 1) > 1:
            raise ModelError(f"{self._path} is one part of a split GGUF; merge the parts first.")
        alignment = metadata.integer("general.alignment", 32)
        if not 0 < alignment <= ALIGNMENT_MAX or alignment & (alignment - 1):
            raise self._corrupt(f"its alignment is {alignment}")
        found = [self._tensor() for _ in range(self._count(tensor_count, 32))]
        data_start = _aligned(self._at, alignment)
        return metadata, self._placed(found, data_start, alignment)

    def _tensor(self) -> tuple[str, TensorInfo]:
        """A tensor with `start` still counted from the beginning of the data."""
        name = self._string()
        dimensions = self._scalar("<I")
        if not 1 <= dimensions <= DIMENSIONS_MAX:
            raise self._corrupt(f"tensor {name[:100]!r} has {dimensions} dimensions")
        shape = tuple(reversed([self._scalar("<Q") for _ in range(dimensions)]))
        number = self._scalar("<I")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError as error:
            raise self._corrupt(f"tensor {name[:100]!r} has unknown type {number}") from error
        if kind not in SUPPORTED:
            raise ModelError(
                f"{self._path}: tensor {name[:100]} is stored as {kind.name}; supported are "
                f"{', '.join(each.name for each in SUPPORTED)}."
            )
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if min(shape) < 1 or shape[-1] % block:
            raise self._corrupt(f"tensor {name[:100]!r} cannot have shape {shape} as {kind.name}")
        return name, TensorInfo(shape, kind, self._scalar("<Q"), prod(shape) // block * block_bytes)

    def _placed(
        self, found: list[tuple[str, TensorInfo]], data_start: int, alignment: int
    ) -> dict[str, TensorInfo]:
        """The tensors by name with `start` in the file.

        They must fill the data without gaps but for the padding, as llama.cpp asks too: otherwise
        an offset or a count is wrong.
        """
        tensors: dict[str, TensorInfo] = {}
        end = data_start
        for name, tensor in sorted(found, key=lambda item: item[1].start):
            start = data_start + tensor.start
            if name in tensors:
                raise self._corrupt(f"tensor {name[:100]!r} appears twice")
            if start != _aligned(end, alignment):
                raise self._corrupt(f"tensor {name[:100]!r} has a wrong offset")
            end = start + tensor.size
            if end > self._end:
                raise self._corrupt(f"tensor {name[:100]!r} lies outside the file")
            tensors[name] = tensor._replace(start=start)
        if self._end - end >= alignment:
            raise self._corrupt(f"{self._end - end} bytes of it belong to no tensor")
        return tensors

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise self._corrupt(f"metadata has unknown type {kind}")
        value: int | float | bool = self._scalar(_SCALARS[kind])
        return value

    def _array(self) -> Value:
        kind, count = self._scalar("<I"), self._scalar("<Q")
        if count > ARRAY_ITEMS_MAX:
            raise self._corrupt(f"metadata has an array of {count} items")
        if kind == _STRING:
            return [self._string() for _ in range(self._count(count, 8))]
        if kind not in _SCALARS:
            raise self._corrupt(f"metadata has an array of type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self._take(count * dtype.itemsize), dtype)

    def _string(self) -> str:
        size = self._scalar("<Q")
        if size > STRING_BYTES_MAX:
            raise self._corrupt(f"it has a string of {size} bytes")
        raw = self._take(size)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self._corrupt("a string is not UTF-8") from error

    def _scalar(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _take(self, size: int) -> bytes:
        if size > self._end - self._at:
            raise self._corrupt("it is cut off")
        raw = self._data[self._at : self._at + size]
        self._at += size
        return raw

    def _count(self, count: int, bytes_min: int) -> int:
        """`count` itself, if that many items of at least `bytes_min` bytes can still follow."""
        if count > (self._end - self._at) // bytes_min:
            raise self._corrupt(f"it counts {count} items, more than it has room for")
        return count

    def _corrupt(self, what: str) -> ModelError:
        return ModelError(f"{self._path} is not a valid GGUF file: {what}.")


def _aligned(position: int, alignment: int) -> int:
    """The first multiple of `alignment` that is not before `position`."""
    return -(-position // alignment) * alignment
