"""What the operator does with keys, over HTTP."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import update

from gateway.db import Database, async_url, now
from gateway.tenants import key_form
from gateway.tenants.tables import ApiKey
from tests.tenants.admin.conftest import Office

CALENDAR_END = 253402300799


async def test_a_key_is_shown_once_with_all_that_it_may(office: Office) -> None:
    await office.tenant()
    expires_at = int(now().timestamp()) + 3600
    issued = await office.key(
        name="ci",
        scopes=["usage:read", "inference"],
        expires_at=expires_at,
        allowed_adapters=["pirate", "judge"],
        allowed_networks=["127.0.0.0/8", "10.1.2.3"],
    )
    key = issued.pop("value")
    assert key_form.public_id(key) is not None
    assert issued["redacted_value"] == f"{key[:16]}_…{key[-4:]}"
    assert issued["scopes"] == ["inference", "usage:read"]
    assert issued["expires_at"] == expires_at
    assert issued["allowed_adapters"] == ["judge", "pirate"]
    assert issued["allowed_networks"] == ["10.1.2.3/32", "127.0.0.0/8"]
    assert await office.call("GET", f"/tenants/acme/keys/{issued['id']}") == issued
    assert await office.call("GET", f"/tenants/acme/keys/{key[6:16]}") == issued
    assert (await office.call("GET", "/tenants/acme/keys"))["data"] == [issued]
    assert key[17:60] not in str(await office.audit())


async def test_the_environment_of_the_settings_stands_in_new_keys(office: Office) -> None:
    office.app.state.desk.environment = "test"
    await office.tenant()
    issued = await office.key()
    assert issued["value"].startswith("lg_test_sk_")
    assert issued["redacted_value"] == f"{issued['value'][:21]}_…{issued['value'][-4:]}"
    assert (await office.use(issued["value"])).status_code == 200


async def test_a_rotation_keeps_what_the_key_may_and_ends_the_old_one_after_the_overlap(
    office: Office,
) -> None:
    await office.tenant()
    fields: dict[str, Any] = {
        "name": "ci",
        "scopes": ["inference"],
        "allowed_adapters": ["pirate"],
        "allowed_networks": ["127.0.0.1"],
    }
    old = await office.key(**fields)
    limits = {"requests_per_minute": 7, "tokens_per_minute": 70}
    await office.call("PATCH", f"/tenants/acme/keys/{old['id']}/limits", json=limits)
    path = f"/tenants/acme/keys/{old['id']}"
    new = await office.call("POST", f"{path}/rotate", 201, json={"overlap_hours": 2})
    for field in ("name", "scopes", "allowed_adapters", "allowed_networks", "expires_at"):
        assert new[field] == old[field]
    assert new["value"] != old["value"]
    copied = await office.call("GET", f"/tenants/acme/keys/{new['id']}/limits")
    assert limits.items() <= copied["limits"].items()
    replaced = await office.call("GET", path)
    assert replaced["replaced_by"] == new["id"]
    assert abs(replaced["expires_at"] - now().timestamp() - 7200) < 60
    for key in (old, new):
        assert (await office.use(key["value"])).status_code == 200
    again = await office.call("POST", f"{path}/rotate", 409, json={})
    assert "rotated before" in again["error"]["message"]


async def test_f15_an_overlap_of_nothing_ends_the_old_key_at_once(office: Office) -> None:
    await office.tenant()
    old = await office.key()
    assert (await office.use(old["value"])).status_code == 200
    path = f"/tenants/acme/keys/{old['id']}/rotate"
    new = await office.call("POST", path, 201, json={"overlap_hours": 0})
    assert "expired" in (await office.use(old["value"])).json()["error"]["message"]
    assert (await office.use(new["value"])).status_code == 200


async def test_a_key_that_was_made_for_a_time_is_followed_by_one_for_as_long(
    office: Office,
) -> None:
    await office.tenant()
    old = await office.key(expires_at=int(now().timestamp()) + 3600)
    database = Database(async_url(office.settings.database.url.reveal(), office.settings.data_dir))
    async with database.session() as session:
        earlier = ApiKey.created_at  # it was made three hours earlier, for four hours
        made_at = (await session.get_one(ApiKey, old["id"])).created_at
        moved = made_at.replace(year=made_at.year - 1)
        await session.execute(update(ApiKey).values({earlier: moved}))
    await database.close()
    path = f"/tenants/acme/keys/{old['id']}/rotate"
    new = await office.call("POST", path, 201, json={"overlap_hours": 24})
    lifetime = old["expires_at"] - moved.timestamp()
    assert abs(new["expires_at"] - now().timestamp() - lifetime) < 60
    replaced = await office.call("GET", f"/tenants/acme/keys/{old['id']}")
    assert replaced["expires_at"] == old["expires_at"], "an overlap prolongs nothing"


async def test_of_two_rotations_at_once_one_is_a_conflict(office: Office) -> None:
    await office.tenant()
    old = await office.key()
    path = f"/v1/admin/tenants/acme/keys/{old['id']}/rotate"
    answers = await asyncio.gather(
        *(office.use(office.admin_key, path, method="POST", json={}) for _ in range(5))
    )
    assert sorted(answer.status_code for answer in answers) == [201, 409, 409, 409, 409]


async def test_f15_a_revoked_key_is_refused_at_once_and_stays_so(office: Office) -> None:
    await office.tenant()
    issued = await office.key()
    assert (await office.use(issued["value"])).status_code == 200
    path = f"/tenants/acme/keys/{issued['id']}/revoke"
    revoked = await office.call("POST", path)
    assert "revoked" in (await office.use(issued["value"])).json()["error"]["message"]
    assert await office.call("POST", path) == revoked
    await office.call("POST", f"/tenants/acme/keys/{issued['id']}/rotate", 409, json={})
    assert [entry["action"] for entry in await office.audit()][-1] == "key.revoke"


async def test_another_tenants_key_is_404(office: Office) -> None:
    await office.tenant("acme")
    await office.tenant("other")
    issued = await office.key("other")
    for key in (issued["id"], issued["value"][6:16], "0123456789", "a%00b", "x" * 36):
        for method, path, body in (
            ("GET", "", None),
            ("POST", "/rotate", {}),
            ("POST", "/revoke", None),
            ("GET", "/limits", None),
            ("PATCH", "/limits", {}),
        ):
            await office.call(method, f"/tenants/acme/keys/{key}{path}", 404, json=body)
    assert (await office.use(issued["value"])).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"scopes": []},
        {"scopes": ["root"]},
        {"scopes": ["admin"]},
        {"expires_at": 1},
        {"expires_at": 10**18},
        {"expires_at": -(10**18)},
        {"allowed_adapters": []},
        {"allowed_adapters": ["a\x00"]},
        {"allowed_adapters": ["a"] * 101},
        {"allowed_networks": []},
        {"allowed_networks": ["10.0.0.1/8"]},
        {"allowed_networks": ["everywhere"]},
        {"allowed_networks": ["10.0.0.0/8"] * 101},
        {"name": "x" * 201},
        {"nmae": "x"},
    ],
)
async def test_a_key_that_cannot_be_is_refused(fields: dict[str, Any], office: Office) -> None:
    await office.tenant()
    await office.call("POST", "/tenants/acme/keys", 400, json=fields)
    assert (await office.call("GET", "/tenants/acme/keys"))["data"] == []


@pytest.mark.parametrize("hours", [-1, 1e300, 2161, "NaN"])
async def test_an_overlap_that_cannot_be_is_refused(hours: Any, office: Office) -> None:
    await office.tenant()
    issued = await office.key()
    path = f"/tenants/acme/keys/{issued['id']}/rotate"
    await office.call("POST", path, 400, json={"overlap_hours": hours})


async def test_keys_are_listed_in_pages(office: Office) -> None:
    await office.tenant()
    made = [(await office.key(name=f"key {number}"))["id"] for number in range(3)]
    first = await office.call("GET", "/tenants/acme/keys?limit=2")
    assert first["has_more"]
    rest = await office.call("GET", f"/tenants/acme/keys?limit=2&after={first['data'][-1]['id']}")
    assert not rest["has_more"]
    assert [key["id"] for key in first["data"] + rest["data"]] == made


async def test_a_key_of_another_network_is_403_and_says_from_where(office: Office) -> None:
    await office.tenant()
    key = (await office.key(allowed_networks=["192.0.2.0/24"]))["value"]
    error = (await office.use(key)).json()["error"]
    assert error["code"] == "network_not_allowed"
    assert "127.0.0.1" in error["message"]


async def test_f40_admin_keys_do_nothing_but_administer(office: Office) -> None:
    for method, path in (
        ("GET", "/v1/models"),
        ("GET", "/v1/models/x"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("GET", "/v1/adapters"),
        ("POST", "/v1/adapters"),
        ("GET", "/v1/adapters/x"),
        ("DELETE", "/v1/adapters/x"),
    ):
        body: dict[str, Any] = {"model": "m", "prompt": "x"}
        if "chat" in path:
            body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        answer = await office.use(office.admin_key, path, method=method, json=body)
        assert answer.status_code == 403, (method, path, answer.text)


async def test_f40_no_route_of_the_operators_takes_a_tenants_key(office: Office) -> None:
    await office.tenant()
    key = (await office.key())["value"]
    document = (await office.http.get("/openapi.json")).json()
    asked = 0
    for path, methods in document["paths"].items():
        if not path.startswith("/v1/admin"):
            continue
        filled = path.replace("{slug}", "acme").replace("{key}", "x").replace("{name}", "x")
        for method in methods:
            answer = await office.use(key, filled, method=method.upper(), json={})
            assert answer.status_code == 403, (method, path, answer.text)
            answer = await office.http.request(method.upper(), filled, json={})
            assert answer.status_code == 401, (method, path, answer.text)
            asked += 1
    assert asked >= 22


async def test_a_key_that_ends_with_the_calendar_can_be_rotated(office: Office) -> None:
    await office.tenant()
    old = await office.key(expires_at=CALENDAR_END)
    await asyncio.sleep(1.1)  # so that its lifetime, counted from now, would go beyond the end
    new = await office.call("POST", f"/tenants/acme/keys/{old['id']}/rotate", 201)
    assert new["expires_at"] == CALENDAR_END


@pytest.mark.parametrize("path", ["/tenants", "/tenants/acme/keys"])
@pytest.mark.parametrize("after", ["%00", "%F0%9F%98%80", "no-id"])
async def test_a_page_after_what_is_no_id_is_refused(office: Office, path: str, after: str) -> None:
    await office.tenant()
    error = await office.call("GET", f"{path}?after={after}", 400)
    assert error["error"]["param"] == "after"
