"""What `loragate adapters push` sends: the files of a PEFT folder, at once or in parts.

In parts they go as one tar, which is never written: it is read out of the files. It is the same at
every call, so that an interrupted push goes on where it was.
"""

import hashlib
import io
import os
import tarfile
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from msgspec import Struct

from gateway.adapters.peft_format import CONFIG_FILE
from gateway.adapters.shards import INDEX_FILE, SHARD
from gateway.engine.messages import WEIGHTS_FILE

AT_ONCE_BYTES_MAX = 32 * 2**20
"""A larger adapter is sent in parts."""
PART_BYTES = 16 * 2**20

Call = Callable[..., dict[str, Any]]
"""(method, path, options of httpx) → the answer's JSON."""


class NotAnAdapter(Exception):
    """The folder has not what is needed; the message says what."""


def adapter_files(folder: Path) -> list[Path]:
    """The config first. Raises NotAnAdapter."""
    config, weights, index = (folder / name for name in (CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE))
    shards = sorted(path for path in folder.iterdir() if SHARD.fullmatch(path.name))
    wanted = [config, weights] if weights.is_file() or not shards else [config, index, *shards]
    for path in wanted:
        if not path.is_file():
            raise NotAnAdapter(
                f"{path} is missing. PEFT's model.save_pretrained(folder) writes it."
            )
    return wanted


def send_at_once(call: Call, name: str, files: list[Path], moved: Callable[[int], None]) -> Any:
    with ExitStack() as opened:
        parts: dict[str, Any] = {
            path.name: (path.name, opened.enter_context(_WatchedFile(path, moved)))
            for path in files
        }
        return call("POST", "/v1/adapters", data={"name": name}, files=parts)


class Step(Struct, frozen=True):
    """A part of a tar."""

    number: int
    start: int
    size_bytes: int
    sha256: str


def send_in_parts(
    call: Call, name: str, files: list[Path], moved: Callable[[int], None], part_bytes: int
) -> Any:
    """Goes on where an earlier call for the same files and name was interrupted."""
    with opened_tar(files) as tar:
        steps = list(_steps(tar, part_bytes))
        whole = hashlib.sha256("".join(step.sha256 for step in steps).encode()).hexdigest()
        key = hashlib.sha256(f"push {name} {part_bytes} {whole}".encode()).hexdigest()
        upload = call(
            "POST",
            "/v1/uploads",
            json={"name": name, "bytes": tar.size_bytes},
            headers={"idempotency-key": key},
        )
        there = {part["number"] for part in upload["parts"]}
        path = f"/v1/uploads/{upload['id']}"
        for step in steps:
            if step.number not in there:
                call(
                    "PUT",
                    f"{path}/parts/{step.number}",
                    content=tar.read(step.start, step.size_bytes),
                    headers={"x-content-sha256": step.sha256},
                )
            moved(step.size_bytes)
    return call("POST", f"{path}/complete", json={})


class Tar:
    """A tar of files, read at any place."""

    def __init__(self, pieces: list[bytes | tuple[BinaryIO, int]]) -> None:
        self._pieces = pieces
        sizes = [len(piece) if isinstance(piece, bytes) else piece[1] for piece in pieces]
        self._starts = [0, *accumulate(sizes)]
        self.size_bytes = self._starts[-1]

    def read(self, start: int, size: int) -> bytes:
        data: list[bytes] = []
        end = min(start + size, self.size_bytes)
        place = bisect_right(self._starts, start) - 1
        while start < end:
            piece, offset = self._pieces[place], start - self._starts[place]
            wanted = min(end, self._starts[place + 1]) - start
            if isinstance(piece, bytes):
                data.append(piece[offset : offset + wanted])
            else:
                piece[0].seek(offset)
                data.append(piece[0].read(wanted))
            start, place = start + wanted, place + 1
        return b"".join(data)


@contextmanager
def opened_tar(files: list[Path]) -> Iterator[Tar]:
    with ExitStack() as opened:
        pieces: list[bytes | tuple[BinaryIO, int]] = []
        for path in files:
            file: BinaryIO = opened.enter_context(path.open("rb"))
            size = os.fstat(file.fileno()).st_size
            header = tarfile.TarInfo(path.name)
            header.size = size
            pieces += [header.tobuf(tarfile.GNU_FORMAT), (file, size)]
            pieces.append(bytes(-size % tarfile.BLOCKSIZE))
        pieces.append(bytes(2 * tarfile.BLOCKSIZE))
        yield Tar(pieces)


def _steps(tar: Tar, part_bytes: int) -> Iterator[Step]:
    for number, start in enumerate(range(0, tar.size_bytes, part_bytes), 1):
        content = tar.read(start, part_bytes)
        yield Step(number, start, len(content), hashlib.sha256(content).hexdigest())


class _WatchedFile(io.FileIO):
    """A file whose reading is told."""

    def __init__(self, path: Path, moved: Callable[[int], None]) -> None:
        super().__init__(path)
        self._moved = moved

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(-1 if size is None else size) or b""
        self._moved(len(data))
        return data
