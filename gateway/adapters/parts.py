"""The multipart body of an upload, written to disk as it arrives."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct
from multipart import (  # type: ignore[import-untyped]  # it has no type hints
    MultipartError,
    MultipartSegment,
    ParserLimitReached,
    PushMultipartParser,
    parse_options_header,
)

from gateway.adapters.peft_config import CONFIG_BYTES_MAX
from gateway.adapters.peft_format import CONFIG_FILE
from gateway.engine.messages import WEIGHTS_FILE
from gateway.errors import InvalidRequest, TooLarge, UnsupportedMedia

PARTS_MAX = 8
NAME_BYTES_MAX = 1024
WRITE_BYTES = 2**20
"""Bytes gathered before a thread writes them."""

ADVICE = "Send name, config (adapter_config.json) and weights (adapter_model.safetensors)."


class Received(Struct, frozen=True):
    name: str
    weights_sha256: str


class _Field:
    """A text that fits in memory."""

    def __init__(self, name: str, bytes_max: int) -> None:
        self.name, self._bytes_max = name, bytes_max
        self.value = bytearray()

    async def write(self, chunk: bytes) -> None:
        if len(self.value) + len(chunk) > self._bytes_max:
            raise TooLarge(
                f"{self.name} is larger than the {self._bytes_max} bytes that are read.",
                param=self.name,
            )
        self.value += chunk

    async def flush(self) -> None: ...


class _File:
    """A file on disk, hashed on the way."""

    def __init__(self, name: str, file: BinaryIO, bytes_max: int) -> None:
        self.name, self._file, self._bytes_max = name, file, bytes_max
        self.sha256 = hashlib.sha256()
        self._chunks: list[bytes] = []
        self._waiting, self._size = 0, 0

    async def write(self, chunk: bytes) -> None:
        self._size += len(chunk)
        if self._size > self._bytes_max:
            raise TooLarge(
                f"{WEIGHTS_FILE} is larger than the {self._bytes_max} bytes that one adapter may "
                "have. A smaller rank or fewer target modules make it smaller.",
                param=self.name,
            )
        self._chunks.append(chunk)
        self._waiting += len(chunk)
        if self._waiting >= WRITE_BYTES:
            await self.flush()

    async def flush(self) -> None:
        chunks, self._chunks, self._waiting = self._chunks, [], 0
        await asyncio.to_thread(self._store, b"".join(chunks))

    def _store(self, data: bytes) -> None:
        self._file.write(data)
        self.sha256.update(data)


async def receive(
    chunks: AsyncIterator[bytes], content_type: str, folder: Path, weights_bytes_max: int
) -> Received:
    """Read the parts `name`, `config` and `weights`; write the two files into `folder`.

    Memory stays bounded whatever is sent. Raises InvalidRequest, TooLarge, UnsupportedMedia.
    """
    parser = _parser(content_type)
    file = await asyncio.to_thread((folder / WEIGHTS_FILE).open, "wb")
    try:
        name = _Field("name", NAME_BYTES_MAX)
        config = _Field("config", CONFIG_BYTES_MAX)
        weights = _File("weights", file, weights_bytes_max)
        seen = await _distribute(
            parser, chunks, {"name": name, "config": config, "weights": weights}
        )
    finally:
        await asyncio.to_thread(file.close)
    _check_complete(seen)
    await asyncio.to_thread((folder / CONFIG_FILE).write_bytes, bytes(config.value))
    return Received(_text(name.value), weights.sha256.hexdigest())


async def _distribute(
    parser: PushMultipartParser,
    chunks: AsyncIterator[bytes],
    targets: dict[str, "_Field | _File"],
) -> set[str]:
    """Write each part to its target; returns the names of the parts that were there."""
    seen: set[str] = set()
    target: _Field | _File | None = None
    try:
        with parser:
            async for chunk in chunks:
                for event in parser.parse(chunk):
                    if isinstance(event, MultipartSegment):
                        target = targets[_part(event, seen)]
                        seen.add(target.name)
                    elif event is None and target is not None:
                        await target.flush()
                    elif event is not None and target is not None:
                        await target.write(event)
    except ParserLimitReached as error:
        raise InvalidRequest(
            f"The multipart body has too many or too long parts: {error}."
        ) from None
    except MultipartError as error:
        raise InvalidRequest(f"The multipart body is damaged or was cut short: {error}.") from None
    return seen


def _parser(content_type: str) -> PushMultipartParser:
    kind, options = parse_options_header(content_type)
    if kind != "multipart/form-data":
        raise UnsupportedMedia(f"An upload must be multipart/form-data. {ADVICE}")
    try:
        return PushMultipartParser(options.get("boundary", ""), max_segment_count=PARTS_MAX)
    except MultipartError as error:
        raise InvalidRequest(f"The multipart boundary cannot be used: {error}.") from None


def _part(segment: MultipartSegment, seen: set[str]) -> str:
    """Which part this is, by its field name or the name of the file."""
    aliases = {CONFIG_FILE: "config", WEIGHTS_FILE: "weights"}
    field, filename = segment.name or "", segment.filename or ""
    name = aliases.get(field) or aliases.get(filename) or field
    if filename.endswith((".bin", ".pt", ".pth", ".pkl", ".ckpt")):
        raise InvalidRequest(
            f"{filename[:100]!r} is a pickle, which is never opened here. Save the adapter with "
            "model.save_pretrained(folder, safe_serialization=True).",
            param="weights",
        )
    if name not in ("name", "config", "weights"):
        raise InvalidRequest(f"Unknown part {field[:100]!r}. {ADVICE}", param=field[:100])
    if name in seen:
        raise InvalidRequest(f"The part {name!r} was sent twice.", param=name)
    return name


def _check_complete(seen: set[str]) -> None:
    missing = {
        "name": "name is missing: the model id under which the adapter shall be called.",
        "config": f"{CONFIG_FILE} is missing (part 'config'). PEFT's "
        "model.save_pretrained(folder) writes it.",
        "weights": f"{WEIGHTS_FILE} is missing (part 'weights'). PEFT's "
        "model.save_pretrained(folder) writes it.",
    }
    for name, message in missing.items():
        if name not in seen:
            raise InvalidRequest(message, param=name)


def _text(value: bytearray) -> str:
    try:
        return value.decode().strip()
    except UnicodeDecodeError:
        raise InvalidRequest("name is not UTF-8 text.", param="name") from None
