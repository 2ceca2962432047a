"""Usage, prices and budgets as clients and operators see them."""

import base64
import csv
import io
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from sqlalchemy import select

from gateway.app import create_app
from gateway.db import Database, async_url
from gateway.settings import Secret, Settings, Usage
from gateway.tenants.usage import entries, export, report
from gateway.tenants.usage.entries import Entry
from tests.databases import Postgres, stopped
from tests.fakes import FakeEngine
from tests.live import error_of
from tests.serving import bearer, client_of, issue_key, settings_for
from tests.tenants.usage.keeping import make_principal

DAY = datetime(2026, 1, 31, 12, tzinfo=UTC)
ADAPTER = "ad" * 32


@dataclass
class Office:
    client: httpx.AsyncClient
    database: Database
    settings: Settings
    tenants: dict[str, str]
    keys: dict[str, dict[str, str]]
    """Headers by who sends them."""

    async def get(self, path: str, who: str = "acme", **params: Any) -> Any:
        response = await self.client.get(path, params=params, headers=self.keys[who])
        assert response.status_code == 200, response.text
        return response.json()

    async def refused(self, status: int, path: str, who: str = "acme", **params: Any) -> str:
        response = await self.client.get(path, params=params, headers=self.keys[who])
        return str(error_of(response, status)["message"])


@pytest.fixture
async def office(tmp_path: Path, migrated_url: str) -> AsyncIterator[Office]:
    usage = Usage(webhook_secret=Secret("s" * 32))
    settings = msgspec.structs.replace(settings_for(tmp_path / "data", migrated_url), usage=usage)
    database = Database(async_url(migrated_url, settings.data_dir))
    async with client_of(create_app(settings, FakeEngine())) as client:
        issued = {
            "acme": await issue_key(settings),
            "rival": await issue_key(settings, "rival"),
            "caller": await issue_key(settings, "acme", ("inference",)),
            "operator": await issue_key(settings, None, ("admin",)),
        }
        yield Office(
            client,
            database,
            settings,
            {name: key.row.tenant_id or "" for name, key in issued.items()},
            {name: bearer(key) for name, key in issued.items()},
        )
    await database.close()


async def use(office: Office, name: str, tenant: str = "acme", **more: Any) -> None:
    given: dict[str, Any] = {
        "key_id": "k1",
        "model": "base",
        "started_at": DAY,
        "prompt_tokens": 10,
    }
    given |= {"cached_tokens": 4, "completion_tokens": 5, "cost_nanos": 100} | more
    entry = Entry(request_id=name, tenant_id=office.tenants[tenant], **given)
    await entries.write(office.database, [entry])


async def use_some(office: Office) -> None:
    for number in range(6):
        await use(
            office,
            f"r{number}",
            key_id=f"k{number % 2}",
            model="support" if number % 3 == 0 else "base",
            adapter_digest=ADAPTER if number % 3 == 0 else None,
            started_at=DAY + timedelta(hours=6 * number),
        )
    await use(office, "other", "rival", cost_nanos=7)


async def test_usage_without_groups_is_one_sum_of_the_own_tenant(office: Office) -> None:
    await use_some(office)
    assert await office.get("/v1/usage") == {
        "object": "list",
        "data": [
            {
                "object": "usage",
                "requests": 6,
                "prompt_tokens": 60,
                "cached_tokens": 24,
                "completion_tokens": 30,
                "cost_nanos": 600,
            }
        ],
        "has_more": False,
        "next": None,
    }
    (rival,) = (await office.get("/v1/usage", "rival"))["data"]
    assert (rival["requests"], rival["cost_nanos"]) == (1, 7)


async def test_usage_is_grouped_by_any_of_day_key_model_and_adapter(office: Office) -> None:
    await use_some(office)

    async def sums(group_by: str, *names: str) -> dict[Any, int]:
        page = await office.get("/v1/usage", group_by=group_by)
        return {tuple(row.get(name) for name in names): row["requests"] for row in page["data"]}

    assert await sums("day", "day") == {("2026-01-31",): 2, ("2026-02-01",): 4}
    assert await sums("key", "key_id") == {("k0",): 3, ("k1",): 3}
    assert await sums("model", "model") == {("base",): 4, ("support",): 2}
    assert await sums("adapter", "adapter_digest") == {(None,): 4, (ADAPTER,): 2}
    assert await sums("day,key", "day", "key_id") == {
        ("2026-01-31", "k0"): 1,
        ("2026-01-31", "k1"): 1,
        ("2026-02-01", "k0"): 2,
        ("2026-02-01", "k1"): 2,
    }


