"""When each key was last used: noted in passing, written now and then, off the request path."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime

from sqlalchemy import bindparam, update

from gateway.background import in_background
from gateway.db import Database, now
from gateway.errors import DatabaseUnavailable
from gateway.tenants.tables import ApiKey

log = logging.getLogger(__name__)

KEY_EVERY_S = 60.0
"""A busy key is written at most this often."""
FLUSH_EVERY_S = 5.0


class LastUsed:
    def __init__(self, database: Database, clock: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._clock = clock
        self._noted_at: dict[str, float] = {}
        self._pending: dict[str, datetime] = {}

    def note(self, key_id: str) -> None:
        noted_at = self._noted_at.get(key_id)
        if noted_at is None or self._clock() - noted_at >= KEY_EVERY_S:
            self._noted_at[key_id] = self._clock()
            self._pending[key_id] = now()

    async def flush(self) -> None:
        """Write what is pending. Raises DatabaseUnavailable; it is then still pending."""
        writing, self._pending = self._pending, {}
        self._forget_old()
        if not writing:
            return
        try:
            async with self._database.session() as session:
                await (await session.connection()).execute(
                    update(ApiKey)
                    .where(ApiKey.id == bindparam("key_id"))
                    .values(last_used_at=bindparam("moment")),
                    # in order, so that replicas writing the same keys don't deadlock
                    [{"key_id": key, "moment": moment} for key, moment in sorted(writing.items())],
                )
        except BaseException:
            self._pending = writing | self._pending
            raise

    def _forget_old(self) -> None:
        oldest = self._clock() - KEY_EVERY_S
        self._noted_at = {key: at for key, at in self._noted_at.items() if at > oldest}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Flush now and then, and at the end."""
        try:
            async with in_background(self._flush_forever()):
                yield
        finally:
            await self._flush_if_possible()

    async def _flush_forever(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_EVERY_S)
            await self._flush_if_possible()

    async def _flush_if_possible(self) -> None:
        try:
            await self.flush()
        except DatabaseUnavailable:
            log.warning("last use of %d keys not written: no database", len(self._pending))
