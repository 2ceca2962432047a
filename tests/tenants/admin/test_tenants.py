"""What the operator does with tenants, over HTTP."""

import asyncio
from typing import Any

import pytest

from gateway.tenants import key_form
from tests.tenants.admin.conftest import Office


async def test_a_tenant_from_the_first_to_the_last(office: Office) -> None:
    await office.call("PATCH", "/plans/pro", json={})
    made = await office.tenant("acme", name="Acme Ltd", plan="pro", weight=2)
    assert (made["object"], made["slug"], made["name"]) == ("tenant", "acme", "Acme Ltd")
    assert (made["plan"], made["weight"], made["status"]) == ("pro", 2.0, "active")
    assert await office.call("GET", "/tenants/acme") == made

    changed = await office.call("PATCH", "/tenants/acme", json={"name": "Acme", "weight": 0.5})
    assert changed == made | {"name": "Acme", "weight": 0.5}
    for verb, status in (("suspend", "suspended"), ("activate", "active")):
        for _ in range(2):
            moved = await office.call("POST", f"/tenants/acme/{verb}")
            assert moved == changed | {"status": status}
    deleted = await office.call("DELETE", "/tenants/acme")
    assert deleted["status"] == "deleted"
    assert await office.call("GET", "/tenants/acme") == deleted

    actions = [entry["action"] for entry in await office.audit()]
    assert actions == [
        "limits.set",
        "tenant.create",
        "tenant.set",
        "tenant.suspend",
        "tenant.activate",
        "tenant.delete",
    ]


async def test_a_suspended_tenants_key_is_refused_at_once_and_let_in_again(office: Office) -> None:
    await office.tenant()
    key = (await office.key())["value"]
    assert (await office.use(key)).status_code == 200
    await office.call("POST", "/tenants/acme/suspend")
    refused = await office.use(key)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "tenant_suspended")
    await office.call("POST", "/tenants/acme/activate")
    assert (await office.use(key)).status_code == 200


async def test_a_deleted_tenants_key_is_unknown_at_once_and_nothing_of_it_can_be_changed(
    office: Office,
) -> None:
    await office.tenant()
    issued = await office.key()
    assert (await office.use(issued["value"])).status_code == 200
    await office.call("DELETE", "/tenants/acme")
    assert (await office.use(issued["value"])).status_code == 401
    for method, path, body in (
        ("PATCH", "", {"name": "x"}),
        ("POST", "/activate", None),
        ("POST", "/suspend", None),
        ("DELETE", "", None),
        ("POST", "/keys", {}),
        ("POST", f"/keys/{issued['id']}/rotate", {}),
        ("POST", f"/keys/{issued['id']}/revoke", None),
        ("PATCH", "/limits", {"adapters_max": 1}),
        ("PATCH", f"/keys/{issued['id']}/limits", {"tokens_per_minute": 1}),
    ):
        answer = await office.call(method, f"/tenants/acme{path}", 409, json=body)
        assert "deleted" in answer["error"]["message"]
    await office.call("POST", "/tenants", 409, json={"slug": "acme"})
    assert (await office.audit())[-1]["action"] == "tenant.delete"


async def test_tenants_are_listed_in_pages_and_by_status(office: Office) -> None:
    slugs = [f"t{number}" for number in range(5)]
    for slug in slugs:
        await office.tenant(slug)
    await office.call("POST", "/tenants/t2/suspend")
    found: list[str] = []
    after = ""
    for more in (True, True, False):
        listed = await office.call("GET", f"/tenants?limit=2{after}")
        assert (listed["object"], listed["has_more"]) == ("list", more)
        found += [tenant["slug"] for tenant in listed["data"]]
        after = f"&after={listed['data'][-1]['id']}"
    assert found == slugs
    (suspended,) = (await office.call("GET", "/tenants?status=suspended"))["data"]
    assert suspended["slug"] == "t2"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"slug": "No Slug"}, "slug"),
        ({"slug": "a\x00b"}, "slug"),
        ({"slug": "a", "name": "x" * 201}, "name"),
        ({"slug": "a", "name": "a\x00b"}, "name"),
        ({"slug": "a", "name": "a\nb"}, "name"),
        ({"slug": "a", "plan": "nope"}, "plan"),
        ({"slug": "a", "plan": "A b\x00"}, "plan"),
        ({"slug": "a", "weight": 0}, "weight"),
        ({"slug": "a", "weight": 1e9}, "weight"),
        ({"slug": "a", "weight": -1}, "weight"),
        ({"slug": "a", "weight": "heavy"}, None),
        ({"slug": "a", "wieght": 1}, None),
        ({"slug": 1}, None),
        ({}, None),
        ([], None),
        (None, None),
    ],
)
async def test_a_tenant_that_cannot_be_is_refused_and_leaves_no_trace(
    body: Any, param: str | None, office: Office
) -> None:
    error = (await office.call("POST", "/tenants", 400, json=body))["error"]
    assert error["message"]
    if param is not None:
        assert error["param"] == param
    assert await office.audit() == []
    assert (await office.call("GET", "/tenants"))["data"] == []


async def test_half_a_surrogate_pair_in_a_name_is_refused(office: Office) -> None:
    headers = {"content-type": "application/json"}
    body = b'{"slug": "a", "name": "\\ud800"}'
    await office.call("POST", "/tenants", 400, content=body, headers=headers)


@pytest.mark.parametrize("slug", ["nobody", "No%20Slug", "a%00b", "%F0%9F", "a" * 300])
async def test_a_tenant_that_is_not_there_is_404(slug: str, office: Office) -> None:
    for method, path, body in (
        ("GET", "", None),
        ("PATCH", "", {}),
        ("DELETE", "", None),
        ("POST", "/suspend", None),
        ("GET", "/keys", None),
        ("POST", "/keys", {}),
        ("GET", "/limits", None),
        ("PATCH", "/limits", {}),
    ):
        await office.call(method, f"/tenants/{slug}{path}", 404, json=body)
    await office.call("GET", f"/audit?tenant={slug}", 404)


async def test_f13_a_name_that_holds_a_key_is_refused(office: Office) -> None:
    key = key_form.make().text.reveal()
    error = await office.call("POST", "/tenants", 400, json={"slug": "a", "name": f"of {key}"})
    assert key not in str(error)


async def test_changes_at_the_same_moment_all_succeed_and_each_is_on_record(
    office: Office,
) -> None:
    await office.tenant()
    await asyncio.gather(
        *(office.tenant(f"t{number}") for number in range(20)),
        *(office.call("PATCH", "/tenants/acme", json={"weight": n + 2}) for n in range(20)),
        *(office.key("acme", name=f"key {number}") for number in range(20)),
        *(office.call("PATCH", "/plans/pro", json={"adapters_max": n}) for n in range(20)),
    )
    entries = await office.audit()
    assert [entry["sequence"] for entry in entries] == list(range(1, 82))
    sets = [entry for entry in entries if entry["action"] == "tenant.set"]
    assert len(sets) == 20
    # each saw what the one before it had left
    assert [one["after"] for one in sets[:-1]] == [one["before"] for one in sets[1:]]
