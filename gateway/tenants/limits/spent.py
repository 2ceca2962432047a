"""What the ledger knows an owner to have spent."""

from datetime import datetime

from sqlalchemy import func, select

from gateway.db import Database
from gateway.tenants.usage.tables import UsageEntry


class SpentInLedger:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def __call__(self, owner: str, start: datetime) -> int:
        """Nanos of what began since. `owner`: `tenant:<id>` or `key:<id>`. Raises
        DatabaseUnavailable."""
        kind, _, name = owner.partition(":")
        column = UsageEntry.tenant_id if kind == "tenant" else UsageEntry.key_id
        query = select(func.coalesce(func.sum(UsageEntry.cost_nanos), 0)).where(
            column == name, UsageEntry.started_at >= start
        )
        async with self._database.reading() as connection:
            return int((await connection.execute(query)).scalar_one())
