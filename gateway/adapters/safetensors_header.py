"""What a safetensors file says it holds, checked by hand before any tensor is read.

    8 bytes        header length n, little endian
    n bytes        JSON: name → {dtype, shape, data_offsets: [begin, end]}
    the rest       tensors, back to back; offsets count from its start

The file is a stranger's: lengths, offsets, overlaps, counts and names are all suspects.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
from msgspec import Struct

from gateway.errors import InvalidAdapter

HEADER_BYTES_MAX = 4 * 2**20
TENSORS_MAX = 20_000
NAME_CHARS_MAX = 512
CHUNK_BYTES = 2**20
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "I16": 2, "U16": 2, "F16": 2,
    "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
READABLE = ("F32", "F16", "BF16")

# What people name .safetensors by mistake; all but the first few bytes stay unread.
MAGIC = (
    (b"PK\x03\x04", "a zip archive (PyTorch's .bin and .pt files are such, too)"),
    (b"\x80\x02", "a Python pickle"),
    (b"\x80\x03", "a Python pickle"),
    (b"\x80\x04", "a Python pickle"),
    (b"\x80\x05", "a Python pickle"),
    (b"GGUF", "a GGUF file"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive"),
    (b"\x93NUMPY", "a NumPy file"),
    (b"\x89HDF", "an HDF5 file"),
    (b"version https://git-lfs", "a Git LFS pointer: the file itself was not downloaded"),
    (b"<", "an HTML or XML page"),
    (b"{", "a JSON text"),
)
ADVICE = "Save the adapter with model.save_pretrained(folder, safe_serialization=True)."


Values = np.ndarray[Any, np.dtype[np.floating[Any]]]


class TensorEntry(Struct, frozen=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """First byte, from the start of the file."""
    end: int


class Peak(Struct, frozen=True):
    """The largest absolute value of a tensor, and whether it is finite."""

    name: str
    value: float


def read_header(path: Path) -> list[TensorEntry]:
    """The tensors of the file in the order in which they lie.

    Raises InvalidAdapter, with the reason, for anything that is not a sound safetensors file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(64)
        if not head:
            _refuse("is empty.")
        length = int.from_bytes(head[:8], "little")
        if size < 8 or length > HEADER_BYTES_MAX or 8 + length > size or head[8:9] != b"{":
            _refuse(_not_safetensors(head, size, length))
        file.seek(8)
        text = file.read(length)
    entries = sorted(_entries(_parse(text), 8 + length), key=lambda entry: (entry.start, entry.end))
    position = 8 + length
    for entry in entries:
        if entry.start != position:
            what = "overlaps the tensor before it" if entry.start < position else "leaves a gap"
            _refuse(f"is damaged: {entry.name!r} {what} (byte {entry.start}).")
        position = entry.end
    if position != size:
        what = "was cut short" if position > size else "has bytes that belong to no tensor"
        _refuse(f"{what}: its header describes {position} bytes, the file has {size}.")
    return entries


def peaks(path: Path, entries: list[TensorEntry]) -> Iterator[Peak]:
    """Each tensor's largest absolute value (NaN or inf if it holds one), reading 1 MiB at a time.

    Every dtype must be in READABLE.
    """
    with path.open("rb") as file:
        for entry in entries:
            yield Peak(entry.name, _peak(file, entry))


