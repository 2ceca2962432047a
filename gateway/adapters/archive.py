"""An uploaded archive of a PEFT folder, unpacked member by member.

No size that the archive declares is believed: what comes out is counted, and compared with what
went in. Nested archives are not opened; what is not part of the adapter is not written.
"""

import errno
import gzip
import io
import os
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from backports import zstd

from gateway.adapters.members import MEMBERS_MAX, MemberNames, refuse
from gateway.adapters.peft_config import CONFIG_BYTES_MAX
from gateway.adapters.peft_format import CONFIG_FILE
from gateway.adapters.shards import INDEX_BYTES_MAX, INDEX_FILE
from gateway.adapters.tar_members import BLOCK, CHUNK_BYTES, Stream, TarMembers, is_tar
from gateway.errors import TooLarge

ARCHIVE_FILE = "archive"
"""Its name in a draft; what it is called by whoever sends it says nothing."""
IGNORED_BYTES_MAX = 64 * 2**20
"""Of what is not part of the adapter; in a compressed tar it must be read to be passed over."""
RATIO_MAX = 200
"""Bytes out for each byte in, beyond RATIO_FREE_BYTES. An adapter with half its values zero has 2;
deflate alone can have 1032."""
RATIO_FREE_BYTES = 16 * 2**20
ZIP_DIRECTORY_BYTES_MAX = 2**20
ZSTD_WINDOW_LOG_MAX = 25
"""Memory to unpack is 2 to this: 32 MiB, enough for all levels up to `zstd --ultra -20`."""
FOREIGN = (
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\0", "xz"),
    (b"7z\xbc\xaf\x27\x1c", "7z"),
    (b"Rar!\x1a\x07", "RAR"),
)
ADVICE = "Send a .zip, .tar, .tar.gz or .tar.zst of the folder that save_pretrained wrote."


class _Counted:
    """Bytes as they come out, with an end to them."""

    def __init__(self, archive_bytes: int, bytes_max: int) -> None:
        self._ratio_max = max(RATIO_FREE_BYTES, RATIO_MAX * archive_bytes)
        self._bytes_max = bytes_max + IGNORED_BYTES_MAX
        self._bytes = 0

    def add(self, count: int) -> None:
        self._bytes += count
        if self._bytes > self._ratio_max:
            refuse(f"grows to more than {RATIO_MAX} times its size. No adapter does.")
        if self._bytes > self._bytes_max:
            raise TooLarge(
                f"The archive holds more than the {self._bytes_max} bytes that are unpacked.",
                param="archive",
            )


class _Unpacked:
    """The stream inside a compression."""

    def __init__(self, stream: Stream, counted: _Counted) -> None:
        self._stream, self._counted = stream, counted

    def read(self, size: int, /) -> bytes:
        try:
            data = self._stream.read(size)
        except EOFError:
            refuse("was cut short.")
        except (gzip.BadGzipFile, zlib.error, zstd.ZstdError) as error:
            refuse(f"is damaged: {error}.")
        self._counted.add(len(data))
        return data


class _ZipBytes(io.FileIO):
    """A zip's file. zipfile reads the directory at once, as long as the archive says it is; its
    other reads are small."""

    def read(self, size: int | None = -1, /) -> bytes:
        wanted = -1 if size is None else size
        if wanted > ZIP_DIRECTORY_BYTES_MAX:
            refuse(f"has a directory of more than {ZIP_DIRECTORY_BYTES_MAX} bytes.")
        return super().read(wanted) or b""


def unpack(archive: Path, folder: Path, bytes_max: int) -> None:
    """Write the files of the adapter into `folder`, under PEFT's names for them.

    `bytes_max`: of the weights together. Raises InvalidAdapter, TooLarge.
    """
    counted = _Counted(archive.stat().st_size, bytes_max)
    with archive.open("rb") as file:
        head = file.read(BLOCK)
        file.seek(0)
        if head.startswith(b"PK"):
            _unpack_zip(archive, folder, bytes_max, counted)
        elif head.startswith(b"\x1f\x8b"):
            with gzip.GzipFile(fileobj=file) as stream:
                _unpack_tar(_Unpacked(stream, counted), folder, bytes_max, "gzip")
        elif head.startswith(b"\x28\xb5\x2f\xfd"):
            options = {int(zstd.DecompressionParameter.window_log_max): ZSTD_WINDOW_LOG_MAX}
            with zstd.ZstdFile(file, options=options) as stream:
                _unpack_tar(_Unpacked(stream, counted), folder, bytes_max, "zstd")
        elif is_tar(head):
            _unpack_tar(_Unpacked(file, counted), folder, bytes_max, "tar")
        else:
            refuse(f"is {_named(head)}. {ADVICE}")