@pytest.mark.parametrize("group_by", ["day,key,model,adapter", "request"])
async def test_pages_have_every_row_once(group_by: str, office: Office) -> None:
    await use_some(office)
    whole = (await office.get("/v1/usage", group_by=group_by))["data"]
    assert len(whole) == 6 if group_by == "request" else 5
    rows: list[Any] = []
    page = await office.get("/v1/usage", group_by=group_by, limit=2)
    rows += page["data"]
    while page["has_more"]:
        page = await office.get("/v1/usage", group_by=group_by, limit=2, after=page["next"])
        rows += page["data"]
    assert rows == whole


async def test_a_period_has_its_start_and_not_its_end(office: Office) -> None:
    await use_some(office)

    async def count(start: object, end: object) -> int:
        (row,) = (await office.get("/v1/usage", start=start, end=end))["data"]
        return int(row["requests"])

    noon, evening = DAY, DAY + timedelta(hours=6)
    assert await count(noon.isoformat(), evening.isoformat()) == 1
    assert await count(int(noon.timestamp()), int(evening.timestamp()) + 1) == 2
    assert await count("2026-02-01", "2026-02-02") == 4
    assert await count("2026-01-31T13:00:00+01:00", "2026-01-31T14:00:00+01:00") == 1
    assert await count("2027-01-01", "2028-01-01") == 0


async def test_csv_and_json_lines_have_all_rows(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "PAGE_MAX", 4)
    await use_some(office)
    for group_by, count in (("request", 6), ("day,key", 4), ("", 1)):
        params = {"group_by": group_by, "format": "jsonl"}
        response = await office.client.get("/v1/usage", params=params, headers=office.keys["acme"])
        assert response.headers["content-type"] == "application/jsonl"
        lines = [json.loads(line) for line in response.text.splitlines()]
        assert len(lines) == count
        params["format"] = "csv"
        response = await office.client.get("/v1/usage", params=params, headers=office.keys["acme"])
        assert response.headers["content-type"] == "text/csv; charset=utf-8"
        table = list(csv.DictReader(io.StringIO(response.text)))
        assert len(table) == count
        for line, row in zip(lines, table, strict=True):
            for name, cell in row.items():
                assert cell == str(line.get(name, "" if name != "requests" else 1)), name


REFUSED_QUESTIONS: list[tuple[dict[str, Any], str]] = [
    ({"group_by": "tenant"}, "cannot be grouped by 'tenant'"),
    ({"group_by": "day,nonsense"}, "'nonsense'"),
    ({"group_by": "request,day"}, "alone"),
    ({"start": "yesterday"}, "`start`"),
    ({"end": "9" * 30}, "`end`"),
    ({"end": "0001-01-01T00:00:00+10:00"}, "`end`"),
    ({"limit": 0}, "limit"),
    ({"limit": 1001}, "limit"),
    ({"after": "nonsense"}, "`after`"),
    ({"after": "AAAA"}, "`after`"),
    ({"format": "xml"}, "format"),
]


async def test_a_question_that_cannot_be_answered_says_why(office: Office) -> None:
    for params, message in REFUSED_QUESTIONS:
        assert message in await office.refused(400, "/v1/usage", **params), params


async def test_a_page_of_another_question_is_refused(office: Office) -> None:
    await use_some(office)
    page = await office.get("/v1/usage", group_by="key", limit=1)
    assert "`after`" in await office.refused(400, "/v1/usage", group_by="day", after=page["next"])


def made_up(group_by: str, last: list[str], **changes: Any) -> str:
    """An `after` that a client has written by itself."""
    groups = [group_by] if group_by else []
    told = {"groups": groups, "start": None, "end": "2026-12-31T00:00:00Z", "last": last}
    return base64.urlsafe_b64encode(json.dumps(told | changes).encode()).decode()