def values_sha256(path: Path, entry: TensorEntry, dtype: str) -> str:
    """SHA-256 of a tensor's values as `dtype` (float32, bfloat16 or float16), little endian.

    Its own dtype must be in READABLE.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for values in _values(file, entry):
            digest.update(_rounded(values, dtype).tobytes())
    return digest.hexdigest()


def equal_transposed(path: Path, one: TensorEntry, other: TensorEntry) -> bool:
    """Whether two matrices hold the same, one of them transposed. Reads only what it compares."""
    if one.dtype != other.dtype or one.shape != other.shape[::-1]:
        return False
    kind = f"<u{DTYPE_BYTES[one.dtype]}"
    mapped = [np.memmap(path, kind, "r", each.start, each.shape) for each in (one, other)]
    return np.array_equal(mapped[0], mapped[1].T)


def _peak(file: BinaryIO, entry: TensorEntry) -> float:
    highest = 0.0
    for values in _values(file, entry):
        value = float(np.max(np.abs(values)))
        if not value <= highest:  # NaN is not ≤ anything, and stays
            highest = value
        if not np.isfinite(highest):
            return highest
    return highest


def _values(file: BinaryIO, entry: TensorEntry) -> Iterator[Values]:
    file.seek(entry.start)
    left = entry.end - entry.start
    while left:
        chunk = file.read(min(left, CHUNK_BYTES))
        if not chunk:
            _refuse(f"was cut short within {entry.name!r}.")
        left -= len(chunk)
        if entry.dtype == "BF16":  # the upper half of a float32
            yield (np.frombuffer(chunk, "<u2").astype("<u4") << 16).view("<f4")
        else:
            yield np.frombuffer(chunk, {"F32": "<f4", "F16": "<f2"}[entry.dtype])


def _rounded(values: Values, dtype: str) -> np.ndarray[Any, np.dtype[Any]]:
    if dtype == "bfloat16":  # to nearest, ties to even
        bits = values.astype("<f4").view(np.uint32)
        bits += 0x7FFF + ((bits >> 16) & 1)
        return (bits >> 16).astype("<u2")
    with np.errstate(over="ignore"):
        return values.astype("<f2" if dtype == "float16" else "<f4")


def _not_safetensors(head: bytes, size: int, length: int) -> str:
    for magic, name in MAGIC:
        if head.startswith(magic):
            return f"is not a safetensors file but {name}. {ADVICE}"
    if size < 8:
        return f"has {size} bytes, too few for a safetensors file."
    if length <= HEADER_BYTES_MAX and 8 + length > size:
        return f"was cut short: its header alone has {length} bytes, the file {size}."
    if length > HEADER_BYTES_MAX and head[8:9] == b"{":
        return f"has a header of {length} bytes; at most {HEADER_BYTES_MAX} are read."
    return f"is not a safetensors file. {ADVICE}"


def _parse(text: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            _refuse("is damaged: its header names something twice.")
        return found

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError):
        _refuse("is damaged: its header is not JSON.")
    if not isinstance(header, dict):
        _refuse("is damaged: its header is not a JSON object.")
    return header


def _entries(header: dict[str, Any], offset: int) -> Iterator[TensorEntry]:
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        _refuse("is damaged: __metadata__ must map texts to texts.")
    if len(header) > TENSORS_MAX:
        _refuse(f"has {len(header)} tensors; at most {TENSORS_MAX} are read.")
    for name, tensor in header.items():
        if len(name) > NAME_CHARS_MAX:
            _refuse(f"has a tensor name of {len(name)} characters.")
        yield _entry(name, tensor, offset)


def _entry(name: str, tensor: object, offset: int) -> TensorEntry:
    if not isinstance(tensor, dict) or tensor.keys() != {"dtype", "shape", "data_offsets"}:
        _refuse(f"is damaged: {name!r} must have dtype, shape and data_offsets.")
    dtype, shape, offsets = tensor["dtype"], tensor["shape"], tensor["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        _refuse(f"is damaged: {name!r} has the unknown dtype {str(dtype)[:40]!r}.")
    if not _naturals(shape) or len(shape) > 8 or not _naturals(offsets) or len(offsets) != 2:
        _refuse(f"is damaged: the shape or the offsets of {name!r} are not sizes.")
    elements = 1
    for length in shape:
        elements *= length
    begin, end = offsets
    if end - begin != elements * DTYPE_BYTES[dtype]:
        _refuse(
            f"is damaged: {name!r} ({dtype}, shape {shape}) needs {elements * DTYPE_BYTES[dtype]}"
            f" bytes, its offsets hold {end - begin}."
        )
    return TensorEntry(name, dtype, tuple(shape), offset + begin, offset + end)


def _naturals(value: object) -> bool:
    """Whether it is a list of whole numbers that a file on this planet could have as sizes."""
    return isinstance(value, list) and all(
        type(item) is int and 0 <= item < 2**48 for item in value
    )


def _refuse(reason: str) -> NoReturn:
    raise InvalidAdapter(f"adapter_model.safetensors {reason}", param="weights")
