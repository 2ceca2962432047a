"""A tenant's adapters by name or id, and the versions that nobody needs any more.

Every function that reads a tenant's rows takes the tenant and filters by it.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Set
from contextlib import asynccontextmanager, suppress

from msgspec import Struct
from sqlalchemy import ColumnElement, and_, delete, exists, func, or_, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from gateway.adapters import versions
from gateway.adapters.allowance import Allowance
from gateway.adapters.meaning import column_of, meaning_of
from gateway.adapters.names import Version
from gateway.adapters.references import ID, NAME
from gateway.adapters.room import no_room
from gateway.adapters.store import AdapterStore
from gateway.adapters.tables import Adapter, AdapterVersion, NamedVersion
from gateway.db import Database
from gateway.engine.client import Engine, EngineFailure
from gateway.errors import ApiError, InvalidRequest, NotFound

logger = logging.getLogger(__name__)


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


async def get(
    session: AsyncSession, tenant_id: str, name_or_id: str, names: Set[str] | None
) -> Adapter:
    """Only one of `names`; None: any. Raises NotFound."""
    adapter = await find(session, tenant_id, name_or_id)
    if adapter is None or (names is not None and adapter.name not in names):
        raise adapter_not_found(name_or_id)
    return adapter


def _named(tenant_id: str, name_or_id: str) -> ColumnElement[bool] | None:
    """The condition for a tenant's adapter; None for what can be neither name nor id."""
    column = column_of(name_or_id)
    return None if column is None else and_(Adapter.tenant_id == tenant_id, column == name_or_id)


async def list_of(session: AsyncSession, tenant_id: str) -> list[Adapter]:
    """In the order in which they were made."""
    query = select(Adapter).where(Adapter.tenant_id == tenant_id).order_by(Adapter.id)
    return list(await session.scalars(query))


async def check_room(
    session: AsyncSession,
    tenant_id: str,
    name: str,
    size_bytes: int,
    allowance: Allowance,
    digest: str = "",
) -> None:
    """Raises RateLimited if `name` would be one adapter too many for the tenant, or its version
    `digest` too much beside all that stays: versions of the name that no alias uses would go."""
    others = select(func.count()).where(Adapter.tenant_id == tenant_id, Adapter.name != name)
    adapters = (await session.execute(others.select_from(Adapter))).scalar_one()
    if adapters >= allowance.adapters_max:
        raise no_room(f"{adapters} adapters", f"{allowance.adapters_max}", "name")
    if allowance.bytes_max is None:
        return
    stays = or_(
        Adapter.name != name,
        and_(versions.is_aliased(), NamedVersion.version_digest != digest),
    )
    kept_bytes = await versions.bytes_of(session, tenant_id, stays)
    if kept_bytes + size_bytes > allowance.bytes_max:
        raise no_room(
            f"{kept_bytes} bytes of other adapters and of versions that aliases use, and this one "
            f"has {size_bytes}",
            f"{allowance.bytes_max} bytes",
            "weights",
        )


class Placed(Struct, frozen=True):
    adapter: Adapter
    number: int
    """Of the version under this name."""
    changed: bool
    """False if it was the name's latest version already."""
    retired: tuple[str, ...] = ()
    """Older versions that went to make room, to be collected."""


async def place(
    session: AsyncSession,
    tenant_id: str,
    name: str,
    version: AdapterVersion,
    allowance: Allowance,
) -> Placed:
    """Make a version whose files are stored the latest of the tenant's `name`. Raises RateLimited.

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
    changed = adapter is None or adapter.version_digest != version.digest
    if changed:
        await check_room(session, tenant_id, name, version.size_bytes, allowance, version.digest)
    if adapter is None:
        adapter = Adapter(tenant_id=tenant_id, name=name, version=version, last_number=0)
        session.add(adapter)
    adapter.version = version
    await session.flush()
    number = await versions.give_number(session, adapter, version)
    retired = await versions.make_room(session, adapter, allowance.bytes_max) if changed else ()
    return Placed(adapter, number, changed, retired)


@asynccontextmanager
async def changing(
    database: Database, store: AdapterStore, tenant_id: str
) -> AsyncIterator[AsyncSession]:
    """A transaction that changes what the tenant's names mean."""
    changed = False
    try:
        async with database.writing() as session:
            yield session
            changed = True
    finally:
        if changed:  # even if the commit failed: that may be known to the server alone
            store.names.changed(tenant_id)


class Removed(Struct, frozen=True):
    adapter_id: str
    version_digests: tuple[str, ...]
    """To be collected."""


async def remove(
    session: AsyncSession, tenant_id: str, name_or_id: str, names: Set[str] | None = None
) -> Removed:
    """With its versions and aliases. Only one of `names`; None: any. Raises NotFound.

    The session is one from `Database.writing`.
    """
    adapter = await hold(session, tenant_id, name_or_id, names)
    of_adapter = NamedVersion.adapter_id == adapter.id
    digests = set(await session.scalars(select(NamedVersion.version_digest).where(of_adapter)))
    await session.execute(delete(Adapter).where(Adapter.id == adapter.id))  # and all below it
    return Removed(adapter.id, tuple(sorted(digests | {adapter.version_digest})))


async def hold(
    session: AsyncSession, tenant_id: str, name_or_id: str, names: Set[str] | None = None
) -> Adapter:
    """An adapter that nobody else changes until the transaction ends. Only one of `names`; None:
    any. Raises NotFound.

    The session is one from `Database.writing`.
    """
    named = _named(tenant_id, name_or_id)
    adapter = None
    if named is not None:
        query = select(Adapter).where(named).with_for_update(of=Adapter)
        adapter = await session.scalar(query)
    if adapter is None or (names is not None and adapter.name not in names):
        raise adapter_not_found(name_or_id)
    return adapter


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
        if await session.scalar(select(is_used(digest))):
            return
        await session.execute(delete(AdapterVersion).where(AdapterVersion.digest == digest))
        await asyncio.to_thread(store.remove, digest)
    with suppress(EngineFailure):  # an engine that is lost has nothing loaded
        await engine.unload(digest)


def is_used(digest: str | InstrumentedAttribute[str]) -> ColumnElement[bool]:
    """Whether an adapter has the version."""
    named = exists().where(NamedVersion.version_digest == digest)
    latest = exists().where(Adapter.version_digest == digest)
    return or_(named, latest)


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
    database: Database,
    store: AdapterStore,
    engine: Engine,
    tenant_id: str,
    model: str,
    client: str = "",
) -> AsyncIterator[Version | None]:
    """What the tenant's name means now, kept to the end even if the name moves or goes meanwhile.
    `client` decides where two versions share the requests."""
    version = await _version_for(database, store, tenant_id, model, client)
    if version is None:
        yield None
        return
    async with lease(database, store, engine, version.digest):
        yield version


async def _version_for(
    database: Database, store: AdapterStore, tenant_id: str, model: str, client: str
) -> Version | None:
    """No version that was returned has begun to be collected: nothing awaits between the check of
    that and the caller's lease."""
    meaning = store.names.get(tenant_id, model)
    if meaning is not None:
        version = meaning.version_for(client)
        if store.has(version.digest):  # else collected by another process
            return version
    while True:
        changes, retirements = store.names.changes, store.leases.retirements
        async with database.reading() as connection:
            meaning = await meaning_of(connection, tenant_id, model)
        if meaning is None:
            return None
        if store.leases.retirements == retirements:
            store.names.put(tenant_id, model, meaning, changes)
            return meaning.version_for(client)


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
