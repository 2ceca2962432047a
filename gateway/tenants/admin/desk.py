"""Where the operator's changes are made: one transaction with its entry in the audit trail, then
word to every gateway."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from gateway.db import Database
from gateway.tenants.announcements import Announcer, Changed
from gateway.tenants.audit import trail
from gateway.tenants.audit.trail import Actor
from gateway.tenants.pepper import KeyHash


class Change:
    """One change under way."""

    def __init__(self, session: AsyncSession, actor: Actor) -> None:
        self.session = session
        self._actor = actor
        self.told = Changed()

    async def record(
        self,
        action: str,
        target: str,
        *,
        tenant_id: str | None,
        before: dict[str, Any] | None = None,
        after: dict[str, Any] | None = None,
        told: Changed | None = None,
    ) -> None:
        """Write the entry of the audit trail; the last thing that a change does. `told` is what
        gateways will have to ask the database again."""
        await self.session.flush()
        await trail.record(
            self.session,
            self._actor,
            action,
            target,
            tenant_id=tenant_id,
            before=before,
            after=after,
        )
        self.told = told or Changed()


class Desk:
    """What the operator's work needs; one instance serves any number of changes."""

    def __init__(
        self, database: Database, key_hash: KeyHash, announcer: Announcer, environment: str = ""
    ) -> None:
        self._database = database
        self._announcer = announcer
        self.key_hash = key_hash
        self.environment = environment
        """Of new keys."""

    @asynccontextmanager
    async def change(self, actor: Actor) -> AsyncIterator[Change]:
        """Committed when it ends well, and then told to all gateways."""
        told = Changed()
        try:
            async with self._database.writing() as session:
                change = Change(session, actor)
                yield change
                told = change.told
        finally:  # even if the commit failed: that it did may be known to the server alone
            await self._announcer.tell(told)

    @asynccontextmanager
    async def look(self) -> AsyncIterator[AsyncSession]:
        """A session that changes nothing."""
        async with self._database.session() as session:
            yield session
