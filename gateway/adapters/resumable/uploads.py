"""An archive that comes in parts, and goes on after an interruption.

    create → put parts, in any order, several at once → complete
                                                       → cancel, or expire

A part counts once it is synced to disk and its row is committed; so after a crash the rows say what
need not be sent again. Completing is the same as an upload of the archive at once, and can be done
again if it was interrupted. What has ended leaves its row for the rest of the day.
"""

import asyncio
import errno
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from gateway.adapters import catalog, versions
from gateway.adapters.allowance import Allowance
from gateway.adapters.parts import Received
from gateway.adapters.resumable import rows
from gateway.adapters.resumable.rows import NewUpload, Progress
from gateway.adapters.resumable.spool import Part, Spool
from gateway.adapters.store import store_folder
from gateway.adapters.upload import STORAGE_RETRY_S, Upload, Uploaded
from gateway.background import in_background
from gateway.db import Database
from gateway.errors import (
    ApiError,
    Conflict,
    EngineUnavailable,
    InvalidAdapter,
    InvalidRequest,
    Overloaded,
    TooLarge,
)
from gateway.settings import Settings

logger = logging.getLogger(__name__)

PART_BYTES_MAX = 64 * 2**20
RESERVE_BYTES = 256 * 2**20
"""Of the disk, for what the gateway itself writes."""
JANITOR_S = 600.0
OTHER_BYTES_MAX = 8 * 2**20
"""Of an archive beside its weights; compressed it may hold more."""


