"""Usage in the database: written so that neither a repetition nor another order changes the sum."""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from sqlalchemy import Executable, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.db import Database
from gateway.tenants.usage.tables import UsageEntry

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]


def _text(characters_max: int) -> Meta:
    return Meta(max_length=characters_max, pattern=r"^[^\0]*$")


class Entry(Struct, frozen=True, omit_defaults=True):
    """One request as far as it has come: a row of `usage_entries`.

    The bounds are those of the columns. They are looked at where an entry is read from a disk,
    which may have changed it: one that the database never takes would hold up all others.
    """

    request_id: Annotated[str, _text(64)]
    tenant_id: Annotated[str, _text(36)]
    key_id: Annotated[str, _text(36)]
    model: Annotated[str, _text(255)]
    started_at: Annotated[datetime, Meta(tz=True)]
    adapter_digest: Annotated[str, _text(64)] | None = None
    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    completion_tokens: Count = 0
    cost_nanos: Count = 0
    first_token_ms: float | None = None
    duration_ms: float | None = None
    finish_reason: Annotated[str, _text(32)] | None = None


RISING = ("prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanos")
ONCE = ("first_token_ms", "duration_ms", "finish_reason")
"""Unknown first, then what they are for good."""


def _upsert(insert: Any, greatest: Any) -> Executable:
    statement = insert(UsageEntry)
    new, old = statement.excluded, UsageEntry.__table__.c
    changes = {name: greatest(old[name], new[name]) for name in RISING} | {
        name: func.coalesce(old[name], new[name]) for name in ONCE
    }
    upsert: Executable = statement.on_conflict_do_update(
        index_elements=[UsageEntry.request_id], set_=changes
    )
    return upsert


_UPSERTS = {
    "postgresql": _upsert(postgresql.insert, func.greatest),
    "sqlite": _upsert(sqlite.insert, func.max),  # of two values, not of rows
}


async def write(database: Database, entries: Sequence[Entry]) -> None:
    """All of them or none. Raises DatabaseUnavailable, and what else the database says."""
    rows = [msgspec.structs.asdict(entry) for entry in entries]
    async with database.session() as session:
        connection = await session.connection()
        await connection.execute(_UPSERTS[connection.dialect.name], rows)


async def spent_since(connection: AsyncConnection, owner: str, start: datetime) -> int:
    """What an owner (`tenant:<id>` or `key:<id>`) has spent since a moment, in nanos, as far as it
    is written."""
    kind, _, owner_id = owner.partition(":")
    column = {"tenant": UsageEntry.tenant_id, "key": UsageEntry.key_id}[kind]
    spent = select(func.coalesce(func.sum(UsageEntry.cost_nanos), 0)).where(
        column == owner_id, UsageEntry.started_at >= start
    )
    return int((await connection.execute(spent)).scalar_one())


class Spending:
    """What owners have spent, asked of the database: what limits know where they know nothing."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def __call__(self, owner: str, start: datetime) -> int:
        """See `spent_since`. Raises DatabaseUnavailable."""
        async with self._database.reading() as connection:
            return await spent_since(connection, owner, start)
