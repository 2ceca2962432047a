"""The audit trail: append, inside the transaction of the change itself."""

import hashlib
from typing import Any

import msgspec
from msgspec import Struct
from sqlalchemy import update
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.db import now
from gateway.tenants.audit.tables import AuditEntry, AuditHead


class Actor(Struct, frozen=True):
    """Who changes something."""

    name: str
    """`shell:<user>` or `key:<public id>`."""
    request_id: str = ""


async def record(
    session: AsyncSession,
    actor: Actor,
    action: str,
    target: str,
    *,
    tenant_id: str | None,
    before: dict[str, Any] | None = None,
    after: dict[str, Any] | None = None,
) -> None:
    """Append one entry; it is kept if and only if the change is.

    `session` is one of `Database.writing`. `before` and `after` hold plain JSON and no secret.
    Others that append wait until this transaction ends, so call it last.
    """
    head = (
        await session.execute(
            update(AuditHead)
            .where(AuditHead.id == 1)
            .values(sequence=AuditHead.sequence + 1)
            .returning(AuditHead.sequence, AuditHead.hash)
        )
    ).one()
    entry = AuditEntry(
        sequence=head.sequence,
        at=now(),
        actor=actor.name,
        action=action,
        target=target,
        tenant_id=tenant_id,
        request_id=actor.request_id,
        before=before,
        after=after,
    )
    entry.hash = chained(head.hash, entry)
    session.add(entry)
    await session.execute(update(AuditHead).where(AuditHead.id == 1).values(hash=entry.hash))


def chained(previous: str, entry: AuditEntry) -> str:
    """The hash of an entry that follows the one with the hash `previous`."""
    told = {
        column.key: getattr(entry, column.key)
        for column in AuditEntry.__table__.columns
        if column.key != "hash"
    }
    told["at"] = entry.at.isoformat(timespec="microseconds")
    body = msgspec.json.encode([previous, told], order="deterministic")
    return hashlib.sha256(body).hexdigest()
