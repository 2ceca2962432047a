"""The audit trail for its readers: the newest entries, all of them, and whether they are intact."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.csv_text import csv_lines
from gateway.db import Database
from gateway.openapi_exports import Format
from gateway.tenants.audit.tables import AuditEntry, AuditHead
from gateway.tenants.audit.trail import chained

BATCH = 500
"""Rows read at once: a session is open for these, and not while a client takes its time."""

FIELDS = tuple(column.key for column in AuditEntry.__table__.columns)


class Verified(Struct, frozen=True):
    entries: int
    """Those that are intact, from the first on."""
    head: str
    """The hash of the last of them: written down elsewhere, it shows later that none of them was
    rewritten or removed."""
    fault: str | None = None
    """What is wrong with the entry after them; None: nothing, all are intact."""


async def newest(
    session: AsyncSession, limit: int, *, before: int | None = None, tenant_id: str | None = None
) -> Sequence[AuditEntry]:
    """The latest first; those before a sequence number, those that concern a tenant."""
    query = select(AuditEntry).order_by(AuditEntry.sequence.desc()).limit(limit)
    if before is not None:
        query = query.where(AuditEntry.sequence < before)
    if tenant_id is not None:
        query = query.where(AuditEntry.tenant_id == tenant_id)
    return (await session.scalars(query)).all()


async def export(
    database: Database, form: Format, tenant_id: str | None = None
) -> AsyncIterator[str]:
    """Text in pieces, the oldest entry first."""
    if form == "csv":
        yield csv_lines([FIELDS])
    async for batch in _batches(database, tenant_id):
        if form == "csv":
            yield csv_lines([_cell(value) for value in told(entry).values()] for entry in batch)
        else:
            yield "".join(msgspec.json.encode(told(e)).decode() + "\n" for e in batch)


def told(entry: AuditEntry) -> dict[str, Any]:
    """All that it says, as JSON knows it; in the order of the table."""
    fields = {name: getattr(entry, name) for name in FIELDS}
    return fields | {"at": entry.at.isoformat(timespec="microseconds")}


async def verify(database: Database, anchor: tuple[int, str] | None = None) -> Verified:
    """Walk the chain from the first entry. `anchor` is a sequence number and the hash that it had
    when somebody wrote it down: even a chain that was made anew throughout can't have that."""
    async with database.session() as session:
        head = await session.get_one(AuditHead, 1)
    if anchor is not None and anchor[0] > head.sequence:
        return Verified(0, "", f"the trail ends with {head.sequence}, before the anchor")
    good = Verified(0, "")
    async for batch in _batches(database):
        for entry in batch:
            if entry.sequence > head.sequence:  # appended meanwhile
                return good
            fault = _fault(good, entry, anchor)
            if fault is not None:
                return Verified(good.entries, good.head, fault)
            good = Verified(entry.sequence, entry.hash)
    if (good.entries, good.head) != (head.sequence, head.hash):
        fault = f"entry {good.entries + 1} is missing: the trail went on to {head.sequence}"
        return Verified(good.entries, good.head, fault)
    return good


def _fault(good: Verified, entry: AuditEntry, anchor: tuple[int, str] | None) -> str | None:
    expected = good.entries + 1
    if entry.sequence != expected:
        return f"entry {expected} is missing"
    if chained(good.head, entry) != entry.hash:
        return f"entry {expected} is not what was written"
    if anchor is not None and anchor[0] == expected and anchor[1] != entry.hash:
        return f"entry {expected}, or one before it, was written anew: the anchor is another"
    return None


async def _batches(
    database: Database, tenant_id: str | None = None
) -> AsyncIterator[Sequence[AuditEntry]]:
    last: int | None = None
    while True:
        query = select(AuditEntry).order_by(AuditEntry.sequence).limit(BATCH)
        if last is not None:
            query = query.where(AuditEntry.sequence > last)
        if tenant_id is not None:
            query = query.where(AuditEntry.tenant_id == tenant_id)
        async with database.session() as session:
            batch = (await session.scalars(query)).all()
        if not batch:
            return
        yield batch
        last = batch[-1].sequence


def _cell(value: object) -> object:
    return msgspec.json.encode(value).decode() if isinstance(value, dict) else value
