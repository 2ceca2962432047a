"""What requests use, from the engine to the ledger, on every way that an answer can end."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select, update

from gateway.adapters.store import AdapterStore
from gateway.app import create_app
from gateway.db import Database, async_url
from gateway.engine.client import Engine
from gateway.engine.messages import EngineSettings, Sampling
from gateway.engine.process import ProcessEngine
from gateway.inference.ask import Ask
from gateway.inference.generation import Answer, Walk
from gateway.inference.tokenizers import TokenizerSource
from gateway.settings import Settings
from gateway.tenants.keys import Principal
from gateway.tenants.limits.counting import CountingLimiter
from gateway.tenants.limits.local import LocalCounters
from gateway.tenants.tables import Tenant
from gateway.tenants.usage.entries import Spending
from gateway.tenants.usage.meter import Meter
from gateway.tenants.usage.tables import Budget, Price, UsageEntry
from tests.engine.tiny import CONFIGS, save_model
from tests.fakes import FakeEngine, Script, byte_tokenizer_folder, model_info, says
from tests.serving import bearer, client_of, issue_key, settings_for
from tests.tenants.usage.keeping import make_principal, rows_of, until
from tests.tenants.usage.stepping import SteppingEngine

BASE = "smollm2-135m-instruct"


@dataclass
class Served:
    client: httpx.AsyncClient
    engine: FakeEngine
    meter: Meter
    database: Database
    settings: Settings

    async def complete(self, **changes: Any) -> httpx.Response:
        body = {"model": BASE, "prompt": "hi", "max_tokens": 50} | changes
        return await self.client.post("/v1/completions", json=body)

    async def rows(self) -> dict[str, UsageEntry]:
        await asyncio.sleep(0)  # what was cancelled is acknowledged
        await self.meter.ledger.flush()
        return {row.request_id: row for row in await rows_of(self.database)}


@pytest.fixture
async def served(tmp_path: Path, migrated_url: str) -> AsyncIterator[Served]:
    settings = settings_for(tmp_path / "data", migrated_url)
    engine = FakeEngine(model_info(byte_tokenizer_folder(tmp_path / "model")))
    app = create_app(settings, engine)
    database = Database(async_url(migrated_url, settings.data_dir))
    async with client_of(app) as client:
        client.headers = httpx.Headers(bearer(await issue_key(settings)))
        yield Served(client, engine, app.state.meter, database, settings)
    await database.close()


@pytest.mark.parametrize("include_usage", [None, False, True])
async def test_f11_a_stream_is_metered_whatever_its_client_asks_to_be_told(
    include_usage: bool | None, served: Served
) -> None:
    options = {} if include_usage is None else {"stream_options": {"include_usage": include_usage}}
    response = await served.complete(stream=True, **options)
    assert ('"usage":{' in response.text) == bool(include_usage)
    (row,) = (await served.rows()).values()
    (produced,) = served.engine.produced.values()
    assert (row.completion_tokens, row.prompt_tokens) == (produced, 2)
    assert row.finish_reason == "stop"


async def test_an_answer_that_ends_at_a_stop_string_counts_what_the_engine_produced(
    served: Served,
) -> None:
    served.engine.script = lambda _: says("Hello world, and more", per_step=3)
    response = await served.complete(stop="world")
    assert response.json()["choices"][0]["text"] == "Hello "
    (row,) = (await served.rows()).values()
    # 12 tokens until the stop string was there, and the step that had begun then
    assert row.completion_tokens == 15 == served.engine.produced[row.request_id]
    assert row.finish_reason == "stop"


@pytest.mark.parametrize("stop", [None, "world"])
async def test_a_budget_is_charged_what_the_ledger_says_however_the_answer_ends(
    served: Served, stop: str | None
) -> None:
    async with served.database.session() as session:
        tenant = (await session.scalars(select(Tenant))).one()
        session.add(
            Price(model="*", input_micros=10**6, cached_input_micros=0, output_micros=10**6)
        )
        session.add(
            Budget(
                tenant_id=tenant.id,
                owner=f"tenant:{tenant.id}",
                period="month",
                amount_nanos=160_000,
            )
        )
    await served.meter.prices.refresh()
    served.engine.script = lambda _: says("Hello world!", per_step=3, cached_tokens=99)
    for _ in range(4):  # each costs 13 tokens, for which 112 are held at first
        response = await served.complete(prompt="x" * 100, max_tokens=12, stop=stop)
        assert response.status_code == 200, response.text
    rows = (await served.rows()).values()
    assert [row.cost_nanos for row in rows] == [13_000] * 4
    assert (await served.complete(prompt="x" * 100, max_tokens=12)).status_code == 429


async def test_f8_a_client_that_leaves_pays_for_what_was_produced(served: Served) -> None:
    served.engine.script = lambda _: Script([[65]] * 100, delay_s=0.01)
    asking = asyncio.create_task(served.complete(max_tokens=100))
    await until(lambda: bool(served.engine.produced))
    asking.cancel()
    await asyncio.wait([asking])
    await until(lambda: bool(served.engine.cancels))
    (row,) = (await served.rows()).values()
    assert 0 < row.completion_tokens == served.engine.produced[row.request_id] < 100
    assert (row.prompt_tokens, row.finish_reason) == (2, "cancelled")


async def test_an_engine_that_fails_on_the_way_leaves_what_it_had_produced(
    served: Served,
) -> None:
    served.engine.script = lambda _: Script([[65, 66]], failure=("engine_lost", "planned"))
    assert (await served.complete()).status_code == 503
    served.engine.script = lambda _: Script(failure=("overloaded", "planned"))
    assert (await served.complete()).status_code == 503
    (row,) = (await served.rows()).values()
    assert (row.prompt_tokens, row.completion_tokens, row.finish_reason) == (2, 2, "failed")


async def test_the_tenants_weight_reaches_the_engine(served: Served) -> None:
    async with served.database.session() as session:
        await session.execute(update(Tenant).values(weight=2.5))
    assert (await served.complete()).status_code == 200
    (submit,) = served.engine.submits
    assert submit.fairness_weight == 2.5
    (row,) = (await served.rows()).values()
    assert submit.fairness_key == row.tenant_id


# --- many at once ---------------------------------------------------------------------------------


@asynccontextmanager
async def walking(
    engine: Engine, settings: Settings, database: Database, principal: Principal
) -> AsyncIterator[tuple[Walk, Meter]]:
    """Requests without HTTP around them, from the key's principal to the ledger."""
    meter = Meter(settings, database)
    tokenizers = TokenizerSource(engine)
    store = AdapterStore(settings.data_dir / "adapters")
    async with meter.running():
        await engine.start()
        await asyncio.wait_for(engine.wait_ready(), 60)
        try:
            limiter = CountingLimiter(LocalCounters(), Spending(database))
            walk = Walk(principal, settings, engine, database, store, tokenizers, limiter, meter)
            yield walk, meter
        finally:
            await engine.close()