class Uploads:
    """The open uploads of all tenants; one instance in a process."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._bytes_max = settings.adapters.upload_bytes_max + OTHER_BYTES_MAX
        self._database = database
        self._spool = Spool(store_folder(settings) / "uploads")
        self._completing: set[str] = set()

    async def create(
        self,
        tenant_id: str,
        allowance: Allowance,
        new: NewUpload,
        key: str | None,
        base_model: str | None,
    ) -> tuple[Progress, bool]:
        """Raises the ApiError that would refuse such an adapter later."""
        if base_model is None:
            raise EngineUnavailable("The base model is being loaded.")
        catalog.check_name(new.name, base_model)
        allowance.check_name(new.name)
        if new.size_bytes > self._bytes_max:
            raise TooLarge(
                f"An archive may have {self._bytes_max} bytes, not {new.size_bytes}.", param="bytes"
            )
        # the parts, the archive made of them, and what is unpacked from it
        await asyncio.to_thread(self._check_disk, 3 * new.size_bytes)
        async with self._database.session() as session:
            await catalog.check_room(session, tenant_id, new.name, new.size_bytes, allowance)
        async with self._database.writing() as session:
            upload, is_new = await rows.create(session, tenant_id, new, key)
            return await rows.find(session, tenant_id, upload.id), is_new

    async def look(self, tenant_id: str, upload_id: str) -> Progress:
        async with self._database.session() as session:
            return await rows.find(session, tenant_id, upload_id)

    async def put(
        self,
        tenant_id: str,
        allowance: Allowance,
        upload_id: str,
        number: int,
        sha256: str,
        chunks: AsyncIterator[bytes],
    ) -> Part:
        """Take a part in. The same part again is fine."""
        async with self._database.session() as session:
            progress = await rows.find(session, tenant_id, upload_id)
            name, size_bytes = progress.upload.name, progress.upload.size_bytes
            await catalog.check_room(session, tenant_id, name, size_bytes, allowance)
        there = rows.check_part(progress, number, sha256, 0)
        if there is not None:
            async for _ in chunks:  # to the end, so that the connection can be used again
                pass
            return there
        left = size_bytes - progress.received_bytes
        with _full_disk():
            await asyncio.to_thread(self._check_disk, left)
            try:
                part = await self._spool.receive(
                    upload_id, number, sha256, _at_most(chunks, left, size_bytes)
                )
            except FileNotFoundError:
                raise Conflict("This upload was ended meanwhile.") from None
        try:
            async with self._database.writing() as session:
                await rows.add_part(session, tenant_id, upload_id, part)
        except ApiError:
            await self._tidy(tenant_id, upload_id)
            raise
        return part

    async def complete(
        self,
        tenant_id: str,
        allowance: Allowance,
        upload_id: str,
        sha256: str,
        upload: Upload,
    ) -> Uploaded:
        """Make the adapter. What is refused for good ends the upload."""
        progress = await self.look(tenant_id, upload_id)
        row = progress.upload
        if row.status == "failed":
            raise InvalidAdapter(row.failure, param="archive")
        if row.status == "completed":
            return await self._again(tenant_id, row.name, row.version_digest)
        if row.status != rows.PENDING:
            raise Conflict(f"This upload is {row.status}. Begin another.")
        if not progress.is_whole:
            raise InvalidRequest(
                f"{progress.received_bytes} of {row.size_bytes} bytes are there, in parts "
                f"{_numbers(progress)}. Parts are numbered from 1, without gaps."
            )
        expected = {text for text in (row.sha256, sha256) if text}
        with self._alone(upload_id):
            try:
                uploaded = await upload.take_in(
                    tenant_id,
                    allowance,
                    lambda draft: self._fill(progress, expected, draft),
                )
            except (InvalidAdapter, TooLarge) as error:
                await self._end(tenant_id, upload_id, "failed", failure=error.message)
                raise
            digest = uploaded.placed.adapter.version_digest
            await self._end(tenant_id, upload_id, "completed", version_digest=digest)
        return uploaded

    async def _again(self, tenant_id: str, name: str, digest: str) -> Uploaded:
        """For a client that has lost the answer."""
        async with self._database.session() as session:
            adapter = await catalog.find(session, tenant_id, name)
            number = adapter and await versions.number_of(session, adapter.id, digest)
        if not adapter or not number:
            raise Conflict("This upload is completed, and its version was deleted since.")
        return Uploaded(catalog.Placed(adapter, number, changed=False), [])

    async def cancel(self, tenant_id: str, upload_id: str) -> Progress:
        with self._alone(upload_id):
            return await self._end(tenant_id, upload_id, "cancelled")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Clear away now and then what has expired."""
        await asyncio.to_thread(self._spool.open)
        async with in_background(self._clear_forever()):
            yield

    async def clear(self) -> None:
        """Remove expired uploads, and folders that no upload needs."""
        async with self._database.writing() as session:
            gone = await rows.remove_expired(session)
        for upload_id in gone:
            await asyncio.to_thread(self._spool.remove, upload_id)
        folders = await asyncio.to_thread(self._spool.old_folders)
        async with self._database.session() as session:
            needed = await rows.open_among(session, folders)
        for upload_id in set(folders) - needed:
            await asyncio.to_thread(self._spool.remove, upload_id)

    async def _clear_forever(self) -> None:
        while True:
            try:
                await self.clear()
            except (ApiError, OSError):  # the next round may do better
                logger.warning("expired uploads were not cleared away", exc_info=True)
            await asyncio.sleep(JANITOR_S)

    async def _fill(self, progress: Progress, expected: set[str], draft: Path) -> Received:
        upload = progress.upload
        try:
            sha256 = await asyncio.to_thread(self._spool.assemble, upload.id, progress.parts, draft)
        except FileNotFoundError:
            raise Conflict("This upload was ended meanwhile.") from None
        if expected - {sha256}:
            raise InvalidAdapter(
                f"The archive has the SHA-256 {sha256}, not the one announced.", param="sha256"
            )
        return Received(upload.name)

    async def _end(self, tenant_id: str, upload_id: str, status: str, **told: str) -> Progress:
        async with self._database.writing() as session:
            progress = await rows.end(session, tenant_id, upload_id, status, **told)
        await asyncio.to_thread(self._spool.remove, upload_id)
        return progress

    async def _tidy(self, tenant_id: str, upload_id: str) -> None:
        """A part came for an upload that has ended: its folder may have been made again."""
        async with self._database.session() as session:
            needed = await rows.open_among(session, [upload_id])
        if not needed:
            await asyncio.to_thread(self._spool.remove, upload_id)

    @contextmanager
    def _alone(self, upload_id: str) -> Iterator[None]:
        """Against another in this process; one in another finds the same content, or no parts."""
        if upload_id in self._completing:
            raise Conflict("This upload is being completed.")
        self._completing.add(upload_id)
        try:
            yield
        finally:
            self._completing.discard(upload_id)

    def _check_disk(self, size_bytes: int) -> None:
        if self._spool.free_bytes() < size_bytes + RESERVE_BYTES:
            raise _storage_full()


async def _at_most(
    chunks: AsyncIterator[bytes], left: int, size_bytes: int
) -> AsyncIterator[bytes]:
    async for chunk in chunks:
        left -= len(chunk)
        if left < 0:
            raise TooLarge(
                f"The upload was announced with {size_bytes} bytes; this part goes beyond them."
            )
        yield chunk


@contextmanager
def _full_disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise _storage_full() from error


def _storage_full() -> Overloaded:
    return Overloaded(
        "The adapter store is full. Tell the operator, or try again later.",
        code="storage_full",
        retry_after_s=STORAGE_RETRY_S,
    )


def _numbers(progress: Progress) -> str:
    numbers = [str(part.number) for part in progress.parts[:20]]
    more = ", …" if len(progress.parts) > 20 else ""
    return ", ".join(numbers) + more if numbers else "none"