def _unpack_tar(stream: _Unpacked, folder: Path, bytes_max: int, kind: str) -> None:
    if kind != "tar":
        # the first header is looked at before it is read as one, for a better word than "damaged"
        head = _first_block(stream)
        if not is_tar(head):
            refuse(f"is {kind} of something that is not a tar. {ADVICE}")
        members = TarMembers(_Chained(head, stream))
    else:
        members = TarMembers(stream)
    names, files = MemberNames(), _Files(folder, bytes_max)
    for member in members:
        wanted = names.wanted(member.name, folder=member.folder)
        if wanted is not None:
            files.write(wanted, members.content())


class _Chained:
    """A stream of which the first bytes were read before."""

    def __init__(self, head: bytes, stream: Stream) -> None:
        self._head, self._stream = head, stream

    def read(self, size: int, /) -> bytes:
        if self._head:
            data, self._head = self._head[:size], self._head[size:]
            return data
        return self._stream.read(size)


def _first_block(stream: Stream) -> bytes:
    head = b""
    while len(head) < BLOCK and (more := stream.read(BLOCK - len(head))):
        head += more
    return head


def _unpack_zip(archive: Path, folder: Path, bytes_max: int, counted: _Counted) -> None:
    names, files = MemberNames(), _Files(folder, bytes_max)
    try:
        with _ZipBytes(archive) as file, zipfile.ZipFile(file) as opened:
            members = opened.infolist()
            if len(members) > MEMBERS_MAX:
                refuse(f"has {len(members)} members; at most {MEMBERS_MAX} are read.")
            for member in members:
                wanted = _wanted_of_zip(member, names)
                if wanted is not None:
                    with opened.open(member) as content:
                        size = files.write(wanted, _counted_chunks(content, counted))
                    if size != member.file_size:
                        refuse(f"is damaged: {wanted} has not the size that it should have.")
    except EOFError:
        refuse("was cut short.")
    except (zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        refuse(f"is damaged: {error}.")
    except (struct.error, ValueError, OverflowError) as error:  # fields that no zip has
        refuse(f"is damaged: {error}.")
    except OSError as error:
        if error.errno != errno.EINVAL:  # a place before the file's beginning
            raise
        refuse("is damaged: it names a place outside of itself.")


def _wanted_of_zip(member: zipfile.ZipInfo, names: MemberNames) -> str | None:
    name = member.orig_filename  # zipfile cuts the other at a zero byte
    if member.flag_bits & 0x1:
        refuse(f"has an encrypted member: {name[:100]!a}.")
    kind = stat.S_IFMT(member.external_attr >> 16)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        what = "a symbolic link" if kind == stat.S_IFLNK else "a device, a pipe or a socket"
        refuse(f"has a member that is {what}, not a file: {name[:100]!a}.")
    wanted = names.wanted(name, folder=name.endswith("/"))
    if wanted and member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        refuse(f"has {wanted} in a compression that is not read; deflate is.")
    return wanted


def _counted_chunks(stream: Stream, counted: _Counted) -> Iterator[bytes]:
    while chunk := stream.read(CHUNK_BYTES):
        counted.add(len(chunk))
        yield chunk


class _Files:
    """The files of the draft, which together stay under the limits."""

    def __init__(self, folder: Path, bytes_max: int) -> None:
        self._folder, self._bytes_max = folder, bytes_max
        self._weights_bytes = 0

    def write(self, name: str, chunks: Iterable[bytes]) -> int:
        """Returns the file's size."""
        size = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with open(os.open(self._folder / name, flags, 0o600), "wb") as file:
            for chunk in chunks:
                size += len(chunk)
                self._check(name, size)
                file.write(chunk)
        if name not in (CONFIG_FILE, INDEX_FILE):
            self._weights_bytes += size
        return size

    def _check(self, name: str, size: int) -> None:
        others = {CONFIG_FILE: CONFIG_BYTES_MAX, INDEX_FILE: INDEX_BYTES_MAX}
        most = others.get(name, self._bytes_max - self._weights_bytes)
        if size > most:
            raise TooLarge(
                f"{name} in the archive is larger than the {others.get(name, self._bytes_max)} "
                "bytes that one adapter may have.",
                param="archive",
            )


def _named(head: bytes) -> str:
    for magic, name in FOREIGN:
        if head.startswith(magic):
            return f"{name}, which is not read"
    return "empty" if not head else "no archive that is known here"
