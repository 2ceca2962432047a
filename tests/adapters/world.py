"""The catalogue of adapters without HTTP: a database, a store, and an engine that remembers."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from sqlalchemy import select

from gateway.adapters import aliases, catalog, versions
from gateway.adapters.allowance import Allowance
from gateway.adapters.names import Version
from gateway.adapters.peft_format import check_folder, version_digest
from gateway.adapters.store import AdapterStore
from gateway.adapters.tables import AdapterVersion
from gateway.db import Database
from gateway.tenants import directory
from tests.adapters.making import INFO, tensors, weights, write_folder
from tests.fakes import FakeEngine


class World:
    """A database with two tenants, a store, and an engine that remembers."""

    def __init__(self, database: Database, store: AdapterStore, acme: str, other: str) -> None:
        self.database, self.store, self.engine = database, store, FakeEngine()
        self.acme, self.other = acme, other

    def stored(self, seed: int) -> AdapterVersion:
        """A version in the store, not yet in the database."""
        draft = self.store.begin()
        write_folder(draft, file=weights(tensors(seed=seed)))
        manifest = check_folder(draft, INFO)
        digest = version_digest(manifest)
        self.store.put(draft, digest, manifest)
        self.store.discard(draft)
        return AdapterVersion(
            digest=digest,
            size_bytes=manifest.size_bytes,
            rank_max=manifest.rank_max,
            targets=manifest.targets,
            base_digest=INFO.digest,
            base_model=INFO.name,
        )

    async def place(
        self,
        tenant: str,
        name: str,
        seed: int = 0,
        adapters_max: int = 100,
        bytes_max: int | None = None,
    ) -> catalog.Placed:
        version = await asyncio.to_thread(self.stored, seed)
        allowance = Allowance(adapters_max, bytes_max)
        async with self.database.session() as session:
            return await catalog.place(session, tenant, name, version, allowance)

    async def collect(self, digest: str) -> None:
        await catalog.collect(self.database, self.store, self.engine, digest)

    async def remove(self, tenant: str, name: str) -> str:
        async with self.database.writing() as session:
            (digest,) = (await catalog.remove(session, tenant, name)).version_digests
            return digest

    async def digests(self) -> set[str]:
        async with self.database.session() as session:
            return set(await session.scalars(select(AdapterVersion.digest)))

    async def alias(self, tenant: str, name: str, alias: str, *labels: str, newer: int = 0) -> None:
        """Let it mean a version, or two of which the second gets `newer` percent."""
        percents = [100 - newer, newer][: len(labels)]
        await self.put(tenant, name, alias, list(zip(labels, percents, strict=True)))

    async def put(
        self, tenant: str, name: str, alias: str, shares: Sequence[tuple[str, int]]
    ) -> None:
        async with self.database.writing() as session:
            adapter = await catalog.hold(session, tenant, name)
            await aliases.put(session, adapter, alias, shares)
        self.store.names.changed(tenant)

    async def remove_version(self, tenant: str, name: str, label: str) -> str:
        async with self.database.writing() as session:
            adapter = await catalog.hold(session, tenant, name)
            row = await versions.remove(session, adapter, label)
        self.store.names.changed(tenant)
        await self.collect(row.version_digest)
        return row.version_digest

    async def meaning(self, tenant: str, model: str, client: str = "") -> Version | None:
        """What a request gets."""
        leased = catalog.leased(self.database, self.store, self.engine, tenant, model, client)
        async with leased as version:
            return version

    async def numbers(self, tenant: str, name: str) -> list[int]:
        """Of the versions of a name, newest first."""
        async with self.database.session() as session:
            adapter = await catalog.get(session, tenant, name, None)
            return [listed.row.number for listed in await versions.list_of(session, adapter)]


async def made(database: Database, folder: Path) -> World:
    store = AdapterStore(folder)
    store.open()
    async with database.session() as session:
        acme = await directory.create_tenant(session, "acme")
        other = await directory.create_tenant(session, "other")
    return World(database, store, acme.id, other.id)
