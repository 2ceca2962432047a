"""How Alembic runs our migrations: one process at a time, all of them or none.

However many replicas start at once, one migrates and the others wait, then find nothing to do:
without this, parallel upgrades fail. Given a connection (`gateway.migrate`), it is used; without
one (the `alembic` command), the settings say which database.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from alembic import context
from sqlalchemy import Connection, text

import gateway.adapters.tables
import gateway.tenants.audit.tables
import gateway.tenants.tables
import gateway.tenants.usage.tables  # noqa: F401  (tables register themselves in Base.metadata)
from gateway import migrate, settings
from gateway.db import Base, async_url

LOCK_KEY = 0x6C6F7261676174  # "loragat", any number that nobody else uses
STATEMENT_LOCK_S = 10
"""A migration that waits longer for a busy table would make every query behind it wait as well."""


@contextmanager
def alone(connection: Connection) -> Iterator[None]:
    """Hold the database against other upgrades. A crash lets go of it."""
    if connection.dialect.name == "postgresql":
        # held by the session, since a migration may commit midway (CREATE INDEX CONCURRENTLY)
        connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": LOCK_KEY})
        connection.execute(text(f"SET lock_timeout = '{STATEMENT_LOCK_S}s'"))
        connection.commit()
        try:
            yield
        finally:
            connection.rollback()
            connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": LOCK_KEY})
            connection.commit()
    else:
        # SQLite has transactional DDL and one writer; Python's driver hides both unless told not to
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            connection.exec_driver_sql("ROLLBACK")
            raise
        connection.exec_driver_sql("COMMIT")


def run(connection: Connection) -> None:
    with alone(connection):
        context.configure(
            connection=connection,
            target_metadata=Base.metadata,
            render_as_batch=connection.dialect.name == "sqlite",  # it cannot ALTER most things
        )
        with context.begin_transaction():
            context.run_migrations()


async def run_with_settings() -> None:
    current = settings.load()
    current.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    url = async_url(current.database.url.reveal(), current.data_dir)
    async with migrate.connection(url) as connection:
        await connection.run_sync(run)


given: Connection | None = context.config.attributes.get("connection")
if context.is_offline_mode():
    raise SystemExit("Offline SQL is not supported: migrations run under a lock in the database.")
if given is None:
    asyncio.run(run_with_settings())
else:
    run(given)
