"""The audit trail over HTTP."""

import csv
import io
import json

import pytest

from gateway.tenants.audit import reading
from tests.tenants.admin.conftest import Office


async def test_an_entry_says_who_changed_what_and_in_which_request(office: Office) -> None:
    headers = {"x-request-id": "change-1"}
    body = {"slug": "acme", "name": "Acme"}
    tenant = await office.call("POST", "/tenants", 201, json=body, headers=headers)
    await office.call("PATCH", "/tenants/acme", json={"weight": 2.5})
    created, changed = await office.audit()
    assert created["actor"] == f"key:{office.admin_key[9:19]}"
    assert created["request_id"] == "change-1"
    assert (created["action"], created["target"]) == ("tenant.create", f"tenant:{tenant['id']}")
    assert created["tenant_id"] == tenant["id"]
    assert created["before"] is None
    assert created["after"]["name"] == "Acme"
    assert (changed["before"]["weight"], changed["after"]["weight"]) == (1.0, 2.5)
    assert changed["before"] | {"weight": 2.5} == changed["after"]


async def test_what_is_refused_or_changes_nothing_leaves_no_entry(office: Office) -> None:
    await office.tenant()
    await office.call("PATCH", "/tenants/acme", 400, json={"weight": -1})
    await office.call("PATCH", "/tenants/acme", json={})
    await office.call("PATCH", "/tenants/acme", json={"weight": 1})
    await office.call("POST", "/tenants/acme/activate")
    await office.call("POST", "/tenants", 409, json={"slug": "acme"})
    assert [entry["action"] for entry in await office.audit()] == ["tenant.create"]


async def test_the_trail_is_listed_in_pages_the_latest_first(office: Office) -> None:
    for slug in ("a", "b", "c"):
        await office.tenant(slug)
    first = await office.call("GET", "/audit?limit=2")
    assert [entry["sequence"] for entry in first["data"]] == [3, 2]
    assert first["has_more"]
    rest = await office.call("GET", "/audit?limit=2&after=2")
    assert [entry["sequence"] for entry in rest["data"]] == [1]
    assert not rest["has_more"]
    (of_b,) = (await office.call("GET", "/audit?tenant=b"))["data"]
    assert of_b["after"]["slug"] == "b"
    for query in ("limit=0", "limit=101", "limit=x", "after=0", f"after={2**63}", "after=x"):
        await office.call("GET", f"/audit?{query}", 400)


@pytest.mark.parametrize("batch", [1, 3, 500])
async def test_the_trail_is_exported_whole_in_both_forms(
    batch: int, office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "BATCH", batch)
    for slug in ("a", "b", "c"):
        await office.tenant(slug, name='of "quotes", commas and ü')
    entries = [
        {name: value for name, value in entry.items() if name != "object"}
        for entry in await office.audit()
    ]
    path = "/v1/admin/audit/export"
    answer = await office.use(office.admin_key, path)
    assert answer.headers["content-type"].startswith("application/jsonl")
    assert [json.loads(line) for line in answer.text.splitlines()] == entries
    answer = await office.use(office.admin_key, f"{path}?format=csv")
    assert answer.headers["content-type"].startswith("text/csv")
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert [int(row["sequence"]) for row in rows] == [1, 2, 3]
    assert [json.loads(row["after"]) for row in rows] == [entry["after"] for entry in entries]
    name = {"x-request-id": "-2-3"}
    await office.call("POST", "/tenants", 201, json={"slug": "d"}, headers=name)
    answer = await office.use(office.admin_key, f"{path}?format=csv")
    *_, row = csv.DictReader(io.StringIO(answer.text))
    assert row["request_id"] == "'-2-3"  # which a spreadsheet does not compute
    answer = await office.use(office.admin_key, f"{path}?tenant=b")
    (of_b,) = answer.text.splitlines()
    assert json.loads(of_b) == entries[1]
    await office.call("GET", "/audit/export?format=xml", 400)
