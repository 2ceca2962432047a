"""A tenant's adapters by name or id, and the versions that nobody needs any more.

Every function that reads a tenant's rows takes the tenant and filters by it.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Set
from contextlib import asynccontextmanager, suppress

from msgspec import Struct
from sqlalchemy import ColumnElement, and_, bindparam, delete, func, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from gateway.adapters.allowance import Allowance
from gateway.adapters.names import Version
from gateway.adapters.store import AdapterStore
from gateway.adapters.tables import Adapter, AdapterVersion
from gateway.db import Database
from gateway.engine.client import Engine, EngineFailure
from gateway.errors import ApiError, InvalidRequest, NotFound, RateLimited

logger = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def check_name(name: str, base_model: str) -> None:
    """Raises InvalidRequest for what cannot be an adapter's name."""
    if NAME.fullmatch(name) is None or ID.fullmatch(name):
        raise InvalidRequest(
            f"The name {name[:100]!r} cannot be used. Use up to 64 letters, digits, '.', '_' and "
            "'-', beginning with a letter or a digit, and not the form of an id.",
            param="name",
        )
    if name.casefold() == base_model.casefold():
        raise InvalidRequest(f"The name {name!r} is the base model's. Use another.", param="name")


async def find(session: AsyncSession, tenant_id: str, name_or_id: str) -> Adapter | None:
    named = _named(tenant_id, name_or_id)
    return None if named is None else await session.scalar(select(Adapter).where(named))


def _named(tenant_id: str, name_or_id: str) -> ColumnElement[bool] | None:
    """The condition for a tenant's adapter; None for what can be neither name nor id."""
    column = _column(name_or_id)
    return None if column is None else and_(Adapter.tenant_id == tenant_id, column == name_or_id)


def _column(name_or_id: str) -> InstrumentedAttribute[str] | None:
    if ID.fullmatch(name_or_id):
        return Adapter.id
    return Adapter.name if NAME.fullmatch(name_or_id) else None


_VERSIONS = {
    column: select(
        Adapter.name,
        AdapterVersion.digest,
        AdapterVersion.base_digest,
        AdapterVersion.base_model,
    )
    .select_from(AdapterVersion)
    .join(Adapter)
    .where(Adapter.tenant_id == bindparam("tenant_id"), column == bindparam("name_or_id"))
    for column in (Adapter.id, Adapter.name)
}
"""Built once, as they are asked for many requests."""


async def version_of(
    connection: AsyncConnection, tenant_id: str, name_or_id: str
) -> Version | None:
    """What `find` finds, as much as a request needs of it."""
    column = _column(name_or_id)
    if column is None:
        return None
    named = {"tenant_id": tenant_id, "name_or_id": name_or_id}
    row = (await connection.execute(_VERSIONS[column], named)).one_or_none()
    return None if row is None else Version(row.name, row.digest, row.base_digest, row.base_model)


async def list_of(session: AsyncSession, tenant_id: str) -> list[Adapter]:
    """In the order in which they were made."""
    query = select(Adapter).where(Adapter.tenant_id == tenant_id).order_by(Adapter.id)
    return list(await session.scalars(query))


async def check_room(
    session: AsyncSession, tenant_id: str, name: str, size_bytes: int, allowance: Allowance
) -> None:
    """Raises RateLimited if `name` would be one adapter too many for the tenant, or its size too
    much beside the others."""
    others = select(
        func.count().label("adapters"), func.sum(AdapterVersion.size_bytes).label("size_bytes")
    ).where(Adapter.tenant_id == tenant_id, Adapter.name != name)
    kept = (await session.execute(others.select_from(Adapter).join(AdapterVersion))).one()
    if kept.adapters >= allowance.adapters_max:
        raise _no_room(f"{kept.adapters} adapters", f"{allowance.adapters_max}", "name")
    kept_bytes = int(kept.size_bytes or 0)  # PostgreSQL sums to a decimal
    if allowance.bytes_max is not None and kept_bytes + size_bytes > allowance.bytes_max:
        raise _no_room(
            f"{kept_bytes} bytes of other adapters, and this one has {size_bytes}",
            f"{allowance.bytes_max} bytes",
            "weights",
        )


def _no_room(kept: str, most: str, param: str) -> RateLimited:
    return RateLimited(
        f"This tenant keeps {kept}; it may keep {most}. Delete one with "
        "DELETE /v1/adapters/{name}, or ask the operator for more.",
        param=param,
        code="insufficient_quota",
    )


class Placed(Struct, frozen=True):
    adapter: Adapter
    changed: bool
    """False if the name had this version already."""
    replaced: str | None
    """The version that the name had before."""


