"""The database: engine, sessions, and the base class of all tables.

SQLite for one machine, PostgreSQL for several. Sessions are short: open one for a few queries,
commit, close; none is open while an answer streams.
"""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import uuid_utils
from sqlalchemy import DateTime, Dialect, MetaData, TypeDecorator, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncEngine,
    AsyncSession,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import DeclarativeBase

from gateway.errors import DatabaseUnavailable
from gateway.settings import SettingsError
from gateway.telemetry import redact

DRIVERS = {
    "sqlite": "sqlite+aiosqlite",
    "sqlite+aiosqlite": "sqlite+aiosqlite",
    "postgresql": "postgresql+asyncpg",
    "postgres": "postgresql+asyncpg",
    "postgresql+asyncpg": "postgresql+asyncpg",
}

OPTIONS = {
    "sqlite": (),
    "postgresql": (
        "host", "port", "sslmode", "ssl", "passfile", "target_session_attrs",
        "prepared_statement_cache_size",
    ),
}  # fmt: skip
"""After the ? of a URL: what the drivers take as text. They answer others with a TypeError when a
connection is made."""

CONNECT_S = 5.0
"""A database that doesn't take a connection in this time is away: a client shouldn't wait longer
for its 503."""
COMMAND_S = 15.0
"""The same for one statement; ours take milliseconds."""

# SQLSTATE classes that tell of the server, not of the statement: connection, authorization and
# catalog (a misconfigured server is no client's fault), resources, locks, operator, deadlock; and
# 25006, that it takes no writes: it is a standby, or an operator has frozen it
SERVER_STATES = ("08", "25006", "28", "3D", "40", "53", "55", "57", "58")


class UtcDateTime(TypeDecorator[datetime]):
    """A moment, aware and in UTC on every database; SQLite forgets the zone, so it is put back."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        assert value is None or value.tzinfo is not None, "a naive time would mean another moment"
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.replace(tzinfo=value.tzinfo or UTC)


def now() -> datetime:
    return datetime.now(UTC)


def new_id() -> str:
    """A UUIDv7 as text: unique, and later ones sort after earlier ones."""
    return str(uuid_utils.uuid7())


class Base(DeclarativeBase):
    """Constraint names are fixed, so that migrations can name them on every database."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {datetime: UtcDateTime}  # noqa: RUF012  (read once, by SQLAlchemy)


def async_url(url: str, data_dir: Path) -> URL:
    """The URL with its async driver; an empty one means a SQLite file in `data_dir`.

    Raises SettingsError, without the URL in it, since that may hold a password.
    """
    if not url:
        return URL.create("sqlite+aiosqlite", database=str(data_dir / "loragate.db"))
    try:
        parsed = make_url(url)
        driver = DRIVERS[parsed.drivername]
    except (ArgumentError, ValueError, KeyError):
        raise SettingsError(
            "database.url: expected sqlite:///path/to/file.db or postgresql://user@host/name"
        ) from None
    if driver.startswith("sqlite"):
        if parsed.database in (None, "", ":memory:"):
            raise SettingsError("database.url: SQLite needs a file, sqlite:///path/to/file.db")
        _check_options("sqlite", parsed)
        return parsed.set(drivername=driver)
    _check_options("postgresql", parsed)
    query = {"ssl" if name == "sslmode" else name: value for name, value in parsed.query.items()}
    return parsed.set(drivername=driver, query=query)


def _check_options(kind: str, url: URL) -> None:
    accepted = ", ".join(OPTIONS[kind]) or "none"
    for name in url.query:
        if name not in OPTIONS[kind]:
            raise SettingsError(
                f"database.url: the option {redact(name)[:50]!r} is not known; accepted for {kind} "
                f"are: {accepted}"
            )


def is_lost(error: BaseException) -> bool:
    """Whether a statement failed because the database is away or full, not because it is wrong."""
    if not isinstance(error, DBAPIError):
        return isinstance(error, PoolTimeout | ConnectionError | TimeoutError)
    if getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR:
        return False  # "no such table" and the like, for which SQLite also says OperationalError
    state = getattr(error.orig, "sqlstate", None) or ""
    return (
        error.connection_invalidated
        or state.startswith(SERVER_STATES)
        or isinstance(error, OperationalError | InterfaceError)
    )


class Database:
    """Connections of one process."""

    def __init__(self, url: URL, pool_size: int = 10) -> None:
        sqlite = url.get_backend_name() == "sqlite"
        options: dict[str, Any] = {} if sqlite else _postgresql_options(pool_size)
        self.engine: AsyncEngine = create_async_engine(url, hide_parameters=True, **options)
        self._one_writer: AbstractAsyncContextManager[object] = (
            asyncio.Lock() if sqlite else nullcontext()
        )
        if sqlite:
            event.listen(self.engine.sync_engine, "connect", _sqlite_pragmas)
        self._sessions = async_sessionmaker(self.engine, expire_on_commit=False)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[AsyncSession]:
        """A session that commits on success. A lost database becomes a 503, never a 500."""
        try:
            async with self._sessions.begin() as session:
                await _connect(session)
                yield session
        except Exception as error:
            if not is_lost(error):
                raise
            raise unavailable() from error

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncSession]:
        """A session for what is read and then changed because of it.

        On SQLite it has the write lock from the start: what it has read is still so when it writes,
        and writers wait in line, where each trying again by itself may wait for ever. On PostgreSQL
        it is a session like any other; lock the rows that you read.
        """
        async with self._one_writer, self.session() as session:
            if self.engine.dialect.name == "sqlite":
                await session.execute(text("BEGIN IMMEDIATE"))
            yield session

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """A bare connection for the queries of every request, at a third of a session's price. It
        keeps nothing. A lost database becomes a 503."""
        try:
            async with self.engine.connect() as connection:
                yield connection
        except Exception as error:
            if not (is_lost(error) or isinstance(error, OSError)):
                raise
            raise unavailable() from error

    async def close(self) -> None:
        await self.engine.dispose()


async def _connect(session: AsyncSession) -> None:
    """Now rather than at the first query, so that an OSError here is the database's for sure."""
    try:
        await session.connection()
    except OSError as error:
        raise unavailable() from error


def unavailable() -> DatabaseUnavailable:
    return DatabaseUnavailable("The database cannot be reached. Try again in a moment.")


def _postgresql_options(pool_size: int) -> dict[str, Any]:
    return {
        "pool_size": pool_size,
        "max_overflow": 0,
        "pool_timeout": CONNECT_S,
        "pool_pre_ping": True,
        "connect_args": {"timeout": CONNECT_S, "command_timeout": COMMAND_S},
    }


def _sqlite_pragmas(connection: Any, _record: object) -> None:
    """WAL so that readers never wait for the writer; FULL so that a commit survives power loss."""
    cursor = connection.cursor()
    for pragma in (
        "busy_timeout=5000",
        "journal_mode=WAL",
        "synchronous=FULL",
        "foreign_keys=ON",
    ):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()
