"""Where the parts of open uploads lie.

    <store>/uploads/<upload>/<number>-<sha256>     a part
    <store>/uploads/<upload>/<random>.writing      a part that is being written

A part's name says what is in it, so that of two at once for the same number neither overwrites the
other. All methods but `receive` block; call them in a thread.
"""

import asyncio
import hashlib
import os
import re
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct

from gateway.adapters.archive import ARCHIVE_FILE
from gateway.errors import InvalidRequest

ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
WRITE_BYTES = 2**20
CHUNK_BYTES = 2**20
ORPHAN_S = 3600.0
"""A folder without a row is one that is being made, or was left by a crash."""


class Part(Struct, frozen=True):
    number: int
    size_bytes: int
    sha256: str


class Spool:
    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()

    def open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def free_bytes(self) -> int:
        return shutil.disk_usage(self._folder).free

    async def receive(
        self, upload_id: str, number: int, sha256: str, chunks: AsyncIterator[bytes]
    ) -> Part:
        """Write a part as it arrives; on disk for good when this returns.

        Raises InvalidRequest if it is not what `sha256` says, and what `chunks` raises.
        """
        writing = await asyncio.to_thread(self._begin, upload_id)
        try:
            waiting: list[bytes] = []
            size = 0
            async for chunk in chunks:
                waiting.append(chunk)
                size += len(chunk)
                if size >= WRITE_BYTES:
                    await asyncio.to_thread(writing.write, waiting)
                    waiting, size = [], 0
            await asyncio.to_thread(writing.write, waiting)
            if writing.sha256 != sha256:
                raise InvalidRequest(
                    f"Part {number} arrived with the SHA-256 {writing.sha256}, not the one "
                    "announced. Send it again.",
                    param="x-content-sha256",
                )
            part = Part(number, writing.size_bytes, sha256)
            await asyncio.to_thread(writing.keep, self._place(upload_id, part))
            return part
        finally:
            await asyncio.to_thread(writing.discard)

    def assemble(self, upload_id: str, parts: Iterable[Part], draft: Path) -> str:
        """Put the parts together as the archive of a draft; returns the SHA-256 of the whole.

        The parts are not compared with their own again: they were when they came. Raises
        FileNotFoundError if the upload was ended meanwhile.
        """
        whole = hashlib.sha256()
        with (draft / ARCHIVE_FILE).open("xb") as archive:
            for part in parts:
                with self._place(upload_id, part).open("rb") as file:
                    while chunk := file.read(CHUNK_BYTES):
                        whole.update(chunk)
                        archive.write(chunk)
        return whole.hexdigest()

    def remove(self, upload_id: str) -> None:
        """Safe to call twice."""
        shutil.rmtree(self._upload(upload_id), ignore_errors=True)

    def old_folders(self) -> list[str]:
        """The uploads with a folder that is no longer being made."""
        found = []
        for folder in self._folder.iterdir():
            with suppress(FileNotFoundError):  # another process clears away, too
                if ID.fullmatch(folder.name) and time.time() - folder.stat().st_mtime > ORPHAN_S:
                    found.append(folder.name)
        return found

    def _begin(self, upload_id: str) -> "_Writing":
        folder = self._upload(upload_id)
        folder.mkdir(mode=0o700, exist_ok=True)
        return _Writing(folder / f"{uuid.uuid4().hex}.writing")

    def _upload(self, upload_id: str) -> Path:
        assert ID.fullmatch(upload_id), "names of folders are ours"
        return self._folder / upload_id

    def _place(self, upload_id: str, part: Part) -> Path:
        return self._upload(upload_id) / f"{part.number}-{part.sha256}"


class _Writing:
    """A part's file until it has its name."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO = path.open("xb")
        self._sha256 = hashlib.sha256()
        self.size_bytes = 0

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    def write(self, chunks: list[bytes]) -> None:
        data = b"".join(chunks)
        self._file.write(data)
        self._sha256.update(data)
        self.size_bytes += len(data)

    def keep(self, place: Path) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._path.rename(place)
        descriptor = os.open(place.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def discard(self) -> None:
        """What `keep` has renamed stays."""
        self._file.close()
        self._path.unlink(missing_ok=True)
