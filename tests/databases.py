"""Fresh databases for tests, on SQLite and on a real PostgreSQL.

One PostgreSQL server is started per test session from the binaries on this machine, or the one
that TEST_POSTGRES_URL names is used. Where there is neither, the tests that need it are skipped,
except under CI, where a missing server must not look like success.
"""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import asyncpg  # type: ignore[import-untyped]  # has no type information
import pytest
from sqlalchemy.engine import make_url

from gateway import migrate
from gateway.db import Database, async_url

USER = "loragate"
PASSWORD = "planted-database-password"
"""Never asked for by the server of these tests; tests look for it in everything that is printed."""
STOP_S = 30.0

P = ParamSpec("P")
T = TypeVar("T")


class Postgres:
    """A server, and the databases that tests make on it."""

    def __init__(self, url: str) -> None:
        self._admin = make_url(url)

    def url(self, name: str) -> str:
        return self._admin.set(database=name).render_as_string(hide_password=False)

    def create(self, template: str | None = None) -> str:
        """A new database, empty or a copy; returns its name."""
        name = f"test_{uuid.uuid4().hex[:12]}"
        self.execute(f"CREATE DATABASE {name}" + (f" TEMPLATE {template}" if template else ""))
        return name

    def drop(self, name: str) -> None:
        self.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def execute(self, statement: str) -> None:
        in_thread(self._execute, statement)

    async def _execute(self, statement: str) -> None:
        connection = await asyncpg.connect(
            host=self._admin.host,
            port=self._admin.port,
            user=self._admin.username,
            password=self._admin.password,
            database=self._admin.database,
        )
        try:
            await connection.execute(statement)
        finally:
            await connection.close()


class OwnPostgres(Postgres):
    """A server that this session started and may stop."""

    def __init__(self, binaries: Path) -> None:
        self._binaries = binaries
        # beside, not in, pytest's folders: those are closed to the user that the server runs as
        self._folder = Path(tempfile.mkdtemp(prefix="loragate-postgres-"))
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        super().__init__(f"postgresql://{USER}:{PASSWORD}@127.0.0.1:{self.port}/postgres")
        self._as_user = _server_user(self._folder)
        subprocess.run(
            [
                str(binaries / "initdb"),
                f"--pgdata={self._folder / 'data'}",
                f"--username={USER}",
                *("--auth=trust", "--no-sync", "--encoding=UTF8", "--no-locale"),
            ],
            check=True,
            capture_output=True,
            cwd=self._folder,
            **self._as_user,
        )
        self.start()

    def start(self) -> None:
        options = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": self._folder,
            "max_connections": 50,
            "fsync": "off",  # nothing here outlives the session
        }
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    str(self._binaries / "postgres"),
                    *("-D", str(self._folder / "data")),
                    *(f"--{name}={value}" for name, value in options.items()),
                ],
                stdout=log,
                stderr=log,
                cwd=self._folder,
                **self._as_user,
            )
        self._wait_until_it_answers()

    def _wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + STOP_S
        while True:
            assert self._process is not None
            assert self._process.poll() is None, (self._folder / "log").read_text()[-2000:]
            try:
                self.execute("SELECT 1")
            except (OSError, asyncpg.PostgresError):
                assert time.monotonic() < deadline, (self._folder / "log").read_text()[-2000:]
                time.sleep(0.05)
            else:
                return

    def stop(self) -> None:
        """At once, as in a crash of the machine; safe to call twice."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGQUIT)
            process.wait(STOP_S)

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


def _server_user(folder: Path) -> dict[str, Any]:
    """PostgreSQL refuses to run as root: then it runs as `postgres`, who must own its folder."""
    if os.geteuid() != 0:
        return {}
    shutil.chown(folder, "postgres", "postgres")
    return {"user": "postgres", "group": "postgres", "extra_groups": []}


def postgres_binaries() -> Path | None:
    found = [Path(path).resolve().parent for path in [shutil.which("postgres")] if path]
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    complete = (
        path for path in found if (path / "initdb").exists() and (path / "postgres").exists()
    )
    return next(complete, None)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def in_thread(function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run async code from a fixture, whatever loop the test has."""

    async def run() -> T:
        return await function(*args, **kwargs)

    with ThreadPoolExecutor(1) as executor:
        return executor.submit(asyncio.run, run()).result()


