"""Sessions, URLs, and what happens when the database is away."""

import asyncio
import socket
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from gateway import db
from gateway.db import OPTIONS, Database, async_url
from gateway.errors import DatabaseUnavailable
from gateway.settings import SettingsError
from gateway.tenants.tables import Tenant
from tests.databases import PASSWORD, Postgres, free_port, stopped


def test_no_url_means_a_file_in_the_data_folder() -> None:
    url = async_url("", Path("/data"))
    assert url.drivername == "sqlite+aiosqlite"
    assert url.database == "/data/loragate.db"


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("sqlite:////data/x.db", "sqlite+aiosqlite:////data/x.db"),
        ("postgresql://u@h/d", "postgresql+asyncpg://u@h/d"),
        ("postgres://u@h/d", "postgresql+asyncpg://u@h/d"),
        ("postgresql+asyncpg://u@h/d", "postgresql+asyncpg://u@h/d"),
        ("postgresql://u@h/d?sslmode=require", "postgresql+asyncpg://u@h/d?ssl=require"),
    ],
)
def test_a_url_gets_the_driver_that_is_installed(given: str, used: str) -> None:
    assert str(async_url(given, Path())) == used


@pytest.mark.parametrize(
    "url",
    [
        f"mysql://u:{PASSWORD}@h/d",
        f"u:{PASSWORD}@h/d",
        f"postgresql://u:{PASSWORD}@h:port/d",
        f"postgresql+psycopg2://u:{PASSWORD}@h/d",
        "sqlite://",
        "sqlite:///:memory:",
    ],
)
def test_f13_a_url_that_cannot_be_used_names_the_setting_without_the_password(url: str) -> None:
    with pytest.raises(SettingsError, match=r"database\.url") as error:
        async_url(url, Path())
    assert PASSWORD not in str(error.value)


@pytest.mark.parametrize(
    ("url", "option", "accepted"),
    [
        (f"postgresql://u:{PASSWORD}@h/d?connect_timeout=5", "connect_timeout", "sslmode"),
        (f"postgresql://u:{PASSWORD}@h/d?application_name=x", "application_name", "sslmode"),
        (f"postgresql://u:{PASSWORD}@h/d?sslmode=x&sslrootcert=y", "sslrootcert", "sslmode"),
        ("sqlite:///x.db?mode=ro", "mode", "none"),
    ],
)
def test_an_option_that_the_driver_does_not_know_is_refused_at_the_start(
    url: str, option: str, accepted: str
) -> None:
    with pytest.raises(SettingsError, match=rf"database\.url: the option '{option}'") as error:
        async_url(url, Path())
    assert accepted in str(error.value)
    assert PASSWORD not in str(error.value)


async def test_every_option_that_is_accepted_is_known_to_the_driver(
    postgres_server: Postgres, tmp_path: Path
) -> None:
    values = {
        "host": "127.0.0.1",
        "port": "5432",
        "sslmode": "prefer",
        "ssl": "prefer",
        "passfile": str(tmp_path / "none"),
        "target_session_attrs": "any",
        "prepared_statement_cache_size": "0",
    }
    assert values.keys() == set(OPTIONS["postgresql"])
    plain = async_url(postgres_server.url("postgres"), tmp_path)
    for name, value in values.items():
        if name in ("host", "port"):
            continue
        given = plain.update_query_dict({name: value}).render_as_string(hide_password=False)
        database = Database(async_url(given, tmp_path))
        async with database.session() as session:
            assert await session.scalar(text("SELECT 1")) == 1
        await database.close()


async def test_a_session_commits_when_it_ends_well_and_only_then(database: Database) -> None:
    async with database.session() as session:
        session.add(Tenant(slug="kept", name=""))

    async def fail() -> None:
        async with database.session() as session:
            session.add(Tenant(slug="dropped", name=""))
            await session.flush()
            raise KeyError

    with pytest.raises(KeyError):
        await fail()
    async with database.session() as session:
        assert (await session.scalars(select(Tenant.slug))).all() == ["kept"]


async def test_a_moment_comes_back_aware_and_equal(database: Database) -> None:
    moment = datetime(2026, 5, 1, 12, 0, 0, 123456, timezone(timedelta(hours=2)))
    async with database.session() as session:
        session.add(Tenant(slug="acme", name="", created_at=moment))
    async with database.session() as session:
        found = (await session.scalars(select(Tenant.created_at))).one()
    assert found == moment
    assert found.utcoffset() == timedelta(0)
    assert found.tzinfo is not None


async def test_writers_at_the_same_time_all_succeed(database: Database) -> None:
    async def write(number: int) -> None:
        async with database.session() as session:
            await session.scalar(select(func.count()).select_from(Tenant))
            session.add(Tenant(slug=f"t{number}", name=""))

    await asyncio.gather(*(write(number) for number in range(30)))
    async with database.session() as session:
        assert await session.scalar(select(func.count()).select_from(Tenant)) == 30