BEFORE_ALL, AFTER_ALL = "0001-01-01T00:00:00+05:00", "9999-12-31T23:59:59-05:00"
MADE_UP = [
    ("", made_up("", [])),  # one sum has no second page
    ("day", made_up("day", ["2026-01-31"], end="2026-12-31T00:00:00")),
    ("day", made_up("day", ["2026-01-31"], start="2026-01-01T00:00:00")),
    ("day", made_up("day", ["2026-01-31"], start=BEFORE_ALL)),
    ("day", made_up("day", ["2026-01-31"], end=AFTER_ALL)),
    ("day", made_up("day", ["\0"])),
    ("day", made_up("day", [])),
    ("request", made_up("request", [BEFORE_ALL, "x"])),
    ("request", made_up("request", [AFTER_ALL, "x"])),
    ("request", made_up("request", ["x", "x"])),
]


@pytest.mark.parametrize(("group_by", "after"), MADE_UP)
async def test_a_page_that_nobody_gave_is_refused(
    office: Office, group_by: str, after: str
) -> None:
    message = await office.refused(400, "/v1/usage", group_by=group_by, after=after)
    assert "`after`" in message


async def test_a_price_that_begins_now_by_the_clients_clock_begins_now(office: Office) -> None:
    price = {"model": "*", "input_micros": 1, "output_micros": 1}
    moment = int(datetime.now(UTC).timestamp())
    for early_s, status in ((0, 201), (5, 201), (120, 400)):
        answer = await office.client.post(
            "/v1/admin/prices",
            json=price | {"valid_from": moment - early_s},
            headers=office.keys["operator"],
        )
        assert answer.status_code == status, answer.text
        assert status == 400 or answer.json()["valid_from"] >= moment


async def test_only_those_with_the_scope_see_usage(office: Office) -> None:
    for path in ("/v1/admin/usage", "/v1/admin/prices", "/v1/admin/tenants/acme/budgets"):
        for who in ("acme", "rival", "caller"):
            assert "`admin`" in await office.refused(403, path, who)
    for who in ("caller", "operator"):
        assert "`usage:read`" in await office.refused(403, "/v1/usage", who)


async def test_the_operator_sees_one_tenant_or_all(office: Office) -> None:
    await use_some(office)
    page = await office.get("/v1/admin/usage", "operator", group_by="tenant")
    assert [(row["tenant"], row["requests"]) for row in page["data"]] == [("acme", 6), ("rival", 1)]
    (row,) = (await office.get("/v1/admin/usage", "operator", tenant="rival"))["data"]
    assert row["cost_nanos"] == 7
    rows = (await office.get("/v1/admin/usage", "operator", group_by="tenant,request"))["data"]
    assert {row["tenant"] for row in rows} == {"acme", "rival"}
    await office.refused(404, "/v1/admin/usage", "operator", tenant="nobody")


async def test_f16_without_a_database_usage_is_503_in_every_format(
    tmp_path: Path, migrated_postgres_url: str, postgres_server: Postgres
) -> None:
    settings = settings_for(tmp_path / "data", migrated_postgres_url)
    async with client_of(create_app(settings, FakeEngine())) as client:
        headers = bearer(await issue_key(settings))
        assert (await client.get("/v1/usage", headers=headers)).status_code == 200
        with stopped(postgres_server):
            for form in ("json", "csv", "jsonl"):
                response = await client.get("/v1/usage", params={"format": form}, headers=headers)
                assert error_of(response, 503)["code"] == "database_unavailable"


# --- prices and budgets ---------------------------------------------------------------------------


async def test_a_price_that_was_set_is_listed(office: Office) -> None:
    body = {"model": "*", "input_micros": 500_000, "output_micros": 1_500_000, "tenant": "acme"}
    response = await office.client.post(
        "/v1/admin/prices", json=body, headers=office.keys["operator"]
    )
    assert response.status_code == 201, response.text
    price = response.json()
    assert price["cached_input_micros"] == 500_000
    assert price["tenant_id"] == office.tenants["acme"]
    assert (await office.get("/v1/admin/prices", "operator"))["data"] == [price]
    for changes, message in (
        ({"input_micros": -1}, "between 0"),
        ({"model": ""}, "base model"),
        ({"model": "a\0b"}, "base model"),
        ({"valid_from": 10**18}, "valid_from"),
        ({"valid_from": 1}, "past"),
        ({"surplus": 1}, "surplus"),
        ({"output_micros": "much"}, "output_micros"),
    ):
        response = await office.client.post(
            "/v1/admin/prices", json=body | changes, headers=office.keys["operator"]
        )
        assert message in error_of(response, 400)["message"]


