"""An adapter version's pages as a file beside its weights, so that it is parsed, cast and laid out
once: when it is uploaded and tried. Later reads are one copy from a file and a checksum.

    header length (8 bytes) │ header, MessagePack │ pages, as they will lie in the pool
"""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch

from gateway.engine.memory.buffer import Slab
from gateway.engine.memory.rows import RowLayout

FORMAT = 1
"""Counts up when the layout of pages changes: older files are then written anew."""
CHUNK_BYTES = 1 << 22


class Header(msgspec.Struct, frozen=True):
    """What must be the same for the pages to be used."""

    format: int
    source: str
    """Of the weights and of how they are scaled: a digest of the manifest."""
    dtype: str
    page_elements: int
    pages: int
    sha256: str
    """Of the pages."""


def read_through(
    folder: Path,
    source: str,
    layout: RowLayout,
    page_elements: int,
    dtype: torch.dtype,
    pin: bool,
    make: Callable[[], Slab],
) -> Slab:
    """The pages from their file if it is there and whole, else from `make`, and then written."""
    path = folder / f"pages-{str(dtype).removeprefix('torch.')}-{page_elements}.bin"
    slab = _read(path, source, layout, page_elements, dtype, pin)
    if slab is None:
        slab = make()
        _write(path, source, slab)
    return slab


def _read(
    path: Path, source: str, layout: RowLayout, page_elements: int, dtype: torch.dtype, pin: bool
) -> Slab | None:
    try:
        with path.open("rb") as file:
            header = _header(file)
            pages_NP = torch.empty(layout.pages, page_elements, dtype=dtype, pin_memory=pin)
            if header != _expected(source, pages_NP, header.sha256):
                return None
            if _fill(file, pages_NP) != header.sha256 or file.read(1):
                return None
    except (OSError, msgspec.MsgspecError):
        return None
    return Slab(layout, pages_NP)


def _header(file: BinaryIO) -> Header:
    length = int.from_bytes(file.read(8), "little")
    return msgspec.msgpack.decode(file.read(min(length, CHUNK_BYTES)), type=Header)


def _expected(source: str, pages_NP: torch.Tensor, sha256: str) -> Header:
    pages, page_elements = pages_NP.shape
    return Header(FORMAT, source, str(pages_NP.dtype), page_elements, pages, sha256)


def _fill(file: BinaryIO, pages_NP: torch.Tensor) -> str:
    digest, at = hashlib.sha256(), 0
    into = _bytes(pages_NP)
    while count := file.readinto(into[at : at + CHUNK_BYTES]):  # type: ignore[attr-defined]  # of a raw file
        digest.update(into[at : at + count])
        at += count
    return digest.hexdigest() if at == len(into) else ""


def _write(path: Path, source: str, slab: Slab) -> None:
    """Whole or not at all. That it can't be written (a store that is read only) costs time."""
    into = _bytes(slab.pages_NP)
    header = _expected(source, slab.pages_NP, hashlib.sha256(into).hexdigest())
    encoded = msgspec.msgpack.encode(header)
    with contextlib.suppress(OSError):
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(len(encoded).to_bytes(8, "little") + encoded)
                file.write(into)
            Path(name).replace(path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise


def _bytes(pages_NP: torch.Tensor) -> memoryview:
    return pages_NP.view(torch.uint8).view(-1).numpy().data