def ask(model: str, prompt_tokens: int, max_tokens: int) -> Ask:
    return Ask(
        model=model,
        prompt=[65 + place % 60 for place in range(prompt_tokens)],
        prompt_param="prompt",
        sampling=Sampling(temperature=0),
        stop=(),
        ignore_eos=True,
        max_tokens=max_tokens,
        max_tokens_default=None,
        id_prefix="cmpl-",
    )


async def pieces(answer: Answer) -> AsyncGenerator[object, None]:
    async for event in answer:
        yield event


async def read_for_a_while(walk: Walk, asked: Ask, chance: random.Random) -> None:
    """Some read to the end, some stop reading, some are torn away in the middle of a wait."""
    kind = chance.choice(["end", "leave", "torn", "torn"])
    assert asked.max_tokens is not None
    most = chance.randint(0, asked.max_tokens)

    submitted = asyncio.Event()

    async def read() -> None:
        async with walk.answer(asked) as answer, aclosing(pieces(answer)) as events:
            submitted.set()
            read = 0
            async for _ in events:
                read += 1
                if kind == "leave" and read > most:
                    return

    reading = asyncio.create_task(read())
    if kind == "torn":
        await submitted.wait()
        await asyncio.sleep(chance.random() * asked.max_tokens * 0.012)
        reading.cancel()
    await asyncio.wait([reading])
    if not reading.cancelled():
        reading.result()


async def test_f8_of_1000_streams_cut_at_random_the_ledger_has_each_token_once(
    database: Database, tmp_path: Path
) -> None:
    chance = random.Random(8)
    info = model_info(byte_tokenizer_folder(tmp_path / "model"))
    engine = SteppingEngine(info, step_s=0.005, chance=chance)
    principal = await make_principal(database)
    settings = settings_for(tmp_path / "data")
    async with walking(engine, settings, database, principal) as (walk, meter):
        async with asyncio.TaskGroup() as group:
            for _ in range(1000):
                asked = ask(info.name, chance.randint(1, 9), chance.randint(1, 40))
                group.create_task(read_for_a_while(walk, asked, chance))
        await until(lambda: not engine.in_flight)
        await meter.ledger.flush()
    rows = {row.request_id: row for row in await rows_of(database)}
    assert {name: row.completion_tokens for name, row in rows.items()} == engine.produced
    assert {name: row.prompt_tokens for name, row in rows.items()} == engine.prompts
    reasons = [row.finish_reason for row in rows.values()]
    assert len(reasons) == 1000
    assert reasons.count("cancelled") > 200 < reasons.count("length")


async def test_f8_f10_of_streams_cut_at_random_the_real_engine_and_the_ledger_say_the_same(
    database: Database, tmp_path: Path
) -> None:
    chance = random.Random(10)
    folder = tmp_path / "model"
    save_model(CONFIGS["llama"], byte_tokenizer_folder(folder))
    engine = ProcessEngine(
        EngineSettings(model=str(folder), name="tiny", pool_mib=2, block_tokens=4, threads=1)
    )
    principal = await make_principal(database)
    settings = settings_for(tmp_path / "data")
    async with walking(engine, settings, database, principal) as (walk, meter):
        async with asyncio.TaskGroup() as group:
            for _ in range(60):
                asked = ask("tiny", chance.randint(1, 300), chance.randint(1, 60))
                group.create_task(read_for_a_while(walk, asked, chance))
        await until(lambda: not engine._mailbox.in_flight)
        await meter.ledger.flush()
        stats = await engine.stats()
        assert (stats.running, stats.waiting, stats.pages_kv) == (0, 0, 0)
    rows = await rows_of(database)
    # the engine's own sum: each request's first token comes with its prompt
    begun = [row for row in rows if row.completion_tokens]
    assert sum(row.completion_tokens for row in rows) == stats.decode_tokens + len(begun)
    assert sum(row.prompt_tokens - row.cached_tokens for row in rows) == stats.prefill_tokens
    assert {row.finish_reason for row in rows} == {"cancelled", "length"}
