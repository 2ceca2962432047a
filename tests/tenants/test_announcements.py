"""Changes reach every gateway over a real Redis, and soon enough without one."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest

from gateway.app import create_app
from gateway.redis_client import connect
from gateway.settings import Redis, Secret, Settings
from gateway.tenants.announcements import (
    ALONE_S,
    CHANNEL,
    HEARD_S,
    UNTOLD_MAX,
    Announcer,
    Changed,
)
from tests.databases import free_port
from tests.fakes import FakeEngine
from tests.redis_server import OwnRedis
from tests.serving import bearer, client_of, issue_key, settings_for

REVOKED = Changed(keys=("0123456789",))


async def until(true: Callable[[], bool], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


class Replica:
    """One gateway's Announcer, and what it heard."""

    def __init__(self, url: str) -> None:
        self.redis = connect(Settings(redis=Redis(url=Secret(url))))
        self.announcer = Announcer(self.redis)
        self.heard: list[Changed] = []
        self.announcer.on_change(self.heard.append)

    async def wait_for(self, changed: Changed, within_s: float) -> None:
        await until(lambda: changed in self.heard, within_s)

    async def wait_until_believed(self, seconds: float, within_s: float = 10.0) -> None:
        await until(lambda: self.announcer.believed_s == seconds, within_s)


@asynccontextmanager
async def replicas(url: str, count: int) -> AsyncIterator[list[Replica]]:
    made = [Replica(url) for _ in range(count)]
    async with asyncio.TaskGroup() as group:
        stop = asyncio.Event()

        async def live(replica: Replica) -> None:
            async with replica.announcer.running():
                await stop.wait()
            assert replica.redis is not None
            await replica.redis.aclose()

        for replica in made:
            group.create_task(live(replica))
        try:
            yield made
        finally:
            stop.set()


async def test_f15_a_change_reaches_every_replica_well_within_a_second(redis_url: str) -> None:
    async with replicas(redis_url, 4) as (teller, *others):
        for replica in (teller, *others):
            await replica.wait_until_believed(HEARD_S)
        assert await teller.announcer.tell(REVOKED)
        assert REVOKED in teller.heard, "here at once"
        for other in others:
            await other.wait_for(REVOKED, within_s=1.0)


async def test_f15_one_that_only_tells_like_the_shell_is_heard_too(redis_url: str) -> None:
    shell = Replica(redis_url)
    async with replicas(redis_url, 1) as (gateway,):
        await gateway.wait_until_believed(HEARD_S)
        assert await shell.announcer.tell(Changed(tenants=("t",)))
        await gateway.wait_for(Changed(tenants=("t",)), within_s=1.0)
    assert shell.redis is not None
    await shell.redis.aclose()


async def test_f15_what_was_read_is_believed_for_a_second_only_where_nothing_is_heard(
    own_redis: OwnRedis, caplog: pytest.LogCaptureFixture
) -> None:
    assert ALONE_S <= 1
    assert Announcer(None).believed_s == ALONE_S
    async with replicas(own_redis.url, 1) as (replica,):
        assert replica.announcer.believed_s == ALONE_S, "nothing was heard yet"
        await replica.wait_until_believed(HEARD_S)
        replica.heard.clear()
        with own_redis.stopped():
            await replica.wait_until_believed(ALONE_S, within_s=1.0)
            assert "not hearing of changes" in caplog.text
        await replica.wait_until_believed(HEARD_S)
        assert Changed(everything=True) in replica.heard, "what was said meanwhile, nobody knows"


