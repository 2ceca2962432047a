import asyncio
import hashlib
import hmac
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import select, update

from gateway.db import Database, now
from gateway.errors import InvalidRequest
from gateway.settings import Secret, Settings, Usage
from gateway.tenants import key_form
from gateway.tenants.keys import Principal
from gateway.tenants.limits.bounds import period_of
from gateway.tenants.usage import alerts, budgets, entries
from gateway.tenants.usage.alerts import Alerts
from gateway.tenants.usage.budgets import Terms
from gateway.tenants.usage.entries import Entry
from gateway.tenants.usage.tables import Budget, BudgetAlert
from gateway.tenants.usage.webhooks import SIGNATURE_HEADER, Webhooks, check_setting
from tests.tenants.usage.keeping import changing, make_principal

SECRET = Secret("a secret for webhooks only")


class Receiver:
    """An HTTP server that keeps what it gets, and answers as the test likes."""

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.answer: Callable[[], str] = lambda: "204 No Content"
        self.url = ""

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["Receiver"]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://localhost:{server.sockets[0].getsockname()[1]}/hook?a=b"
        async with server:
            yield self

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        headers[":line"] = first
        body = await reader.readexactly(int(headers["content-length"]))
        self.got.append((headers, body))
        writer.write(f"HTTP/1.1 {self.answer()}\r\ncontent-length: 0\r\n\r\n".encode())
        await writer.drain()
        writer.close()


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with Receiver().listening() as receiver:
        yield receiver


@pytest.fixture
async def replicas(database: Database) -> AsyncIterator[list[Alerts]]:
    """As several gateways have them."""
    webhooks = [Webhooks(SECRET, local=True) for _ in range(4)]
    yield [Alerts(database, one) for one in webhooks]
    for one in webhooks:
        await one.close()


async def budgeted(database: Database, url: str, *percents: int) -> Principal:
    principal = await make_principal(database)
    terms = Terms(1000, True, percents, url)
    async with changing(database) as change:
        await budgets.set_budget(change, principal.tenant_slug, "month", terms)
    return principal


async def spend(
    database: Database, principal: Principal, name: str, nanos: int, at: datetime | None = None
) -> list[Entry]:
    entry = Entry(name, principal.tenant_id, principal.key_id, "m", at or now(), cost_nanos=nanos)
    await entries.write(database, [entry])
    return [entry]


async def alerts_of(database: Database) -> dict[int, BudgetAlert]:
    async with database.session() as session:
        return {row.percent: row for row in await session.scalars(select(BudgetAlert))}


async def due_now(database: Database) -> None:
    async with database.session() as session:
        await session.execute(
            update(BudgetAlert)
            .where(BudgetAlert.next_try_at.is_not(None))
            .values(next_try_at=now())
        )


def test_a_period_begins_at_midnight_and_on_the_first_in_utc() -> None:
    moment = datetime(2026, 3, 31, 23, 59, 59, 999999, tzinfo=UTC)
    assert period_of("day", moment)[0] == datetime(2026, 3, 31, tzinfo=UTC)
    assert period_of("month", moment)[0] == datetime(2026, 3, 1, tzinfo=UTC)
    assert period_of("month", datetime(2026, 3, 1, tzinfo=UTC))[0] == datetime(
        2026, 3, 1, tzinfo=UTC
    )


async def test_each_threshold_is_alerted_of_once_however_many_gateways_look(
    database: Database, receiver: Receiver, replicas: list[Alerts]
) -> None:
    principal = await budgeted(database, receiver.url, 50, 80, 100)
    for number, nanos in enumerate((499, 1, 300, 500)):
        written = await spend(database, principal, f"r{number}", nanos)
        for _ in range(2):
            for one in replicas:
                one.written(written)
            await asyncio.gather(*(one.check() for one in replicas))
            await asyncio.gather(*(one.deliver() for one in replicas))
        spent = {body["percent"]: body["spent_nanos"] for body in bodies(receiver)}
        assert spent == [{}, {50: 500}, {50: 500, 80: 800}, {50: 500, 80: 800, 100: 1300}][number]
    assert len(receiver.got) == 3
    for row in (await alerts_of(database)).values():
        assert row.sent_at
        assert row.next_try_at is None


def bodies(receiver: Receiver) -> list[dict[str, Any]]:
    return [json.loads(body) for _, body in receiver.got]


async def test_a_message_is_signed_and_says_what_happened(
    database: Database, receiver: Receiver, replicas: list[Alerts]
) -> None:
    principal = await budgeted(database, receiver.url, 80)
    await spend(database, principal, "r", 900)
    await replicas[0].check()
    await replicas[0].deliver()
    ((headers, body),) = receiver.got
    told = json.loads(body)
    assert told.pop("id")
    assert abs(told.pop("created_at") - time.time()) < 60
    async with database.session() as session:
        (budget,) = await session.scalars(select(Budget))
    assert told == {
        "type": "budget.alert",
        "tenant": "acme",
        "budget_id": budget.id,
        "owner": f"tenant:{principal.tenant_id}",
        "period": "month",
        "period_start": int(period_of("month", now())[0].timestamp()),
        "percent": 80,
        "amount_nanos": 1000,
        "spent_nanos": 900,
    }
    assert headers[":line"] == "POST /hook?a=b HTTP/1.1"
    assert headers["host"].startswith("localhost:")
    assert headers["content-type"] == "application/json"
    stamp, seal = headers[SIGNATURE_HEADER.lower()].split(",")
    seconds = stamp.removeprefix("t=")
    assert abs(int(seconds) - time.time()) < 60
    expected = hmac.new(
        SECRET.reveal().encode(), seconds.encode() + b"." + body, hashlib.sha256
    ).hexdigest()
    assert seal == f"v1={expected}"


