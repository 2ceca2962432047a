"""The multipart body of an upload, written to disk as it arrives."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

from msgspec import Struct
from multipart import (  # type: ignore[import-untyped]  # it has no type hints
    MultipartError,
    MultipartSegment,
    ParserLimitReached,
    PushMultipartParser,
    parse_options_header,
)

from gateway.adapters.archive import ARCHIVE_FILE
from gateway.adapters.members import PICKLE_ADVICE, PICKLES
from gateway.adapters.peft_config import CONFIG_BYTES_MAX
from gateway.adapters.peft_format import CONFIG_FILE
from gateway.adapters.shards import INDEX_BYTES_MAX, INDEX_FILE, SHARD, SHARDS_MAX
from gateway.engine.messages import WEIGHTS_FILE
from gateway.errors import InvalidRequest, TooLarge, UnsupportedMedia

PARTS_MAX = SHARDS_MAX + 8
NAME_BYTES_MAX = 1024
WRITE_BYTES = 2**20
"""Bytes gathered before a thread writes them."""

ADVICE = (
    "Send name, config (adapter_config.json) and weights (adapter_model.safetensors), or name and "
    "archive."
)
ALIASES = {CONFIG_FILE: "config", WEIGHTS_FILE: "weights", INDEX_FILE: "index"}
FILES = {
    "config": CONFIG_FILE,
    "weights": WEIGHTS_FILE,
    "index": INDEX_FILE,
    "archive": ARCHIVE_FILE,
}
"""Parts that become files of the draft; a shard is a part, and a file, of its own name."""


class Received(Struct, frozen=True):
    """What came beside the files of the draft."""

    name: str
    weights_sha256: str | None = None
    """None: not known yet."""


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

    def __init__(self, name: str, path: Path, room: "_Room") -> None:
        self.name = name
        self._file = path.open("xb")
        self._room = room
        self.sha256 = hashlib.sha256()
        self._chunks: list[bytes] = []
        self._waiting = 0

    async def write(self, chunk: bytes) -> None:
        self._room.take(self.name, len(chunk))
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

    def close(self) -> None:
        self._file.close()


class _Room:
    """What the files may hold: all weights together, the config and the index by themselves."""

    def __init__(self, weights_bytes_max: int) -> None:
        self._weights_bytes_max = self._weights_left = weights_bytes_max
        self._left = {
            "config": CONFIG_BYTES_MAX,
            "index": INDEX_BYTES_MAX,
            "archive": weights_bytes_max + CONFIG_BYTES_MAX,
        }
        self._most = dict(self._left)

    def take(self, name: str, size: int) -> None:
        """Raises TooLarge."""
        if name in self._left:
            self._left[name] -= size
            if self._left[name] < 0:
                raise TooLarge(
                    f"{name} is larger than the {self._most[name]} bytes that are read.", param=name
                )
            return
        self._weights_left -= size
        if self._weights_left < 0:
            raise TooLarge(
                f"{WEIGHTS_FILE} is larger than the {self._weights_bytes_max} bytes that one "
                "adapter may have. A smaller rank or fewer target modules make it smaller.",
                param="weights",
            )


class _Parts:
    """The parts that have come."""

    def __init__(self, folder: Path, weights_bytes_max: int) -> None:
        self._folder, self._room = folder, _Room(weights_bytes_max)
        self.name = _Field("name", NAME_BYTES_MAX)
        self.files: dict[str, _File] = {}
        self.seen: set[str] = set()

    def begin(self, segment: MultipartSegment) -> "_Field | _File":
        part = _part(segment)
        if part in self.seen:
            raise InvalidRequest(f"The part {part!r} was sent twice.", param=part)
        self.seen.add(part)
        if part == "name":
            return self.name
        file = _File(part, self._folder / FILES.get(part, part), self._room)
        self.files[part] = file
        return file

    def close(self) -> None:
        for file in self.files.values():
            file.close()


async def receive(
    chunks: AsyncIterator[bytes], content_type: str, folder: Path, weights_bytes_max: int
) -> Received:
    """Read the parts; write the files among them into `folder`, to be looked at later.

    Memory stays bounded whatever is sent. Raises InvalidRequest, TooLarge, UnsupportedMedia.
    """
    parser = _parser(content_type)
    parts = _Parts(folder, weights_bytes_max)
    try:
        await _distribute(parser, chunks, parts)
    finally:
        await asyncio.to_thread(parts.close)
    _check_complete(parts.seen)
    weights = parts.files.get("weights")
    return Received(_text(parts.name.value), weights.sha256.hexdigest() if weights else None)


async def _distribute(
    parser: PushMultipartParser, chunks: AsyncIterator[bytes], parts: _Parts
) -> None:
    target: _Field | _File | None = None
    try:
        with parser:
            async for chunk in chunks:
                for event in parser.parse(chunk):
                    if isinstance(event, MultipartSegment):
                        target = await asyncio.to_thread(parts.begin, event)
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


def _parser(content_type: str) -> PushMultipartParser:
    kind, options = parse_options_header(content_type)
    if kind != "multipart/form-data":
        raise UnsupportedMedia(f"An upload must be multipart/form-data. {ADVICE}")
    try:
        return PushMultipartParser(options.get("boundary", ""), max_segment_count=PARTS_MAX)
    except MultipartError as error:
        raise InvalidRequest(f"The multipart boundary cannot be used: {error}.") from None


def _part(segment: MultipartSegment) -> str:
    """Which part this is, by its field name or the name of the file."""
    field, filename = segment.name or "", segment.filename or ""
    name = ALIASES.get(field) or ALIASES.get(filename) or field
    if filename.endswith(PICKLES):
        raise InvalidRequest(f"{filename[:100]!r} {PICKLE_ADVICE}", param="weights")
    for shard in (field, filename):
        if SHARD.fullmatch(shard):
            return shard
    if name != "name" and name not in FILES:
        raise InvalidRequest(f"Unknown part {field[:100]!r}. {ADVICE}", param=field[:100])
    return name


def _check_complete(seen: set[str]) -> None:
    missing = {
        "name": "name is missing: the model id under which the adapter shall be called.",
        "config": f"{CONFIG_FILE} is missing (part 'config'). PEFT's "
        "model.save_pretrained(folder) writes it.",
        "weights": f"{WEIGHTS_FILE} is missing (part 'weights'). PEFT's "
        "model.save_pretrained(folder) writes it.",
    }
    if "archive" in seen:
        if beside := sorted(seen - {"name", "archive"}):
            raise InvalidRequest(
                f"There is {beside[0]!r} beside an archive. Send one or the other.", param="archive"
            )
        del missing["config"], missing["weights"]
    elif "index" in seen or any(SHARD.fullmatch(name) for name in seen):
        del missing["weights"]  # they are joined, or refused, where the index is read
    for name, message in missing.items():
        if name not in seen:
            raise InvalidRequest(message, param=name)


def _text(value: bytearray) -> str:
    try:
        return value.decode().strip()
    except UnicodeDecodeError:
        raise InvalidRequest("name is not UTF-8 text.", param="name") from None
