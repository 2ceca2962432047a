"""The versions of a tenant's name: numbered as they are first uploaded, each kept until it is
deleted or has to make room.

A version stays while it is the latest, or an alias uses it. Of the others the oldest go first, once
the name has more than `VERSIONS_MAX` or the tenant more bytes than it may keep.
"""

from collections.abc import Sequence

from msgspec import Struct
from sqlalchemy import ColumnElement, and_, delete, exists, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.adapters import references
from gateway.adapters.references import LATEST
from gateway.adapters.room import no_room
from gateway.adapters.tables import Adapter, AdapterAlias, AdapterVersion, NamedVersion
from gateway.errors import Conflict, NotFound

VERSIONS_MAX = 10
"""Of one name: enough to go back to what was good last week, and a bound for what a nightly upload
piles up."""


class Listed(Struct, frozen=True):
    row: NamedVersion
    aliases: list[str]
    """That use it; `latest` too."""


async def list_of(session: AsyncSession, adapter: Adapter) -> list[Listed]:
    """Newest first."""
    rows = await session.scalars(
        select(NamedVersion)
        .where(NamedVersion.adapter_id == adapter.id)
        .order_by(NamedVersion.number.desc())
    )
    aliases = await session.scalars(
        select(AdapterAlias)
        .where(AdapterAlias.adapter_id == adapter.id)
        .order_by(AdapterAlias.name)
    )
    uses = [(alias.name, {alias.number, alias.newer_number}) for alias in aliases]
    return [
        Listed(
            row,
            [name for name, numbers in uses if row.number in numbers]
            + ([LATEST] if row.version_digest == adapter.version_digest else []),
        )
        for row in rows
    ]


async def latest_numbers(session: AsyncSession, tenant_id: str) -> dict[str, int]:
    """Adapter id → number of its latest version, of all adapters of the tenant."""
    rows = await session.execute(
        select(NamedVersion.adapter_id, NamedVersion.number)
        .join(
            Adapter,
            and_(
                Adapter.id == NamedVersion.adapter_id,
                Adapter.version_digest == NamedVersion.version_digest,
            ),
        )
        .where(Adapter.tenant_id == tenant_id)
    )
    return {row.adapter_id: row.number for row in rows}


async def find(session: AsyncSession, adapter: Adapter, label: str) -> NamedVersion:
    """By its number, the beginning of its digest, or as `latest`. Raises NotFound."""
    number = references.number_in(label)
    if number is not None:
        matches: ColumnElement[bool] = NamedVersion.number == number
    elif label == LATEST:
        matches = NamedVersion.version_digest == adapter.version_digest
    elif references.is_version(label):
        matches = NamedVersion.version_digest.startswith(label)
    else:
        raise _not_found(adapter, label)
    query = select(NamedVersion).where(NamedVersion.adapter_id == adapter.id, matches)
    found = (await session.scalars(query)).all()
    if len(found) != 1:
        raise _not_found(adapter, label)
    return found[0]


def _not_found(adapter: Adapter, label: str) -> NotFound:
    return NotFound(
        f"The adapter {adapter.name!r} has no version {label[:100]!r}. A version is named by its "
        "number (`v3`) or by 8 digits or more of its digest; "
        f"GET /v1/adapters/{adapter.name}/versions lists them.",
        param="version",
    )


async def remove(session: AsyncSession, adapter: Adapter, label: str) -> NamedVersion:
    """The caller holds the adapter, and collects the version once this is committed.

    Raises NotFound, and Conflict while something means this version.
    """
    row = await find(session, adapter, label)
    if row.version_digest == adapter.version_digest:
        raise Conflict(
            f"Version {row.number} is the latest of {adapter.name!r}, which `latest` means. Upload "
            "another version first, or delete the adapter.",
            param="version",
        )
    uses = select(AdapterAlias.name).where(
        AdapterAlias.adapter_id == adapter.id,
        or_(AdapterAlias.number == row.number, AdapterAlias.newer_number == row.number),
    )
    if aliases := (await session.scalars(uses.order_by(AdapterAlias.name))).all():
        names = ", ".join(f"`{alias}`" for alias in aliases)
        raise Conflict(
            f"Version {row.number} of {adapter.name!r} is in use by {names}. Move or delete "
            f"{'these aliases' if len(aliases) > 1 else 'this alias'} first.",
            param="version",
        )
    await session.delete(row)
    return row


def is_aliased() -> ColumnElement[bool]:
    """Whether an alias uses a row of NamedVersion."""
    return exists().where(
        AdapterAlias.adapter_id == NamedVersion.adapter_id,
        or_(
            AdapterAlias.number == NamedVersion.number,
            AdapterAlias.newer_number == NamedVersion.number,
        ),
    )


async def bytes_of(session: AsyncSession, tenant_id: str, which: ColumnElement[bool]) -> int:
    """Of the tenant's versions; content that two of its names have counts for each."""
    query = (
        select(func.sum(AdapterVersion.size_bytes))
        .select_from(NamedVersion)
        .join(Adapter, Adapter.id == NamedVersion.adapter_id)
        .join(AdapterVersion, AdapterVersion.digest == NamedVersion.version_digest)
        .where(Adapter.tenant_id == tenant_id, which)
    )
    return int(await session.scalar(query) or 0)  # PostgreSQL sums to a decimal


async def number_of(session: AsyncSession, adapter_id: str, digest: str) -> int | None:
    return await session.scalar(
        select(NamedVersion.number).where(
            NamedVersion.adapter_id == adapter_id, NamedVersion.version_digest == digest
        )
    )


async def give_number(session: AsyncSession, adapter: Adapter, version: AdapterVersion) -> int:
    """The version's number under this name: the one it has, or the next."""
    number = await number_of(session, adapter.id, version.digest)
    if number is not None:
        return number
    adapter.last_number += 1
    session.add(NamedVersion(adapter_id=adapter.id, number=adapter.last_number, version=version))
    await session.flush()
    return adapter.last_number


async def make_room(
    session: AsyncSession, adapter: Adapter, bytes_max: int | None
) -> tuple[str, ...]:
    """Let go of the oldest versions of the name that nothing uses, as many as must; the caller has
    seen that the rest fits. Digests, to be collected. Raises RateLimited."""
    of_adapter = NamedVersion.adapter_id == adapter.id
    count = await session.scalar(select(func.count()).select_from(NamedVersion).where(of_adapter))
    excess = (count or 0) - VERSIONS_MAX
    excess_bytes = 0
    if bytes_max is not None:
        of_tenant = await bytes_of(session, adapter.tenant_id, Adapter.id.is_not(None))
        excess_bytes = of_tenant - bytes_max
    going: list[NamedVersion] = []
    for row in await _unused(session, adapter):
        if excess <= 0 and excess_bytes <= 0:
            break
        going.append(row)
        excess -= 1
        excess_bytes -= row.version.size_bytes
    if excess > 0:
        raise no_room(
            f"{VERSIONS_MAX} versions of {adapter.name!r} that aliases use",
            f"{VERSIONS_MAX} of one name",
            "name",
        )
    numbers = [row.number for row in going]
    await session.execute(delete(NamedVersion).where(of_adapter, NamedVersion.number.in_(numbers)))
    return tuple(row.version_digest for row in going)


async def _unused(session: AsyncSession, adapter: Adapter) -> Sequence[NamedVersion]:
    """Oldest first."""
    query = (
        select(NamedVersion)
        .where(
            NamedVersion.adapter_id == adapter.id,
            NamedVersion.version_digest != adapter.version_digest,
            ~is_aliased(),
        )
        .order_by(NamedVersion.number)
    )
    return (await session.scalars(query)).all()
