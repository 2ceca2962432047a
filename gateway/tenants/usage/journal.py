"""A queue on disk: what is put in survives the process, until it was taken out.

    usage/<id>.jsonl    one line for each entry, the oldest first; its process has it locked
                        ├─ taken out ─┼─ still to be taken ─┤ end

A file whose lock is free was left by a process that died; whoever starts next takes it over.
"""

import fcntl
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from gateway.db import new_id
from gateway.tenants.usage.entries import Entry

log = logging.getLogger(__name__)

BYTES_MAX = 2**30
"""Some three million entries: hours without a database."""
READ_BYTES = 16 * 1024
"""At once into the database: some fifty, a millisecond, so that requests do not wait for them."""
SUFFIX = ".jsonl"


class JournalFull(OSError):
    def __init__(self) -> None:
        super().__init__(f"the journal has reached {BYTES_MAX} bytes")


class Journal:
    """One file. Its methods block for as long as the disk does, and `append` until it is synced;
    whoever calls them from threads sees to it that one at a time is called."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._end = os.fstat(descriptor).st_size
        self._taken = 0
        self._encoder = msgspec.json.Encoder()
        self._decoder = msgspec.json.Decoder(Entry)

    @classmethod
    def create(cls, folder: Path) -> "Journal":
        """Raises OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = folder / f".{new_id()}"
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        path = draft.with_name(draft.name[1:] + SUFFIX)  # seen by others only once it is locked
        draft.rename(path)
        return cls(path, descriptor)

    @classmethod
    def left_behind(cls, folder: Path) -> "list[Journal]":
        """Those of processes that died. Raises OSError."""
        found = []
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            with suppress(FileNotFoundError):
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:  # its process lives
                    os.close(descriptor)
                    continue
                found.append(cls(path, descriptor))
        return found

    @property
    def waiting_bytes(self) -> int:
        return self._end - self._taken

    def append(self, entries: Iterable[Entry]) -> None:
        """Raises OSError; nothing was appended then."""
        data = b"".join(self._encoder.encode(entry) + b"\n" for entry in entries)
        if self._end + len(data) > BYTES_MAX:
            raise JournalFull
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._descriptor, data[written:], self._end + written)
            os.fdatasync(self._descriptor)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._end)
            raise
        self._end += len(data)

    def head(self) -> tuple[list[Entry], int]:
        """The oldest entries, and the place to `take` up to once they are safe elsewhere."""
        data = os.pread(self._descriptor, min(READ_BYTES, self.waiting_bytes), self._taken)
        whole = data.rfind(b"\n") + 1 or len(data)  # the last line may have been torn by a crash
        return self._decoded(data[:whole]), self._taken + whole

    def _decoded(self, data: bytes) -> list[Entry]:
        entries = []
        for line in data.splitlines():
            try:
                entries.append(self._decoder.decode(line))
            except msgspec.DecodeError:
                log.error("%s: %d bytes that are no entry were left out", self.path, len(line))
        return entries

    def take(self, place: int) -> None:
        """Everything before `place` is safe elsewhere. Raises OSError."""
        self._taken = place
        if self._taken == self._end:
            os.ftruncate(self._descriptor, 0)
            self._taken = self._end = 0

    def close(self) -> None:
        """Remove it if nothing is left in it; else it waits for the next process."""
        if not self.waiting_bytes:
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)
