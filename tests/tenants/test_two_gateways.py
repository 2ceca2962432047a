"""Two whole gateways on one PostgreSQL and one Redis: what is done at one holds at the other, and
what a request asks of both stores."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import redis
from litestar import Litestar
from sqlalchemy import Engine, event

from gateway.app import create_app
from gateway.settings import Keys, Redis, Secret
from gateway.tenants import key_form
from gateway.tenants.limits.counting import TRANCHE
from tests.fakes import FakeEngine, Script, byte_tokenizer_folder, model_info
from tests.serving import client_of, settings_for

BASE = "smollm2-135m-instruct"
SOON_S = 1.0
"""In which a change reaches every gateway."""


@dataclass
class Pair:
    apps: list[Litestar]
    clients: list[httpx.AsyncClient]
    admin: dict[str, str]
    redis_url: str

    async def manage(self, method: str, path: str, **body: Any) -> Any:
        """As the operator, at the first gateway."""
        answer = await self.clients[0].request(
            method, f"/v1/admin{path}", headers=self.admin, json=body
        )
        assert answer.status_code < 300, answer.text
        return answer.json()

    async def tenant(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Its key, and the header with it."""
        await self.manage("POST", "/tenants", slug="acme")
        key = await self.manage("POST", "/tenants/acme/keys")
        return key, {"authorization": f"Bearer {key['value']}"}

    async def ask(self, at: int, key: dict[str, str], **changes: Any) -> httpx.Response:
        body = {"model": BASE, "prompt": "hi", "max_tokens": 8} | changes
        return await self.clients[at].post("/v1/completions", headers=key, json=body)

    async def statuses(self, key: dict[str, str]) -> list[int]:
        """Of one request at each, once they must have heard of a change."""
        await asyncio.sleep(SOON_S)
        return [(await self.ask(at, key)).status_code for at in (1, 0)]


@pytest.fixture
async def pair(tmp_path: Path, migrated_postgres_url: str, redis_url: str) -> AsyncIterator[Pair]:
    admin = key_form.make("admin").text.reveal()
    apps = []
    for name in "ab":
        settings = msgspec.structs.replace(
            settings_for(tmp_path / name, migrated_postgres_url),
            redis=Redis(url=Secret(redis_url)),
            keys=Keys(admin=Secret(admin), pepper=Secret("p" * 40)),
        )
        engine = FakeEngine(
            model_info(byte_tokenizer_folder(tmp_path / f"model-{name}")),
            script=lambda request: Script([[65]] * request.max_tokens),
        )
        apps.append(create_app(settings, engine))
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(client_of(app)) for app in apps]
        yield Pair(apps, clients, {"authorization": f"Bearer {admin}"}, redis_url)


async def test_what_is_set_at_one_gateway_holds_at_both(pair: Pair) -> None:
    key, header = await pair.tenant()
    assert await pair.statuses(header) == [200, 200]
    limits = f"/tenants/acme/keys/{key['id']}/limits"
    await pair.manage("PATCH", limits, request_tokens_max=1)
    assert await pair.statuses(header) == [400, 400]
    await pair.manage("PATCH", limits, request_tokens_max=None)
    budget = await pair.manage(
        "PUT", "/tenants/acme/budgets", period="day", amount_nanos=0, key=key["id"]
    )
    assert await pair.statuses(header) == [429, 429]
    await pair.manage("DELETE", f"/tenants/acme/budgets/{budget['id']}")
    assert await pair.statuses(header) == [200, 200]
    await pair.manage("POST", "/tenants/acme/suspend")
    assert await pair.statuses(header) == [403, 403]
    await pair.manage("POST", "/tenants/acme/activate")
    assert await pair.statuses(header) == [200, 200]


async def test_both_gateways_spend_one_budget_at_the_price_that_was_set(pair: Pair) -> None:
    _, header = await pair.tenant()
    # 1000 nanos a token of the answer
    await pair.manage("POST", "/prices", model=BASE, input_micros=0, output_micros=10**6)
    for app in pair.apps:
        await app.state.meter.prices.refresh()
    await pair.manage("PUT", "/tenants/acme/budgets", period="month", amount_nanos=20_000)
    await asyncio.sleep(SOON_S)
    answers = [await pair.ask(at, header) for at in (0, 1, 0, 1)]
    assert [answer.status_code for answer in answers] == [200, 200, 429, 429]
    assert answers[2].json()["error"]["code"] == "insufficient_quota"
    assert (await pair.ask(1, header, max_tokens=4)).status_code == 200  # all that is left
    assert (await pair.ask(0, header, max_tokens=1)).status_code == 429
    for app in pair.apps:
        await app.state.meter.ledger.flush()
    (row,) = (await pair.manage("GET", "/usage?tenant=acme"))["data"]
    assert (row["requests"], row["completion_tokens"], row["cost_nanos"]) == (3, 20, 20_000)


@contextmanager
def statements() -> Iterator[list[str]]:
    """What is asked of the database in here."""
    seen: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        seen.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(Engine, "before_cursor_execute", note)


@pytest.mark.parametrize(("tokens", "scripts"), [(1, 2), (TRANCHE, 2), (2 * TRANCHE, 3)])
async def test_a_request_is_two_scripts_and_no_look_at_its_key(
    pair: Pair, tokens: int, scripts: int
) -> None:
    key, header = await pair.tenant()
    limits = {"requests_per_minute": 10**4, "tokens_per_minute": 10**6, "concurrent_requests": 10}
    await pair.manage("PATCH", "/tenants/acme/limits", **limits)
    await pair.manage("PATCH", f"/tenants/acme/keys/{key['id']}/limits", requests_per_minute=10**4)
    for owner in ({}, {"key": key["id"]}):
        terms = {"period": "month", "amount_nanos": 10**12} | owner
        await pair.manage("PUT", "/tenants/acme/budgets", **terms)
    await asyncio.sleep(SOON_S)
    await pair.ask(0, header)  # it looks at the key and at what was spent
    with redis.Redis.from_url(pair.redis_url) as client, statements() as asked:
        before = client.info("commandstats")["cmdstat_evalsha"]["calls"]
        for _ in range(10):
            assert (await pair.ask(0, header, max_tokens=tokens)).status_code == 200
        after = client.info("commandstats")["cmdstat_evalsha"]["calls"]
    assert after - before == 10 * scripts
    assert not [one for one in asked if "api_keys" in one and one.startswith("SELECT")]