async def place(
    session: AsyncSession,
    tenant_id: str,
    name: str,
    version: AdapterVersion,
    allowance: Allowance,
) -> Placed:
    """Give the tenant's `name` to a version whose files are stored. Raises RateLimited.

    Raises sqlalchemy's IntegrityError if the same name is made elsewhere at this moment.
    """
    await lock_version(session, version.digest)
    await _lock_tenant(session, tenant_id)
    version = await session.merge(version)
    await session.flush()
    adapter = await session.scalar(
        select(Adapter)
        .where(Adapter.tenant_id == tenant_id, Adapter.name == name)
        .with_for_update(of=Adapter)
    )
    before = None if adapter is None else adapter.version_digest
    if before != version.digest:
        await check_room(session, tenant_id, name, version.size_bytes, allowance)
    if adapter is None:
        adapter = Adapter(tenant_id=tenant_id, name=name, version=version)
        session.add(adapter)
        await session.flush()
        return Placed(adapter, changed=True, replaced=None)
    if before == version.digest:
        return Placed(adapter, changed=False, replaced=None)
    adapter.version = version
    return Placed(adapter, changed=True, replaced=before)


class Removed(Struct, frozen=True):
    adapter_id: str
    version_digest: str
    """To be collected."""


async def remove(
    session: AsyncSession, tenant_id: str, name_or_id: str, names: Set[str] | None = None
) -> Removed:
    """Only one of `names`; None: any. Raises NotFound. One statement, so that of several at once
    one has removed it."""
    named = _named(tenant_id, name_or_id)
    if named is not None and names is not None:
        named = and_(named, Adapter.name.in_(names))
    if named is not None:
        statement = delete(Adapter).where(named).returning(Adapter.id, Adapter.version_digest)
        # what the session holds of it is not looked at again
        found = await session.execute(statement, execution_options={"synchronize_session": False})
        if (row := found.one_or_none()) is not None:
            return Removed(row.id, row.version_digest)
    raise adapter_not_found(name_or_id)


def adapter_not_found(name_or_id: str) -> NotFound:
    return NotFound(
        f"There is no adapter {name_or_id[:100]!r}. GET /v1/adapters lists what there is."
    )


async def collect(database: Database, store: AdapterStore, engine: Engine, digest: str) -> None:
    """Remove a version from disk and engine if no adapter and no running request needs it.

    Safe to call at any time, and twice. If requests need it, the last one collects it.
    """
    if not store.leases.retire(digest):
        return
    async with database.session() as session:
        await lock_version(session, digest)
        uses = select(Adapter.id).where(Adapter.version_digest == digest).limit(1)
        if await session.scalar(uses) is not None:
            return
        await session.execute(delete(AdapterVersion).where(AdapterVersion.digest == digest))
        await asyncio.to_thread(store.remove, digest)
    with suppress(EngineFailure):  # an engine that is lost has nothing loaded
        await engine.unload(digest)


@asynccontextmanager
async def lease(
    database: Database, store: AdapterStore, engine: Engine, digest: str
) -> AsyncIterator[None]:
    """Keep a version's files while something may need them."""
    store.leases.take(digest)
    try:
        yield
    finally:
        await _give(database, store, engine, digest)


@asynccontextmanager
async def leased(
    database: Database, store: AdapterStore, engine: Engine, tenant_id: str, name_or_id: str
) -> AsyncIterator[Version | None]:
    """What the tenant's name means now, kept to the end even if the name goes meanwhile."""
    version = await _meaning(database, store, tenant_id, name_or_id)
    if version is None:
        yield None
        return
    async with lease(database, store, engine, version.digest):
        yield version


async def _meaning(
    database: Database, store: AdapterStore, tenant_id: str, name_or_id: str
) -> Version | None:
    """No version that was returned has begun to be collected: nothing awaits between the check of
    that and the caller's lease."""
    version = store.names.get(tenant_id, name_or_id)
    if version is not None and store.has(version.digest):  # else collected by another process
        return version
    while True:
        changes, retirements = store.names.changes, store.leases.retirements
        async with database.reading() as connection:
            version = await version_of(connection, tenant_id, name_or_id)
        if version is None:
            return None
        if store.leases.retirements == retirements:
            store.names.put(tenant_id, name_or_id, version, changes)
            return version


async def _give(database: Database, store: AdapterStore, engine: Engine, digest: str) -> None:
    if not store.leases.give(digest):
        return
    try:
        await collect(database, store, engine, digest)
    except ApiError:  # what the request came to matters more; the files are only left over
        logger.warning("adapter version %s was not removed", digest, exc_info=True)


async def _lock_tenant(session: AsyncSession, tenant_id: str) -> None:
    """Until the transaction ends, nobody else places an adapter of this tenant: of two at once, the
    second sees the first when it looks for room. On SQLite, whoever writes is alone anyway."""
    if session.get_bind().dialect.name == "postgresql":
        await session.execute(
            text("SELECT pg_advisory_xact_lock(hashtextextended(:tenant_id, 1))"),
            {"tenant_id": tenant_id},
        )


async def lock_version(session: AsyncSession, digest: str) -> None:
    """Until the transaction ends, nobody else places or collects this version.

    The first statement of its transaction: SQLite cannot turn a reader into a writer safely.
    """
    if session.get_bind().dialect.name == "postgresql":
        await session.execute(
            text("SELECT pg_advisory_xact_lock(hashtextextended(:digest, 0))"), {"digest": digest}
        )
    else:  # any write takes SQLite's one write lock
        no_change = {AdapterVersion.size_bytes: AdapterVersion.size_bytes}
        await session.execute(
            update(AdapterVersion)
            .where(AdapterVersion.digest == digest)
            .values(no_change)
            .execution_options(synchronize_session=False)
        )