async def test_a_delivery_that_fails_is_tried_again_later_and_not_for_ever(
    database: Database, receiver: Receiver, replicas: list[Alerts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerts, "TRIES_MAX", 4)
    await spend(database, await budgeted(database, receiver.url, 80), "r", 900)
    await replicas[0].check()
    # a redirect is not followed: nobody checked where it leads
    answers = iter(["500 Oops", f"307 There\r\nlocation: {receiver.url}", "404 No", "410 Gone"])
    receiver.answer = lambda: next(answers)
    for tries in (1, 2, 3, 4):
        before = now()
        for _ in range(2):  # it is not due again at once
            await replicas[0].deliver()
        assert len(receiver.got) == tries
        (alert,) = (await alerts_of(database)).values()
        assert (alert.tries, alert.sent_at) == (tries, None)
        if tries < 4:
            assert alert.next_try_at is not None
            least = timedelta(seconds=0.5 * 5 * 2 ** (tries - 1))
            assert before + least <= alert.next_try_at <= now() + 3 * least
        else:
            assert alert.next_try_at is None
        await due_now(database)
    assert len({body["id"] for body in bodies(receiver)}) == 1


async def test_a_delivery_of_a_gateway_that_died_is_taken_over(
    database: Database, receiver: Receiver, replicas: list[Alerts], monkeypatch: pytest.MonkeyPatch
) -> None:
    await spend(database, await budgeted(database, receiver.url, 80), "r", 900)
    await replicas[0].check()
    claimed, held = asyncio.Event(), asyncio.Event()

    async def hang(*_: object) -> str:
        claimed.set()
        await held.wait()
        return ""

    monkeypatch.setattr(replicas[0]._webhooks, "send", hang)
    dying = asyncio.create_task(replicas[0].deliver())
    await claimed.wait()
    await replicas[1].deliver()
    assert receiver.got == []  # another has it
    dying.cancel()
    await asyncio.wait([dying])
    await due_now(database)  # the claim's time has come
    await replicas[1].deliver()
    assert len(receiver.got) == 1


async def test_what_was_spent_in_another_period_or_by_others_does_not_count(
    database: Database, receiver: Receiver, replicas: list[Alerts]
) -> None:
    principal = await budgeted(database, receiver.url, 80)
    other = await make_principal(database, "other")
    await spend(database, other, "r1", 900)
    last_month = period_of("month", now())[0] - timedelta(seconds=1)
    await spend(database, principal, "r2", 900, last_month)
    await replicas[0].check()
    assert await alerts_of(database) == {}


async def test_a_budget_that_is_set_anew_alerts_anew(
    database: Database, receiver: Receiver, replicas: list[Alerts]
) -> None:
    principal = await budgeted(database, "", 80)
    await spend(database, principal, "r", 900)
    await replicas[0].check()
    ((alert),) = (await alerts_of(database)).values()
    assert alert.next_try_at is None  # nobody wants it
    async with changing(database) as change:
        terms = Terms(900, True, (80,), receiver.url)
        await budgets.set_budget(change, principal.tenant_slug, "month", terms)
    await replicas[1].check()
    await replicas[1].deliver()
    assert [body["amount_nanos"] for body in bodies(receiver)] == [900]


async def test_a_name_that_comes_to_mean_this_machine_gets_nothing(receiver: Receiver) -> None:
    webhooks = Webhooks(SECRET, local=False)
    assert "this machine" in await webhooks.send(receiver.url, b"{}", 1)
    assert receiver.got == []
    await webhooks.close()


async def test_name_servers_that_hang_take_no_threads_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer.wait(10) and [])
    webhooks = Webhooks(SECRET, local=False)
    sending = [
        asyncio.create_task(webhooks.send("https://hooks.example/", b"{}", 1))
        for _ in range(50)  # more than the default executor has threads
    ]
    await asyncio.sleep(0.05)
    try:
        async with asyncio.timeout(5):
            await asyncio.to_thread(int)
    finally:
        answer.set()
        await asyncio.wait(sending)
        await webhooks.close()


async def test_f13_a_webhook_holds_no_key_of_ours() -> None:
    key = key_form.make().text.reveal()
    settings = Settings(usage=Usage(webhook_secret=SECRET))
    with pytest.raises(InvalidRequest, match="API key"):
        await check_setting(f"https://192.0.2.1/?key={key}", settings)


async def test_a_receiver_that_is_not_there_is_a_reason_and_no_error(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    webhooks = Webhooks(SECRET, local=True)
    assert "ConnectError" in await webhooks.send("http://127.0.0.1:9/", b"{}", 1)
    assert "is not set" in await Webhooks(Secret(""), local=True).send(receiver.url, b"{}", 1)
    await webhooks.close()


async def test_alerts_go_out_by_themselves(
    database: Database, receiver: Receiver, replicas: list[Alerts]
) -> None:
    principal = await budgeted(database, receiver.url, 80)
    async with replicas[0].running():
        await asyncio.sleep(0.1)
        replicas[0].written(await spend(database, principal, "r", 900))
        async with asyncio.timeout(10):
            while not receiver.got:  # noqa: ASYNC110  (nothing tells of it)
                await asyncio.sleep(0.02)


async def test_an_address_of_this_machine_is_refused_whichever_network_it_is_in() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing, but chooses where from
        except OSError:
            pytest.skip("this machine is in no network")
        address = probe.getsockname()[0]
    webhooks = Webhooks(SECRET, local=False)
    assert "this machine" in await webhooks.send(f"http://{address}:9/", b"{}", 1)
    await webhooks.close()
