"""Removes what crashes leave behind: versions that no adapter has, in the database or on disk.

A process that dies between a commit and what follows it leaves files, never a name without them.
What is being uploaded is safe: this process has leased it, and a folder that another has put into
the store is younger than `LEFT_S`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy import select

from gateway.adapters.catalog import collect, is_used
from gateway.adapters.store import AdapterStore
from gateway.adapters.tables import AdapterVersion
from gateway.background import in_background
from gateway.db import Database
from gateway.engine.client import Engine
from gateway.errors import ApiError

log = logging.getLogger(__name__)

EVERY_S = 3600.0
LEFT_S = 3600.0
"""Between a version's files and its row there is one self-test, which takes seconds."""
ROWS_MAX = 500
"""Digests in one question to the database."""


class Janitor:
    def __init__(self, database: Database, store: AdapterStore, engine: Engine) -> None:
        self._database, self._store, self._engine = database, store, engine

    async def sweep(self) -> list[str]:
        """What was found and removed. Raises DatabaseUnavailable, and OSError of the store."""
        found = [*await self._unnamed(), *await self._unknown()]
        for digest in found:
            await collect(self._database, self._store, self._engine, digest)
        if found:
            log.info("%d adapter versions that nothing refers to were removed", len(found))
        return found

    async def _unnamed(self) -> list[str]:
        """Rows that are no adapter's; row and name are always committed together."""
        unused = select(AdapterVersion.digest).where(~is_used(AdapterVersion.digest))
        async with self._database.session() as session:
            return list(await session.scalars(unused))

    async def _unknown(self) -> list[str]:
        """Folders without a row."""
        folders = await asyncio.to_thread(self._store.untouched, LEFT_S)
        unknown: list[str] = []
        for start in range(0, len(folders), ROWS_MAX):
            some = folders[start : start + ROWS_MAX]
            async with self._database.session() as session:
                known = set(
                    await session.scalars(
                        select(AdapterVersion.digest).where(AdapterVersion.digest.in_(some))
                    )
                )
            unknown += [digest for digest in some if digest not in known]
        return unknown

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Sweep at once, and now and then."""
        async with in_background(self._sweep_forever()):
            yield

    async def _sweep_forever(self) -> None:
        while True:
            try:
                await self.sweep()
            except (ApiError, OSError):
                log.warning("the adapter store was not swept; next time", exc_info=True)
            await asyncio.sleep(EVERY_S)