async def test_a_wrong_statement_is_our_fault_and_no_503(postgres_database: Database) -> None:
    with pytest.raises(ProgrammingError):
        async with postgres_database.session() as session:
            await session.execute(text("SELECT * FROM no_such_table"))


async def test_f16_a_standby_that_takes_no_writes_is_503(
    postgres_server: Postgres, migrated_postgres_url: str
) -> None:
    name = make_url(migrated_postgres_url).database
    postgres_server.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    database = Database(async_url(migrated_postgres_url, Path()))
    with pytest.raises(DatabaseUnavailable):
        async with database.session() as session:
            session.add(Tenant(slug="acme", name="acme"))
    await database.close()


async def test_f13_a_failed_statement_does_not_tell_its_values(database: Database) -> None:
    with pytest.raises(Exception, match="no_such_table") as error:
        async with database.session() as session:
            await session.execute(text("SELECT * FROM no_such_table WHERE x = :x"), {"x": PASSWORD})
    assert PASSWORD not in str(error.value)


@pytest.fixture
async def away(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Database]:
    database = Database(
        async_url(request.param.format(port=free_port(), folder=tmp_path), tmp_path)
    )
    yield database
    await database.close()


@pytest.mark.parametrize(
    "away",
    [
        f"postgresql://u:{PASSWORD}@127.0.0.1:{{port}}/d",  # refused
        f"postgresql://u:{PASSWORD}@/d?host={{folder}}",  # no socket there
        f"postgresql://u:{PASSWORD}@no-such-host.invalid/d",  # no such name
        "sqlite:///{folder}/no/such/folder/x.db",
    ],
    indirect=True,
)
async def test_f16_a_database_that_is_away_is_503_with_retry_after(away: Database) -> None:
    with pytest.raises(DatabaseUnavailable) as error:
        async with away.session() as session:
            await session.execute(text("SELECT 1"))
    assert error.value.headers() == {"retry-after": "2"}
    assert PASSWORD not in f"{error.value} {error.value.__cause__}"


async def test_f16_a_login_that_is_refused_or_a_missing_database_is_503(
    postgres_server: Postgres, tmp_path: Path
) -> None:
    database = Database(async_url(postgres_server.url("no_such_database"), tmp_path))
    with pytest.raises(DatabaseUnavailable):
        async with database.session():
            pass
    await database.close()


async def test_f16_a_server_that_does_not_answer_is_503_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(db, "CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
        port = silent.getsockname()[1]
        database = Database(async_url(f"postgresql://u@127.0.0.1:{port}/d", tmp_path))
        with pytest.raises(DatabaseUnavailable):
            async with asyncio.timeout(3), database.session():
                pass
        await database.close()


async def test_f16_connections_that_broke_are_replaced_without_a_restart(
    postgres_database: Database, postgres_server: Postgres
) -> None:
    async def ask() -> int | None:
        async with postgres_database.session() as session:
            answer: int | None = await session.scalar(text("SELECT 1"))
            return answer

    await asyncio.gather(*(ask() for _ in range(10)))
    with stopped(postgres_server):
        answers = await asyncio.gather(*(ask() for _ in range(20)), return_exceptions=True)
        assert {type(answer) for answer in answers} == {DatabaseUnavailable}
    assert await asyncio.gather(*(ask() for _ in range(20))) == [1] * 20


async def test_f16_a_connection_lost_within_a_session_is_503(
    postgres_database: Database, postgres_server: Postgres
) -> None:
    async def lose_it() -> None:
        async with postgres_database.session() as session:
            own = await session.scalar(text("SELECT pg_backend_pid()"))
            await asyncio.to_thread(postgres_server.execute, f"SELECT pg_terminate_backend({own})")
            await session.execute(text("SELECT 1"))

    with pytest.raises(DatabaseUnavailable):
        await lose_it()


async def test_f31_no_more_connections_than_the_pool_size(
    migrated_postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(db, "CONNECT_S", 0.3)
    database = Database(async_url(migrated_postgres_url, Path()), pool_size=2)
    async with database.session(), database.session():
        with pytest.raises(DatabaseUnavailable) as error:
            async with database.session():
                pass
        assert isinstance(error.value.__cause__, PoolTimeout)
    await database.close()


async def test_sqlite_keeps_what_was_committed_and_lets_readers_read(
    migrated_sqlite_url: str,
) -> None:
    database = Database(async_url(migrated_sqlite_url, Path()))
    async with database.session() as session:
        for pragma, value in {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}.items():
            assert await session.scalar(text(f"PRAGMA {pragma}")) == value
    await database.close()


def test_now_is_aware() -> None:
    assert db.now().tzinfo is UTC
