"""The members of a tar, one after the other, from a stream that cannot go back.

    512 bytes      header: name, size, kind, checksum
    size bytes     content, padded to 512; …
    1024 zeros     the end

`tarfile` parses single headers here. Its own loop over them keeps whatever the extended headers
and the sparse maps declare in memory, without a limit.
"""

import tarfile
from collections.abc import Iterator
from typing import Protocol

from msgspec import Struct

from gateway.adapters.members import MEMBERS_MAX, refuse

BLOCK = tarfile.BLOCKSIZE
EXTENDED_BYTES_MAX = 64 * 1024
HEADERS_MAX = 4 * MEMBERS_MAX
CHUNK_BYTES = 2**20
KINDS = {
    tarfile.LNKTYPE: "a hard link",
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a pipe",
    tarfile.GNUTYPE_SPARSE: "a sparse file",
}
FILES = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)


class Stream(Protocol):
    def read(self, size: int, /) -> bytes: ...


class Member(Struct, frozen=True):
    name: str
    folder: bool
    size: int


def is_tar(head: bytes) -> bool:
    """Whether it begins as a tar: by the checksum of its first header, as tars have no magic."""
    try:
        tarfile.TarInfo.frombuf(head[:BLOCK], "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


class TarMembers:
    """Iterate over the members; `content` yields that of the member just told, if it is wanted."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._left = 0
        """Bytes of the member's content that have not been read, without the padding."""
        self._padding = 0

    def __iter__(self) -> Iterator[Member]:
        name, size = None, None
        for _ in range(HEADERS_MAX):
            self._skip()
            header = self._header()
            if header is None:
                self._check_end()
                return
            self._left, self._padding = header.size, -header.size % BLOCK
            if header.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.XGLTYPE):
                records = _pax(self._extended(header))
                if header.type == tarfile.XGLTYPE and {"path", "size"} & records.keys():
                    refuse("has a name or a size for all its members at once.")
                if any(key.startswith("GNU.sparse") for key in records):
                    refuse("holds a sparse file. Pack it without --sparse.")
                name = records.get("path", name)
                size = records.get("size", size)
            elif header.type == tarfile.GNUTYPE_LONGNAME:
                name = _text(self._extended(header).rstrip(b"\0"))
            elif header.type == tarfile.GNUTYPE_LONGLINK:
                self._extended(header)
            else:
                yield self._member(header, name, size)
                name, size = None, None
        refuse(f"has more than {HEADERS_MAX} headers.")

    def content(self) -> Iterator[bytes]:
        while self._left:
            chunk = self._read(min(self._left, CHUNK_BYTES))
            self._left -= len(chunk)
            yield chunk

    def _member(self, header: tarfile.TarInfo, name: str | None, size: str | None) -> Member:
        name = header.name if name is None else name
        if size is not None:
            if not (size.isascii() and size.isdigit() and len(size) < 20):
                refuse("is damaged: a member's size is not a number.")
            self._left, self._padding = int(size), -int(size) % BLOCK
        folder = header.type == tarfile.DIRTYPE
        if header.type not in FILES and not folder:
            kind = KINDS.get(header.type, f"of the unknown kind {header.type!r}")
            refuse(f"has a member that is {kind}, not a file: {name[:100]!a}.")
        return Member(name, folder, self._left)

    def _header(self) -> tarfile.TarInfo | None:
        block = self._read(BLOCK)
        if block.count(0) == BLOCK:
            return None
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except (tarfile.HeaderError, ValueError):
            refuse("is damaged: a header of the tar is wrong.")
        if header.size < 0:
            refuse("is damaged: a member's size is below zero.")
        return header

    def _extended(self, header: tarfile.TarInfo) -> bytes:
        if header.size > EXTENDED_BYTES_MAX:
            refuse(f"has an extended header of {header.size} bytes.")
        return b"".join(self.content())

    def _skip(self) -> None:
        for _ in self.content():
            pass
        self._read(self._padding)
        self._padding = 0

    def _check_end(self) -> None:
        """Read on to the end: only there the checksum of the compression is compared."""
        while chunk := self._stream.read(CHUNK_BYTES):
            if chunk.count(0) != len(chunk):
                refuse("has something behind its end.")

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            chunk = self._stream.read(size - len(data))
            if not chunk:
                refuse("was cut short.")
            data = data + chunk if data else chunk
        return data


def _pax(text: bytes) -> dict[str, str]:
    """Records of `length key=value\\n`, the length counting itself."""
    records = {}
    while text:
        length, _, _ = text.partition(b" ")
        if not length.isdigit() or not len(length) + 2 < int(length[:9]) <= len(text):
            refuse("is damaged: an extended header is wrong.")
        record, text = text[: int(length)], text[int(length) :]
        key, equals, value = record[len(length) + 1 : -1].partition(b"=")
        if not equals or not record.endswith(b"\n"):
            refuse("is damaged: an extended header is wrong.")
        records[_text(key)] = _text(value)
    return records


def _text(raw: bytes) -> str:
    return raw.decode(errors="surrogateescape")
