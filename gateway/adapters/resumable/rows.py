"""The rows of resumable uploads. Every function that reads a tenant's takes the tenant and filters
by it."""

from datetime import timedelta

from msgspec import Struct
from sqlalchemy import delete, func, select, text
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.adapters.resumable.spool import ID, Part
from gateway.adapters.resumable.tables import AdapterUpload, AdapterUploadPart
from gateway.db import now
from gateway.errors import Conflict, NotFound, RateLimited, TooLarge

EXPIRES_S = 24 * 3600
"""After it was created, whatever has become of it."""
OPEN_MAX = 16
"""Of one tenant at once."""
PARTS_MAX = 10_000
PENDING = "pending"


class NewUpload(Struct, frozen=True):
    """What is said of an upload when it begins."""

    name: str
    size_bytes: int
    sha256: str


class Progress(Struct, frozen=True):
    upload: AdapterUpload
    parts: list[Part]

    @property
    def received_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    @property
    def is_whole(self) -> bool:
        numbers = [part.number for part in self.parts]
        return self.received_bytes == self.upload.size_bytes and numbers == list(
            range(1, len(numbers) + 1)
        )


async def create(
    session: AsyncSession, tenant_id: str, new: NewUpload, key: str | None
) -> tuple[AdapterUpload, bool]:
    """The upload, and whether it is new: the same key finds the one that is open.

    Raises Conflict for a key that another body has, RateLimited for one upload too many. A session
    that writes.
    """
    await _lock_tenant(session, tenant_id)
    mine = (AdapterUpload.tenant_id == tenant_id, AdapterUpload.status == PENDING)
    current = AdapterUpload.expires_at > now()
    if key is not None:
        before = await session.scalar(
            select(AdapterUpload).where(*mine, AdapterUpload.idempotency_key == key)
        )
        if before is not None and before.expires_at <= now():
            before.idempotency_key = None  # the janitor has not come by yet
            await session.flush()
        elif before is not None:
            if NewUpload(before.name, before.size_bytes, before.sha256) != new:
                raise Conflict(
                    "This Idempotency-Key belongs to an upload with another body. Use another key."
                )
            return before, False
    count = await session.scalar(
        select(func.count()).select_from(AdapterUpload).where(*mine, current)
    )
    if (count or 0) >= OPEN_MAX:
        raise RateLimited(
            f"This tenant has {count} open uploads of {OPEN_MAX}. Complete or cancel one.",
            code="too_many_uploads",
        )
    upload = AdapterUpload(
        tenant_id=tenant_id,
        name=new.name,
        size_bytes=new.size_bytes,
        sha256=new.sha256,
        idempotency_key=key,
        expires_at=now() + timedelta(seconds=EXPIRES_S),
    )
    session.add(upload)
    await session.flush()
    return upload, True


async def find(
    session: AsyncSession, tenant_id: str, upload_id: str, *, locked: bool = False
) -> Progress:
    """Raises NotFound. `locked`: no part comes or goes until the transaction ends."""
    query = select(AdapterUpload).where(
        AdapterUpload.tenant_id == tenant_id,
        AdapterUpload.id == upload_id,
        AdapterUpload.expires_at > now(),
    )
    upload = None
    if ID.fullmatch(upload_id):
        upload = await session.scalar(query.with_for_update() if locked else query)
    if upload is None:
        raise not_found(upload_id)
    rows = await session.scalars(
        select(AdapterUploadPart)
        .where(AdapterUploadPart.upload_id == upload.id)
        .order_by(AdapterUploadPart.number)
    )
    return Progress(upload, [Part(row.number, row.size_bytes, row.sha256) for row in rows])


def not_found(upload_id: str) -> NotFound:
    return NotFound(
        f"There is no upload {upload_id[:100]!r}. It may have expired; POST /v1/uploads begins "
        "another."
    )


def check_part(progress: Progress, number: int, sha256: str, size_bytes: int) -> Part | None:
    """The part, if it is there already. Raises Conflict, TooLarge if it cannot come."""
    upload = progress.upload
    if upload.status != PENDING:
        raise Conflict(f"This upload is {upload.status}. Begin another.")
    for part in progress.parts:
        if part.number == number:
            if part.sha256 == sha256:
                return part
            raise Conflict(f"Part {number} is there already, with other content.")
    if progress.received_bytes + size_bytes > upload.size_bytes:
        raise TooLarge(
            f"The upload was announced with {upload.size_bytes} bytes; "
            f"{progress.received_bytes} are there, and this part would be beyond them."
        )
    return None


async def add_part(session: AsyncSession, tenant_id: str, upload_id: str, part: Part) -> Progress:
    """The part is on disk. Adding it twice is fine. A session that writes."""
    progress = await find(session, tenant_id, upload_id, locked=True)
    if check_part(progress, part.number, part.sha256, part.size_bytes) is None:
        session.add(
            AdapterUploadPart(
                upload_id=upload_id,
                number=part.number,
                size_bytes=part.size_bytes,
                sha256=part.sha256,
            )
        )
        await session.flush()
    return await find(session, tenant_id, upload_id)


async def end(
    session: AsyncSession,
    tenant_id: str,
    upload_id: str,
    status: str,
    *,
    failure: str = "",
    version_digest: str = "",
) -> Progress:
    """Its parts are needed no more. An upload that has ended stays as it is; a session that
    writes."""
    progress = await find(session, tenant_id, upload_id, locked=True)
    if progress.upload.status == PENDING:
        progress.upload.status = status
        progress.upload.failure = failure[:2000]
        progress.upload.version_digest = version_digest
        progress.upload.idempotency_key = None
        await session.flush()
    return progress


async def remove_expired(session: AsyncSession) -> list[str]:
    """Returns the uploads that are gone. A session that writes."""
    expired = select(AdapterUpload.id).where(AdapterUpload.expires_at <= now())
    gone = list(await session.scalars(expired.with_for_update(skip_locked=True)))
    for upload_id in gone:
        of_it = AdapterUploadPart.upload_id == upload_id
        await session.execute(delete(AdapterUploadPart).where(of_it))
        await session.execute(delete(AdapterUpload).where(AdapterUpload.id == upload_id))
    return gone


async def open_among(session: AsyncSession, upload_ids: list[str]) -> set[str]:
    """Which of these still need their parts, of whatever tenant: for the janitor alone."""
    query = select(AdapterUpload.id).where(
        AdapterUpload.id.in_(upload_ids), AdapterUpload.status == PENDING
    )
    return set(await session.scalars(query))


async def _lock_tenant(session: AsyncSession, tenant_id: str) -> None:
    """Until the transaction ends, nobody else begins an upload of this tenant."""
    if session.get_bind().dialect.name == "postgresql":
        await session.execute(
            text("SELECT pg_advisory_xact_lock(hashtextextended(:tenant_id, 2))"),
            {"tenant_id": tenant_id},
        )
