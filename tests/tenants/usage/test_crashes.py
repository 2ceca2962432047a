"""A gateway that is killed, and a database that goes away, while requests run."""

import asyncio
import json
import socket
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx

from gateway.app import create_app
from gateway.db import Database, async_url
from gateway.tenants.usage.ledger import FLUSH_EVERY_S
from tests.databases import OwnPostgres, Postgres
from tests.fakes import FakeEngine, Script, byte_tokenizer_folder, model_info
from tests.serving import bearer, client_of, issue_key, settings_for
from tests.tenants.usage.gateway_process import STEP_S
from tests.tenants.usage.keeping import rows_of, until

BASE = "smollm2-135m-instruct"
STREAMS = 40
SLACK_S = 1.0
"""For what a busy machine needs beyond an interval: the sync to disk, the way of a token."""


@asynccontextmanager
async def gateway(tmp_path: Path, url: str) -> AsyncIterator[tuple[Process, str]]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.set_inheritable(True)
        descriptor = listener.fileno()
        module = "tests.tenants.usage.gateway_process"
        arguments = [str(tmp_path / "data"), str(tmp_path / "model"), url, str(descriptor)]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, *arguments, pass_fds=[descriptor]
        )
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        async with httpx.AsyncClient(base_url=address, timeout=60) as client:
            response = await client.get("/health/ready")  # held until it listens
            assert response.status_code == 200
        yield process, address
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def read(client: httpx.AsyncClient, received: dict[str, list[float]]) -> None:
    """Note when each token came, by the request's id; until the end, or the gateway's."""
    body = {"model": BASE, "prompt": "hi", "max_tokens": 2000, "stream": True}
    with suppress(httpx.HTTPError):
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    frame = json.loads(line.removeprefix("data: "))
                    received.setdefault(frame["id"], []).append(time.monotonic())


async def test_f8_a_killed_gateway_loses_one_interval_at_most_and_counts_nothing_twice(
    migrated_url: str, tmp_path: Path
) -> None:
    settings = settings_for(tmp_path / "data", migrated_url)
    received: dict[str, list[float]] = {}
    async with gateway(tmp_path, migrated_url) as (process, address):
        headers = bearer(await issue_key(settings))
        async with httpx.AsyncClient(base_url=address, headers=headers, timeout=60) as client:
            reading = [asyncio.create_task(read(client, received)) for _ in range(STREAMS)]
            await until(lambda: len(received) == STREAMS)
            await asyncio.sleep(2.6 * FLUSH_EVERY_S)
            process.kill()
            killed = time.monotonic()
            await asyncio.wait(reading)
    database = Database(async_url(migrated_url, settings.data_dir))
    try:
        recorded = []
        for _ in range(2):  # what the journal had left comes in once
            async with gateway(tmp_path, migrated_url):
                await asyncio.sleep(0.5)
            recorded.append({row.request_id: row for row in await rows_of(database)})
    finally:
        await database.close()
    first, second = recorded
    assert first.keys() == second.keys() == received.keys()
    for name, moments in received.items():
        row = first[name]
        assert row.completion_tokens == second[name].completion_tokens
        assert row.finish_reason is None
        on_the_way = SLACK_S / STEP_S
        assert row.completion_tokens <= len(moments) + on_the_way
        safe = sum(moment < killed - FLUSH_EVERY_S - SLACK_S for moment in moments)
        assert row.completion_tokens >= safe > 0
        assert row.prompt_tokens == 2


async def test_f16_while_postgresql_is_away_known_keys_go_on_and_all_usage_comes_in(
    migrated_postgres_url: str, postgres_server: Postgres, tmp_path: Path
) -> None:
    assert isinstance(postgres_server, OwnPostgres)
    settings = settings_for(tmp_path / "data", migrated_postgres_url)
    engine = FakeEngine(
        model_info(byte_tokenizer_folder(tmp_path / "model")),
        script=lambda _: Script([[65]] * 20, delay_s=0.01),
    )
    statuses: list[int] = []
    app = create_app(settings, engine)
    async with client_of(app) as client:
        client.headers = httpx.Headers(bearer(await issue_key(settings)))
        over = asyncio.Event()

        async def ask_again_and_again() -> None:
            body = {"model": BASE, "prompt": "hi", "max_tokens": 50}
            while not over.is_set():
                response = await client.post("/v1/completions", json=body)
                statuses.append(response.status_code)
                await asyncio.sleep(0.05)

        asking = [asyncio.create_task(ask_again_and_again()) for _ in range(20)]
        await asyncio.sleep(1.5)
        await asyncio.to_thread(postgres_server.stop)
        before = len(engine.produced)
        await asyncio.sleep(1.5)
        assert len(engine.produced) > before  # known keys went on
        await asyncio.sleep(3.0)
        await asyncio.to_thread(postgres_server.start)
        await asyncio.sleep(1.5)
        over.set()
        await asyncio.gather(*asking)
        assert set(statuses) == {200}
        await app.state.meter.ledger.flush()
        database = Database(async_url(migrated_postgres_url, settings.data_dir))
        rows = {row.request_id: row.completion_tokens for row in await rows_of(database)}
        await database.close()
    assert rows == engine.produced
    assert set(rows.values()) == {20}
