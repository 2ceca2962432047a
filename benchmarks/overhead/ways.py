"""The ways from a client to the stub, each started and ready: direct, ours twice, LiteLLM's."""

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import redis

from benchmarks.overhead import litellm, tenant
from benchmarks.overhead.client import Address
from benchmarks.peers.child import Failed, answers, child, local_url
from benchmarks.running_gateway import BASE, ROOT, cpu_s, running
from gateway import settings
from gateway.settings import Settings
from tests.databases import OwnPostgres, free_port, postgres_binaries
from tests.redis_server import OwnRedis

WORKER = "benchmarks.overhead.worker"
START_S = 20.0

DIRECT = "direct"
EMBEDDED = "ours, SQLite"
SERVERS = "ours, PostgreSQL + Redis"
LITELLM = "LiteLLM"


class Way(NamedTuple):
    name: str
    address: Address
    pids: list[int]
    """Of what stands between the client and the stub; of the stub itself where nothing does."""
    redis_url: str = ""
    """Of the store of limits, if that is a Redis."""
    settings: Settings | None = None
    """Of our gateway."""

    def cpu_s(self) -> float:
        return sum(map(cpu_s, self.pids))

    def rss_mib(self) -> float:
        return sum(map(_rss_mib, self.pids))

    def scripts(self) -> int:
        """Calls of scripts that Redis has had."""
        if not self.redis_url:
            return 0
        with redis.Redis.from_url(self.redis_url) as client:
            stats: dict[str, Any] = client.info("commandstats")
        return int(stats.get("cmdstat_evalsha", {}).get("calls", 0))

    def charged(self) -> int:
        """Requests in our ledger with what they cost."""
        return asyncio.run(tenant.charged(self.settings)) if self.settings else 0


def _rss_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def open_all(stack: ExitStack, model: Path, litellm_folder: Path | None) -> Iterator[Way]:
    """One after the other; what can't be had is named and left out."""
    direct = stack.enter_context(_direct())
    yield direct
    yield stack.enter_context(_ours(EMBEDDED, model, {}))
    try:
        servers = stack.enter_context(_servers())
    except NotHere as missing:
        print(f"{SERVERS}: left out, {missing}")
    else:
        yield stack.enter_context(_ours(SERVERS, model, servers))
    if litellm_folder is None:
        print(f"{LITELLM}: left out, as asked")
        return
    try:
        yield stack.enter_context(_litellm(litellm_folder, direct.address.port))
    except (litellm.NotToBeHad, Failed) as missing:
        print(f"{LITELLM}: left out, {missing}")
    else:
        print(f"{LITELLM}: {litellm.WITHOUT}", flush=True)


class NotHere(Exception):
    """The message names what this machine lacks."""


@contextmanager
def _direct() -> Iterator[Way]:
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.overhead.server", str(port)]
    environ = {"PYTHONPATH": str(ROOT)}
    url = local_url(port)
    with _folder() as folder, child(command, environ, folder / "stub.log") as stub:
        stub.wait_for(lambda: answers(url), START_S)
        yield Way(DIRECT, Address(port, "none", "stub"), stub.pids)


@contextmanager
def _ours(name: str, model: Path, environ: dict[str, str]) -> Iterator[Way]:
    with _folder() as folder, running(model, folder, WORKER, environ) as gateway:
        current = settings.load(environ=environ | {"LORAGATE_DATA_DIR": str(folder)})
        address = Address(gateway.port, tenant.make(current), BASE)
        redis_url = environ.get("REDIS_URL", "")
        yield Way(name, address, [gateway.pid], redis_url, current)


@contextmanager
def _servers() -> Iterator[dict[str, str]]:
    """PostgreSQL and Redis, and the settings that name them. Raises NotHere."""
    binaries = postgres_binaries()
    redis_server = shutil.which("redis-server") or shutil.which("valkey-server")
    if binaries is None or redis_server is None:
        raise NotHere(f"no {'redis-server' if binaries else 'PostgreSQL'} on this machine")
    with ExitStack() as stack:
        database = OwnPostgres(binaries)
        stack.callback(database.remove)
        store = OwnRedis(redis_server)
        stack.callback(store.remove)
        yield {"DATABASE_URL": database.url(database.create()), "REDIS_URL": store.url}


@contextmanager
def _litellm(folder: Path, stub_port: int) -> Iterator[Way]:
    environment = litellm.prepare(folder.absolute())
    port = free_port()
    with _folder() as work, litellm.running(environment, work, port, stub_port) as process:
        address = Address(port, litellm.KEY, litellm.MODEL)
        yield Way(LITELLM, address, process.pids)


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
