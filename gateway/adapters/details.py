"""All that can be told of one adapter: from the database, the store, the engine and the ledger."""

import asyncio
from collections.abc import Mapping, Sequence, Set
from datetime import datetime
from typing import Protocol

from msgspec import Struct

from gateway.adapters import aliases, catalog, versions
from gateway.adapters.aliases import Alias
from gateway.adapters.store import AdapterStore
from gateway.adapters.tables import Adapter
from gateway.adapters.versions import Listed
from gateway.db import Database
from gateway.engine.client import Engine, EngineFailure
from gateway.engine.messages import AdapterManifest, Place

PLACES_S_MAX = 2.0
"""An engine answers between two iterations; one that takes longer has more urgent things to do."""


class Usage(Protocol):
    async def of(
        self, tenant_id: str, digests: Sequence[str]
    ) -> Mapping[str, tuple[int, datetime]]:
        """Digest → the tenant's requests of the last 30 days, and when the last one ever began;
        those that were never used are left out."""
        ...


class VersionDetails(Struct, frozen=True):
    listed: Listed
    where: Place | None
    """None: the engine does not say."""
    requests: int
    last_used: datetime | None


class Found(Struct, frozen=True):
    adapter: Adapter
    versions: list[VersionDetails]
    aliases: list[Alias]
    ranks: dict[str, list[int]]
    """Of the latest version."""


class Details:
    def __init__(
        self, database: Database, store: AdapterStore, engine: Engine, usage: Usage
    ) -> None:
        self._database, self._store, self._engine = database, store, engine
        self._usage = usage

    async def of(self, tenant_id: str, name_or_id: str, names: Set[str] | None) -> Found:
        """Only one of `names`; None: any. Raises NotFound."""
        async with self._database.session() as session:
            adapter = await catalog.get(session, tenant_id, name_or_id, names)
            listed = await versions.list_of(session, adapter)
            named = await aliases.list_of(session, adapter)
        digests = [version.row.version_digest for version in listed]
        places = await self._places(digests)
        usage = await self._usage.of(tenant_id, digests)
        shown = [
            VersionDetails(version, places.get(digest), *usage.get(digest, (0, None)))
            for version, digest in zip(listed, digests, strict=True)
        ]
        return Found(adapter, shown, named, await self._ranks(adapter.version_digest))

    async def _places(self, digests: Sequence[str]) -> Mapping[str, Place]:
        try:
            async with asyncio.timeout(PLACES_S_MAX):
                return await self._engine.places(digests)
        except (EngineFailure, TimeoutError):
            return {}

    async def _ranks(self, digest: str) -> dict[str, list[int]]:
        try:
            manifest = await asyncio.to_thread(self._store.manifest, digest)
        except OSError:  # removed at this moment, or the store is away: requests will tell
            return {}
        return ranks_of(manifest)


def ranks_of(manifest: AdapterManifest) -> dict[str, list[int]]:
    """Projection → its different ranks over the layers, ascending."""
    found: dict[str, set[int]] = {}
    for weights in manifest.targets:
        found.setdefault(weights.target, set()).add(weights.rank)
    return {target: sorted(ranks) for target, ranks in sorted(found.items())}