_SERVER = pytest.StashKey[Postgres]()
_TEMPLATE = pytest.StashKey[str]()


@pytest.fixture(scope="session")
def postgres_server(request: pytest.FixtureRequest) -> Postgres:
    """Kept by the session itself, so that there is one however many conftests import this."""
    stash = request.config.stash
    if _SERVER not in stash:
        stash[_SERVER] = _open_server(request.config)
    return stash[_SERVER]


def _open_server(config: pytest.Config) -> Postgres:
    if url := os.environ.get("TEST_POSTGRES_URL"):
        return Postgres(url)
    binaries = postgres_binaries()
    if binaries is None:
        reason = "no PostgreSQL here: install it, or name a server in TEST_POSTGRES_URL"
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    server = OwnPostgres(binaries)
    config.add_cleanup(server.remove)
    return server


@pytest.fixture(scope="session")
def migrated_template(postgres_server: Postgres, request: pytest.FixtureRequest) -> str:
    """A migrated database to copy: faster than running the migrations for each test."""
    stash = request.config.stash
    if _TEMPLATE not in stash:
        stash[_TEMPLATE] = postgres_server.create()
        url = async_url(postgres_server.url(stash[_TEMPLATE]), Path())
        in_thread(migrate.upgrade, url)
    return stash[_TEMPLATE]


@pytest.fixture
def postgres_url(postgres_server: Postgres) -> Iterator[str]:
    """An empty database on PostgreSQL."""
    name = postgres_server.create()
    yield postgres_server.url(name)
    with suppress(OSError):  # the test may have stopped the server
        postgres_server.drop(name)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """An empty database on SQLite."""
    return f"sqlite:///{tmp_path / 'test.db'}"


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str:
    """An empty database, once on each kind of server."""
    name = {"sqlite": "sqlite_url", "postgresql": "postgres_url"}[request.param]
    url: str = request.getfixturevalue(name)
    return url


@pytest.fixture
def migrated_postgres_url(postgres_server: Postgres, migrated_template: str) -> Iterator[str]:
    """A database with all tables on PostgreSQL."""
    name = postgres_server.create(template=migrated_template)
    yield postgres_server.url(name)
    with suppress(OSError):
        postgres_server.drop(name)


@pytest.fixture
def migrated_sqlite_url(sqlite_url: str) -> str:
    """A database with all tables on SQLite."""
    in_thread(migrate.upgrade, async_url(sqlite_url, Path()))
    return sqlite_url


@pytest.fixture(params=["sqlite", "postgresql"])
def migrated_url(request: pytest.FixtureRequest) -> str:
    """A database with all tables, once on each kind of server."""
    name = {"sqlite": "migrated_sqlite_url", "postgresql": "migrated_postgres_url"}[request.param]
    url: str = request.getfixturevalue(name)
    return url


@pytest.fixture
async def database(migrated_url: str) -> AsyncIterator[Database]:
    """An open, migrated database, once on each kind of server."""
    database = Database(async_url(migrated_url, Path()))
    yield database
    await database.close()


@pytest.fixture
async def postgres_database(migrated_postgres_url: str) -> AsyncIterator[Database]:
    """An open, migrated database on PostgreSQL."""
    database = Database(async_url(migrated_postgres_url, Path()))
    yield database
    await database.close()


@contextmanager
def stopped(server: Postgres) -> Iterator[None]:
    """The server is down in here; where it isn't ours to stop, the test is skipped."""
    if not isinstance(server, OwnPostgres):
        pytest.skip("the PostgreSQL server of TEST_POSTGRES_URL is not stopped by a test")
    server.stop()
    try:
        yield
    finally:
        server.start()