async def test_a_connection_that_is_dead_but_open_is_noticed_within_a_second(
    redis_url: str,
) -> None:
    """A proxy that swallows everything of the first connections, as a failed machine does."""
    upstream_port = int(redis_url.rsplit(":", 1)[1].split("/")[0])
    dead: set[asyncio.StreamWriter] = set()
    writers: list[asyncio.StreamWriter] = []

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if writer not in dead:
                writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", upstream_port)
        writers.extend((writer, up_writer))
        await asyncio.gather(carry(reader, up_writer), carry(up_reader, writer))

    port = free_port()
    server = await asyncio.start_server(serve, "127.0.0.1", port)
    async with replicas(f"redis://127.0.0.1:{port}/0", 1) as (replica,):
        await replica.wait_until_believed(HEARD_S)
        dead.update(writers)
        await replica.wait_until_believed(ALONE_S, within_s=1.0)
        await replica.wait_until_believed(HEARD_S)  # over a new one
    for writer in writers:
        writer.close()
    server.close()


async def test_what_could_not_be_told_is_told_when_redis_is_back(own_redis: OwnRedis) -> None:
    async with replicas(own_redis.url, 2) as (teller, other):
        for replica in (teller, other):
            await replica.wait_until_believed(HEARD_S)
        with own_redis.stopped():
            assert not await teller.announcer.tell(REVOKED)
            assert REVOKED in teller.heard
        await other.wait_for(REVOKED, within_s=10.0)


async def test_what_is_kept_for_later_has_an_end() -> None:
    replica = Replica(f"redis://127.0.0.1:{free_port()}/0")
    for number in range(UNTOLD_MAX + 1):
        assert not await replica.announcer.tell(Changed(keys=(str(number),)))
    assert replica.announcer._untold == [Changed(everything=True)]


async def test_a_message_of_a_newer_version_makes_everything_be_asked_again(
    redis_url: str,
) -> None:
    async with replicas(redis_url, 1) as (replica,):
        await replica.wait_until_believed(HEARD_S)
        for message in (b"\xff", b"[]", msgspec.json.encode({"keys": 1})):
            replica.heard.clear()
            assert replica.redis is not None
            await replica.redis.publish(CHANNEL, message)
            await replica.wait_for(Changed(everything=True), within_s=1.0)


async def test_f15_a_key_that_one_gateway_revokes_is_refused_by_all_within_a_second(
    redis_url: str, migrated_postgres_url: str, tmp_path: Path
) -> None:
    """Over the whole way: route, commit, Redis, cache, with a key that all of them have cached."""
    settings = msgspec.structs.replace(
        settings_for(tmp_path / "data", migrated_postgres_url), redis=Redis(url=Secret(redis_url))
    )
    apps = [create_app(settings, FakeEngine()) for _ in range(3)]
    async with client_of(apps[0]) as one, client_of(apps[1]) as two, client_of(apps[2]) as three:
        issued = await issue_key(settings)
        for app in apps:
            announcer = app.state.desk._announcer
            await until(partial(lambda a: a.believed_s == HEARD_S, announcer), 10)
        operator = await issue_key(settings, None)
        gateways = (one, two, three)
        for gateway in gateways:
            answer = await gateway.get("/v1/models", headers=bearer(issued))
            assert answer.status_code == 200
        path = f"/v1/admin/tenants/acme/keys/{issued.row.id}/revoke"
        answer = await one.post(path, headers=bearer(operator))
        assert answer.status_code == 200, answer.text
        began = time.monotonic()
        for gateway in gateways:
            while (await gateway.get("/v1/models", headers=bearer(issued))).status_code != 401:
                assert time.monotonic() - began < 1.0
                await asyncio.sleep(0.01)


async def test_f13_a_redis_that_is_away_is_logged_without_its_password(
    caplog: pytest.LogCaptureFixture,
) -> None:
    replica = Replica(f"redis://:planted-redis-password@127.0.0.1:{free_port()}/0")
    with caplog.at_level(logging.DEBUG):
        async with replica.announcer.running():
            assert not await replica.announcer.tell(REVOKED)
            await asyncio.sleep(0.3)
    assert "Redis is away" in caplog.text
    assert "planted-redis-password" not in caplog.text


def test_no_announcement_is_false() -> None:
    assert not Changed()
    assert all((REVOKED, Changed(tenants=("t",)), Changed(everything=True)))
