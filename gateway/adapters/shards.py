"""Weights in several safetensors files with an index, joined into one.

    adapter_model.safetensors.index.json          {"weight_map": {tensor: file}}
    adapter_model-00001-of-00003.safetensors      …

The order in the joined file is the one in which the safetensors library writes: wider types first,
then names. So the same adapter has the same digest however it was cut, and whole.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from gateway.adapters.safetensors_header import (
    CHUNK_BYTES,
    DTYPE_BYTES,
    HEADER_BYTES_MAX,
    TENSORS_MAX,
    TensorEntry,
    read_header,
)
from gateway.engine.messages import WEIGHTS_FILE
from gateway.errors import InvalidAdapter

INDEX_FILE = "adapter_model.safetensors.index.json"
INDEX_BYTES_MAX = HEADER_BYTES_MAX
SHARD = re.compile(r"adapter_model-[0-9]{5}-of-[0-9]{5}\.safetensors")
SHARDS_MAX = 64
WIDTHS = {dtype: place for place, dtype in enumerate(DTYPE_BYTES)}
"""In the order of safetensors' own list of types."""


def is_sharded(folder: Path) -> bool:
    return (folder / INDEX_FILE).exists() or any(_shards(folder))


def join(folder: Path) -> str:
    """Make WEIGHTS_FILE of the shards in `folder`, which are removed; returns its SHA-256.

    Reads 1 MiB at a time. Raises InvalidAdapter.
    """
    if (folder / WEIGHTS_FILE).exists():
        _refuse(f"There are shards beside {WEIGHTS_FILE}. Send one or the other.")
    shards = _shards(folder)
    where = _read_index(folder / INDEX_FILE, shards)
    tensors = list(_tensors(folder, shards, where))
    tensors.sort(key=lambda tensor: (-WIDTHS[tensor[1].dtype], tensor[1].name.encode()))
    digest = hashlib.sha256()
    with ExitStack() as opened:
        joined = opened.enter_context((folder / WEIGHTS_FILE).open("xb"))
        files = {name: opened.enter_context((folder / name).open("rb")) for name in shards}
        for chunk in _file(tensors, files):
            digest.update(chunk)
            joined.write(chunk)
    for name in (INDEX_FILE, *shards):
        (folder / name).unlink()
    return digest.hexdigest()


def _shards(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if SHARD.fullmatch(path.name))


def _read_index(path: Path, shards: list[str]) -> dict[str, str]:
    """Tensor → shard."""
    if not path.exists():
        _refuse(f"{INDEX_FILE} is missing: it says which tensor is in which shard.")
    if len(shards) > SHARDS_MAX:
        _refuse(f"There are {len(shards)} shards; at most {SHARDS_MAX} are read.")
    where = _weight_map(path.read_bytes())
    named = set(where.values())
    if missing := sorted(named - set(shards)):
        _refuse(f"{INDEX_FILE} names {missing[0][:100]!a}, which is not there.")
    if extra := sorted(set(shards) - named):
        _refuse(f"{extra[0]} is not in {INDEX_FILE}.")
    return where


def _weight_map(text: bytes) -> dict[str, str]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            _refuse(f"{INDEX_FILE} names something twice.")
        return found

    try:
        index = json.loads(text.decode(), object_pairs_hook=once)
    except (ValueError, RecursionError):
        _refuse(f"{INDEX_FILE} is not JSON.")
    where = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        _refuse(f"{INDEX_FILE} must have a weight_map from tensors to files.")
    return where


def _tensors(
    folder: Path, shards: list[str], where: dict[str, str]
) -> Iterator[tuple[str, TensorEntry]]:
    """Each tensor with its shard, once, and where the index says it is."""
    seen: set[str] = set()
    for shard in shards:
        for entry in _header(folder, shard):
            if entry.name in seen:
                _refuse(f"{_shown(entry.name)} is in several shards.")
            if where.get(entry.name) != shard:
                _refuse(f"{_shown(entry.name)} is in {shard}; {INDEX_FILE} says otherwise.")
            if not entry.name.isprintable():
                _refuse(f"{shard} has a tensor with a name that cannot be written.")
            seen.add(entry.name)
            if len(seen) > TENSORS_MAX:
                _refuse(f"There are more than {TENSORS_MAX} tensors.")
            yield shard, entry
    if missing := sorted(where.keys() - seen):
        _refuse(f"{INDEX_FILE} names {_shown(missing[0])}, which is in no shard.")


def _header(folder: Path, shard: str) -> list[TensorEntry]:
    try:
        return read_header(folder / shard)
    except InvalidAdapter as error:  # it speaks of the one file that most adapters have
        _refuse(error.message.replace(WEIGHTS_FILE, shard, 1))


def _file(tensors: list[tuple[str, TensorEntry]], files: Mapping[str, BinaryIO]) -> Iterator[bytes]:
    """The joined file: what safetensors writes for these tensors with PEFT's metadata."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for _, entry in tensors:
        end = position + entry.end - entry.start
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": (position, end),
        }
        position = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for shard, entry in tensors:
        file = files[shard]
        file.seek(entry.start)
        for start in range(entry.start, entry.end, CHUNK_BYTES):
            yield file.read(min(CHUNK_BYTES, entry.end - start))


def _shown(name: str) -> str:
    return ascii(name[:100])


def _refuse(reason: str) -> NoReturn:
    raise InvalidAdapter(reason, param="weights")
