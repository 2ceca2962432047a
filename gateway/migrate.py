"""Bring the database to the newest tables: at start-up, and as `loragate migrate`.

Safe to run from several processes at once; `migrations/env.py` has the lock.
"""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine
from sqlalchemy.pool import NullPool

from gateway.db import CONNECT_S, async_url, is_lost
from gateway.errors import DatabaseUnavailable
from gateway.settings import Settings, SettingsError

log = logging.getLogger(__name__)

SQLITE_WAIT_S = 120.0
"""How long an upgrade waits for another process's upgrade."""


async def prepare(settings: Settings) -> URL:
    """Make the data folder and bring the database up to date; returns its URL.

    Raises SettingsError, DatabaseUnavailable.
    """
    url = async_url(settings.database.url.reveal(), settings.data_dir)
    try:
        settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"data_dir: {error}") from None
    await upgrade(url)
    return url


async def upgrade(url: URL, revision: str = "head") -> None:
    """Run what is missing up to `revision`. Raises DatabaseUnavailable."""
    await _run(url, lambda config: command.upgrade(config, revision))


async def downgrade(url: URL, revision: str) -> None:
    """Undo everything after `revision` (`base`: everything). Raises DatabaseUnavailable."""
    await _run(url, lambda config: command.downgrade(config, revision))


@asynccontextmanager
async def connection(url: URL) -> AsyncIterator[AsyncConnection]:
    """A connection fit for migrations: its own, and without a limit on how long they take."""
    sqlite = url.get_backend_name() == "sqlite"
    engine = create_async_engine(
        url,
        poolclass=NullPool,
        connect_args={"timeout": SQLITE_WAIT_S if sqlite else CONNECT_S},
        **({"isolation_level": "AUTOCOMMIT"} if sqlite else {}),
    )
    try:
        async with engine.connect() as opened:
            yield opened
    finally:
        await engine.dispose()


async def _run(url: URL, act: Callable[[Config], None]) -> None:
    def run(connected: Connection) -> None:
        before = _revision(connected)
        config = Config()
        config.set_main_option("script_location", str(folder()).replace("%", "%%"))
        config.attributes["connection"] = connected
        act(config)
        if (after := _revision(connected)) != before:
            log.info("database migrated from %s to %s", before or "nothing", after or "nothing")

    try:
        async with connection(url) as opened:
            await opened.run_sync(run)
    except (DBAPIError, OSError) as error:
        if not isinstance(error, OSError) and not is_lost(error):
            raise
        reason = error.orig if isinstance(error, DBAPIError) else error
        raise DatabaseUnavailable(f"database.url: the database cannot be used: {reason}") from error


def _revision(connected: Connection) -> str | None:
    revision = MigrationContext.configure(connected).get_current_revision()
    connected.rollback()  # the look has begun a transaction
    return revision


def folder() -> Path:
    """Where the migrations lie: in an installed package, else beside it in a checkout."""
    package = Path(__file__).parent
    inside = package / "_migrations"
    return inside if inside.is_dir() else package.parent / "migrations"
