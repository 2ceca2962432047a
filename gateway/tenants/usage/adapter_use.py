"""How much a tenant uses versions of adapters, by its ledger."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from sqlalchemy import case, func, select

from gateway.db import Database, now
from gateway.tenants.usage.tables import UsageEntry

COUNTED = timedelta(days=30)


class AdapterUse:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def of(
        self, tenant_id: str, digests: Sequence[str]
    ) -> Mapping[str, tuple[int, datetime]]:
        """Digest → the tenant's requests of the last 30 days, and when the last one ever began;
        those that were never used are left out. One query, on an index of its own; the ledger is
        a second behind."""
        recent = case((UsageEntry.started_at >= now() - COUNTED, 1), else_=0)
        query = (
            select(UsageEntry.adapter_digest, func.sum(recent), func.max(UsageEntry.started_at))
            .where(UsageEntry.tenant_id == tenant_id, UsageEntry.adapter_digest.in_(digests))
            .group_by(UsageEntry.adapter_digest)
        )
        async with self._database.session() as session:
            rows = (await session.execute(query)).all()
        return {digest: (int(count), last) for digest, count, last in rows if digest is not None}
