"""A real Redis for tests: one server per test session, or the one that TEST_REDIS_URL names.

Where there is neither, the tests that need it are skipped, except under CI.
"""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from tests.databases import free_port

STOP_S = 10.0


class OwnRedis:
    """A server that this session started and may stop; it keeps nothing across a restart."""

    def __init__(self, binary: str) -> None:
        self._binary = binary
        self._folder = Path(tempfile.mkdtemp(prefix="loragate-redis-"))
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    self._binary,
                    *("--port", str(self.port), "--bind", "127.0.0.1", "--save", ""),
                    *("--appendonly", "no", "--maxmemory-policy", "noeviction"),
                ],
                stdout=log,
                stderr=log,
                cwd=self._folder,
            )
        deadline = time.monotonic() + STOP_S
        while True:
            try:
                with redis.Redis.from_url(self.url) as client:
                    client.ping()
                return
            except redis.ConnectionError:
                assert time.monotonic() < deadline, (self._folder / "log").read_text()[-2000:]
                time.sleep(0.02)

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(STOP_S)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        self.stop()
        try:
            yield
        finally:
            self.start()

    def remove(self) -> None:
        self.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


_SERVER = pytest.StashKey[OwnRedis]()


@pytest.fixture(scope="session")
def own_redis(request: pytest.FixtureRequest) -> OwnRedis:
    """A server that a test may stop and start."""
    stash = request.config.stash
    if _SERVER not in stash:
        binary = shutil.which("redis-server") or shutil.which("valkey-server")
        if binary is None:
            reason = "no redis-server here: install it, or name a server in TEST_REDIS_URL"
            if os.environ.get("CI", "").lower() == "true":
                pytest.fail(reason)
            pytest.skip(reason)
        stash[_SERVER] = OwnRedis(binary)
        request.config.add_cleanup(stash[_SERVER].remove)
    return stash[_SERVER]


@pytest.fixture
def redis_url(request: pytest.FixtureRequest) -> str:
    """An empty database on a real Redis."""
    url = os.environ.get("TEST_REDIS_URL")
    if not url:
        server: OwnRedis = request.getfixturevalue("own_redis")
        url = server.url
    with redis.Redis.from_url(url) as client:
        client.flushdb()
    return url