async def test_a_budget_is_set_replaced_listed_and_deleted(office: Office) -> None:
    path, headers = "/v1/admin/tenants/acme/budgets", office.keys["operator"]
    body = {"period": "month", "amount_nanos": 25 * 10**9, "alert_percents": [100, 80, 80]}
    made = (await office.client.put(path, json=body, headers=headers)).json()
    assert made["owner"] == f"tenant:{office.tenants['acme']}"
    assert (made["hard"], made["alert_percents"], made["webhook_url"]) == (True, [80, 100], "")
    changed = body | {"amount_nanos": 1, "hard": False}
    again = (await office.client.put(path, json=changed, headers=headers)).json()
    assert again["id"] == made["id"]
    assert (again["amount_nanos"], again["hard"]) == (1, False)
    assert (await office.get(path, "operator"))["data"] == [again]
    for budget_id in ("nobody", "%00", "a" * 100):
        response = await office.client.delete(f"{path}/{budget_id}", headers=headers)
        error_of(response, 404)
    rivals = f"/v1/admin/tenants/rival/budgets/{made['id']}"
    error_of(await office.client.delete(rivals, headers=headers), 404)
    response = await office.client.delete(f"{path}/{made['id']}", headers=headers)
    assert response.json() == {"id": made["id"], "object": "budget", "deleted": True}
    assert (await office.get(path, "operator"))["data"] == []


REFUSED_BUDGETS: list[tuple[dict[str, Any], int, str]] = [
    ({"amount_nanos": -1}, 400, "between 0"),
    ({"amount_nanos": 10**19}, 400, "between 0"),
    ({"alert_percents": [0]}, 400, "percent"),
    ({"alert_percents": list(range(1, 20))}, 400, "percent"),
    ({"period": "year"}, 400, "period"),
    ({"key": "nobody"}, 404, "no such key"),
    ({"webhook_url": "ftp://example.com/"}, 400, "https://"),
    ({"webhook_url": "https://user:pw@example.com/"}, 400, "no credentials"),
    ({"webhook_url": "http://127.0.0.1/"}, 400, "this machine"),
    ({"webhook_url": "http://localhost:8080/"}, 400, "this machine"),
    ({"webhook_url": "http://[::ffff:127.0.0.1]/"}, 400, "this machine"),
    ({"webhook_url": "http://169.254.169.254/latest"}, 400, "this machine"),
    ({"webhook_url": "http://0.0.0.0/"}, 400, "this machine"),
    ({"webhook_url": "http://2130706433/"}, 400, "this machine"),
    ({"webhook_url": "http://no-such-host.invalid/"}, 400, "resolved"),
    ({"webhook_url": "https://example.com:99999/"}, 400, "cannot be read"),
    ({"webhook_url": "http://a\0b/"}, 400, "cannot be read"),
]


async def test_a_budget_that_cannot_be_is_refused(office: Office) -> None:
    for changes, status, message in REFUSED_BUDGETS:
        body = {"period": "day", "amount_nanos": 1} | changes
        response = await office.client.put(
            "/v1/admin/tenants/acme/budgets", json=body, headers=office.keys["operator"]
        )
        assert message in error_of(response, status)["message"], changes


async def test_the_routes_are_documented(office: Office) -> None:
    paths = (await office.client.get("/openapi.json")).json()["paths"]
    for path in ("/v1/usage", "/v1/admin/usage", "/v1/admin/prices"):
        assert paths[path]["get"]["summary"]
    names = {parameter["name"] for parameter in paths["/v1/usage"]["get"]["parameters"]}
    assert names == {"start", "end", "group_by", "limit", "after", "format"}


async def test_f31_a_slow_reader_of_an_export_keeps_no_connection(
    migrated_postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "PAGE_MAX", 2)
    database = Database(async_url(migrated_postgres_url, Path()), pool_size=1)
    principal = await make_principal(database)
    rows = [Entry(f"r{number}", principal.tenant_id, "k", "m", DAY) for number in range(5)]
    await entries.write(database, rows)
    asked = report.question("request", tenant_id=principal.tenant_id)
    lines = []
    async for found in export.export(database, asked, "jsonl"):
        lines += found.splitlines()
        async with database.session() as session:  # the only connection is free
            await session.scalar(select(1))
    assert len(lines) == 5
    await database.close()
