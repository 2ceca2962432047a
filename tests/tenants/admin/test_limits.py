"""Limits and plans, over HTTP, and as the request path sees them."""

from typing import Any

import pytest

from gateway.db import Database, async_url
from gateway.tenants.known_keys import KnownKey, known_key
from gateway.tenants.limits.rows import LIMIT_MAX
from gateway.tenants.limits.rules import BudgetRule, Limits
from gateway.tenants.usage.tables import Budget
from tests.tenants.admin.conftest import Office

NONE = {
    "requests_per_minute": None,
    "tokens_per_minute": None,
    "concurrent_requests": None,
    "request_tokens_max": None,
    "adapters_max": None,
    "adapter_bytes_max": None,
}


async def known(office: Office, value: str) -> KnownKey:
    database = Database(async_url(office.settings.database.url.reveal(), office.settings.data_dir))
    async with database.reading() as connection:
        found = await known_key(connection, value[6:16])
    await database.close()
    assert found is not None
    return found


async def test_a_limit_is_the_tenants_own_or_its_plans(office: Office) -> None:
    plan = {"requests_per_minute": 60, "tokens_per_minute": 1000, "adapters_max": 5}
    made = await office.call("PATCH", "/plans/pro", json=plan)
    assert made == {"object": "plan", "name": "pro", "limits": NONE | plan}
    await office.tenant(plan="pro")
    own = {"tokens_per_minute": 50, "concurrent_requests": 0}
    limits = await office.call("PATCH", "/tenants/acme/limits", json=own)
    effective = NONE | plan | own
    assert limits == {"object": "limits", "limits": NONE | own, "effective": effective}
    assert await office.call("GET", "/tenants/acme/limits") == limits

    limits = await office.call("PATCH", "/tenants/acme/limits", json={"tokens_per_minute": None})
    assert limits["limits"] == NONE | {"concurrent_requests": 0}
    assert limits["effective"]["tokens_per_minute"] == 1000
    await office.call("PATCH", "/tenants/acme", json={"plan": ""})
    limits = await office.call("GET", "/tenants/acme/limits")
    assert limits["effective"] == limits["limits"]


async def test_the_request_path_reads_all_limits_and_budgets_with_the_key(office: Office) -> None:
    await office.call("PATCH", "/plans/pro", json={"requests_per_minute": 60, "adapters_max": 9})
    tenant = await office.tenant(plan="pro", weight=3)
    other = await office.tenant("other", plan="pro")
    issued = await office.key(allowed_adapters=["pirate"], allowed_networks=["10.0.0.0/8"])
    sibling = await office.key()
    await office.call("PATCH", "/tenants/acme/limits", json={"adapters_max": 2})
    path = f"/tenants/acme/keys/{issued['id']}/limits"
    assert (await office.call("PATCH", path, json={"tokens_per_minute": 7}))["limits"] == (
        NONE | {"tokens_per_minute": 7}
    )
    database = Database(async_url(office.settings.database.url.reveal(), office.settings.data_dir))
    owners = (
        (f"tenant:{tenant['id']}", tenant),
        (f"key:{issued['id']}", tenant),
        (f"key:{sibling['id']}", tenant),
        (f"tenant:{other['id']}", other),
    )
    async with database.session() as session:
        for owner, of in owners:
            session.add(Budget(tenant_id=of["id"], owner=owner, period="day", amount_nanos=5))
    await database.close()

    found = await known(office, issued["value"])
    principal = found.principal
    assert principal.weight == 3
    assert principal.tenant_limits == Limits(requests_per_minute=60, adapters_max=2)
    assert principal.key_limits == Limits(tokens_per_minute=7)
    assert principal.allowed_adapters == frozenset({"pirate"})
    assert found.allowed_networks == ("10.0.0.0/8",)
    assert {budget.owner for budget in principal.budgets} == {owner for owner, _ in owners[:2]}
    assert all(
        isinstance(budget, BudgetRule)
        and (budget.period, budget.amount_nanos, budget.hard) == ("day", 5, True)
        for budget in principal.budgets
    )
    theirs = (await known(office, sibling["value"])).principal
    assert theirs.key_limits == Limits()
    assert theirs.allowed_adapters is None

    new = await office.call("POST", f"/tenants/acme/keys/{issued['id']}/rotate", 201, json={})
    owners_after = {b.owner for b in (await known(office, new["value"])).principal.budgets}
    assert owners_after == {f"tenant:{tenant['id']}", f"key:{new['id']}"}


async def test_f15_new_limits_reach_a_key_that_is_in_use_at_once(office: Office) -> None:
    """Through an adapter limit, which the gateway itself enforces."""
    await office.call("PATCH", "/plans/pro", json={})
    await office.tenant(plan="pro")
    key = (await office.key())["value"]
    assert (await office.use(key)).status_code == 200
    cache = office.app.state.authenticator._cache
    for path, adapters_max in (("/tenants/acme/limits", 3), ("/plans/pro", 2)):
        await office.call("PATCH", path, json={"adapters_max": adapters_max})
        assert (await office.use(key)).status_code == 200
        assert cache.held(key[6:16]).principal.tenant_limits.adapters_max == 3


@pytest.mark.parametrize(
    "body",
    [
        {"requests_per_minute": -1},
        {"requests_per_minute": LIMIT_MAX + 1},
        {"requests_per_minute": 2**64},
        {"requests_per_minute": 1.5},
        {"requests_per_minute": True},
        {"requests_per_hour": 1},
        [],
    ],
)
async def test_a_limit_that_cannot_be_is_refused(body: Any, office: Office) -> None:
    await office.tenant()
    for path in ("/tenants/acme/limits", "/plans/pro"):
        await office.call("PATCH", path, 400, json=body)
    assert (await office.call("GET", "/tenants/acme/limits"))["limits"] == NONE
    assert (await office.call("GET", "/plans"))["data"] == []


async def test_a_key_has_no_limit_on_what_its_tenant_stores(office: Office) -> None:
    await office.tenant()
    issued = await office.key()
    for kind in ("adapters_max", "adapter_bytes_max"):
        path = f"/tenants/acme/keys/{issued['id']}/limits"
        error = (await office.call("PATCH", path, 400, json={kind: 1}))["error"]
        assert error["param"] == kind


async def test_a_plan_with_tenants_is_not_deleted(office: Office) -> None:
    await office.call("PATCH", "/plans/pro", json={"adapters_max": 1})
    await office.tenant(plan="pro")
    error = (await office.call("DELETE", "/plans/pro", 409))["error"]
    assert "'acme'" in error["message"]
    await office.call("PATCH", "/tenants/acme", json={"plan": ""})
    await office.call("DELETE", "/plans/pro")
    await office.call("GET", "/plans/pro", 404)
    await office.call("DELETE", "/plans/pro", 404)
    last = (await office.audit())[-1]
    assert (last["action"], last["target"]) == ("plan.delete", "plan:pro")
    assert last["before"] == {"adapters_max": 1}


async def test_plans_are_listed_by_name_and_are_no_tenants_or_keys(office: Office) -> None:
    await office.tenant()
    await office.call("PATCH", "/tenants/acme/limits", json={"adapters_max": 1})
    for name in ("pro", "free"):
        await office.call("PATCH", f"/plans/{name}", json={})
    listed = await office.call("GET", "/plans")
    assert [plan["name"] for plan in listed["data"]] == ["free", "pro"]
    for name in ("A", "a b", "a%00b", "x" * 64):
        await office.call("PATCH", f"/plans/{name}", 400, json={})
        await office.call("GET", f"/plans/{name}", 404)
