"""Every route × every scope × own, other, suspended and deleted tenant, and every kind of bad key.

A route that is not in `TABLE` fails the first test. What a caller gets follows from its line:
nothing else decides who may do what.
"""

import asyncio
import hashlib
import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import httpx
import pytest
from sqlalchemy import update

from gateway.db import Database, async_url, now
from gateway.settings import Settings
from gateway.tenants import failures, key_form
from gateway.tenants.keys import ADMIN, TENANT_SCOPES
from gateway.tenants.tables import ApiKey, Tenant
from tests.adapters.making import config, weights
from tests.live import Live, live

BASE = "smollm2-135m-instruct"
OWNER, OTHER, SUSPENDED, DELETED = "owner", "other", "suspended", "deleted"
OWN = "adapter-of-owner"
ABSENT = "adapter-of-nobody"[: len(OWN)].ljust(len(OWN), "x")
FILES = {
    "name": (None, "uploaded"),
    "config": ("adapter_config.json", json.dumps(config()).encode()),
    "weights": ("adapter_model.safetensors", weights()),
}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
TEXT = {"prompt": "hi", "max_tokens": 2}


class Case(NamedTuple):
    scope: str | None
    """Which a key needs; None: no key is looked at."""
    statuses: set[int]
    """For whoever may."""
    owned: bool = False
    """Whether `{object}` stands in path or body for an adapter of OWNER: 404 to everybody else."""
    body: dict[str, Any] = {}  # noqa: RUF012  (never changed)
    upload: bool = False
    part: bool = False
    """Whether the body is a part of a resumable upload."""
    path: str = ""
    """With what stands for parameters; default: the route's own."""


def of_tenant(
    status: int, rest: str = "", *, slug: str = OWNER, body: dict[str, Any] | None = None
) -> Case:
    """What the operator gets who asks about a tenant."""
    return Case(ADMIN, {status}, body=body or {}, path=f"/v1/admin/tenants/{slug}{rest}")


TABLE: dict[str, list[Case]] = {
    "GET /health/live": [Case(None, {200})],
    "GET /health/ready": [Case(None, {200})],
    "GET /openapi.json": [Case(None, {200})],
    "GET /docs": [Case(None, {200})],
    "GET /docs/openapi.json": [Case(None, {200})],
    "GET /docs/{path}": [Case(None, {404}, path="/docs/more")],
    "GET /v1/models": [Case("inference", {200})],
    "GET /v1/models/{model}": [
        Case("inference", {200}, path=f"/v1/models/{BASE}"),
        Case("inference", {200}, owned=True, path="/v1/models/{object}"),
    ],
    "POST /v1/chat/completions": [
        Case("inference", {200}, body={"model": BASE, **CHAT}),
        Case("inference", {200}, owned=True, body={"model": "{object}", **CHAT}),
        Case("inference", {200}, owned=True, body={"model": "{object}", "stream": True, **CHAT}),
    ],
    "POST /v1/completions": [
        Case("inference", {200}, body={"model": BASE, **TEXT}),
        Case("inference", {200}, owned=True, body={"model": "{object}", **TEXT}),
        Case("inference", {200}, owned=True, body={"model": "{object}", "stream": True, **TEXT}),
    ],
    "GET /v1/adapters": [Case("adapters:read", {200})],
    "POST /v1/adapters": [Case("adapters:write", {200, 201}, upload=True)],
    "GET /v1/adapters/{name_or_id}": [
        Case("adapters:read", {200}, owned=True, path="/v1/adapters/{object}")
    ],
    "DELETE /v1/adapters/{name_or_id}": [
        Case("adapters:write", {200}, owned=True, path="/v1/adapters/{object}")
    ],
    "POST /v1/uploads": [Case("adapters:write", {201}, body={"name": "uploaded", "bytes": 9})],
    "GET /v1/uploads/{upload_id}": [Case("adapters:write", {404}, path="/v1/uploads/absent")],
    "PUT /v1/uploads/{upload_id}/parts/{number}": [
        Case("adapters:write", {404}, part=True, path="/v1/uploads/absent/parts/1")
    ],
    "POST /v1/uploads/{upload_id}/complete": [
        Case("adapters:write", {404}, path="/v1/uploads/absent/complete")
    ],
    "POST /v1/uploads/{upload_id}/cancel": [
        Case("adapters:write", {404}, path="/v1/uploads/absent/cancel")
    ],
    "GET /v1/adapters/{name_or_id}/versions": [
        Case("adapters:read", {200}, owned=True, path="/v1/adapters/{object}/versions")
    ],
    "DELETE /v1/adapters/{name_or_id}/versions/{version}": [
        Case("adapters:write", {409}, owned=True, path="/v1/adapters/{object}/versions/latest")
    ],
    "GET /v1/adapters/{name_or_id}/aliases": [
        Case("adapters:read", {200}, owned=True, path="/v1/adapters/{object}/aliases")
    ],
    "PUT /v1/adapters/{name_or_id}/aliases/{alias}": [
        Case(
            "adapters:write",
            {200},
            owned=True,
            body={"version": "latest"},
            path="/v1/adapters/{object}/aliases/prod",
        )
    ],
    "DELETE /v1/adapters/{name_or_id}/aliases/{alias}": [
        Case("adapters:write", {404}, owned=True, path="/v1/adapters/{object}/aliases/absent")
    ],
    "GET /v1/usage": [Case("usage:read", {200})],
    "GET /v1/admin/usage": [Case(ADMIN, {200})],
    "GET /v1/admin/prices": [Case(ADMIN, {200})],
    "POST /v1/admin/prices": [
        Case(ADMIN, {201}, body={"model": "*", "input_micros": 0, "output_micros": 0})
    ],
    "GET /v1/admin/tenants": [Case(ADMIN, {200})],
    "POST /v1/admin/tenants": [Case(ADMIN, {400}, body={"slug": "No slug"})],
    "GET /v1/admin/tenants/{slug}": [of_tenant(200)],
    "PATCH /v1/admin/tenants/{slug}": [of_tenant(200, body={"name": "Owner"})],
    "DELETE /v1/admin/tenants/{slug}": [of_tenant(404, slug="absent")],
    "POST /v1/admin/tenants/{slug}/suspend": [of_tenant(404, "/suspend", slug="absent")],
    "POST /v1/admin/tenants/{slug}/activate": [of_tenant(200, "/activate")],
    "GET /v1/admin/tenants/{slug}/keys": [of_tenant(200, "/keys")],
    "POST /v1/admin/tenants/{slug}/keys": [of_tenant(201, "/keys", body={"name": "made"})],
    "GET /v1/admin/tenants/{slug}/keys/{key}": [of_tenant(404, "/keys/absent")],
    "POST /v1/admin/tenants/{slug}/keys/{key}/rotate": [of_tenant(404, "/keys/absent/rotate")],
    "POST /v1/admin/tenants/{slug}/keys/{key}/revoke": [of_tenant(404, "/keys/absent/revoke")],
    "GET /v1/admin/tenants/{slug}/keys/{key}/limits": [of_tenant(404, "/keys/absent/limits")],
    "PATCH /v1/admin/tenants/{slug}/keys/{key}/limits": [
        of_tenant(404, "/keys/absent/limits", body={"requests_per_minute": 1})
    ],
    "GET /v1/admin/tenants/{slug}/limits": [of_tenant(200, "/limits")],
    "PATCH /v1/admin/tenants/{slug}/limits": [
        of_tenant(200, "/limits", body={"requests_per_minute": None})
    ],
    "GET /v1/admin/tenants/{slug}/budgets": [of_tenant(200, "/budgets")],
    "PUT /v1/admin/tenants/{slug}/budgets": [
        of_tenant(200, "/budgets", body={"period": "day", "amount_nanos": 10**15})
    ],
    "DELETE /v1/admin/tenants/{slug}/budgets/{budget_id}": [of_tenant(404, "/budgets/absent")],
    "GET /v1/admin/plans": [Case(ADMIN, {200})],
    "GET /v1/admin/plans/{name}": [Case(ADMIN, {404}, path="/v1/admin/plans/absent")],
    "PATCH /v1/admin/plans/{name}": [
        Case(ADMIN, {200}, body={"requests_per_minute": 9}, path="/v1/admin/plans/made")
    ],
    "DELETE /v1/admin/plans/{name}": [Case(ADMIN, {404}, path="/v1/admin/plans/absent")],
    "GET /v1/admin/audit": [Case(ADMIN, {200})],
    "GET /v1/admin/audit/export": [Case(ADMIN, {200})],
}
CASES = [(route, case) for route, cases in TABLE.items() for case in cases]


class Caller(NamedTuple):
    name: str
    tenant: str
    scopes: tuple[str, ...]
    key: str | None
    refused: int | None = None
    """What the key itself comes to, whatever it asks for."""


class World:
    """A gateway, and every kind of caller that it can have."""

    def __init__(self, running: Live) -> None:
        self.live = running
        self.client = httpx.Client(base_url=running.url, timeout=30.0)
        self.owners_key = running.key(OWNER)
        self.callers = list(self._callers())
        asyncio.run(_set_status(running.settings, SUSPENDED, "suspended"))
        asyncio.run(_set_status(running.settings, DELETED, "deleted"))

    def _callers(self) -> Iterator[Caller]:
        refused = {OWNER: None, OTHER: None, SUSPENDED: 403, DELETED: 401}
        for tenant, status in refused.items():
            for scope in TENANT_SCOPES:
                key = self.live.key(tenant, scopes=(scope,))
                yield Caller(f"{tenant} with {scope}", tenant, (scope,), key, status)
        yield Caller("the operator", "", (ADMIN,), self.live.key(None, scopes=(ADMIN,)))
        yield Caller("no key", "", (), None, 401)
        yield Caller("unknown key", "", (), key_form.make().text.reveal(), 401)
        yield Caller("another service's key", "", (), "sk-proj-0123456789abcdef", 401)
        yield Caller("mistyped key", "", (), _mistyped(self.owners_key), 401)
        yield Caller("another secret", "", (), _other_secret(self.owners_key), 401)
        for state in ("revoked_at", "expires_at"):
            key = self.live.key(OWNER, scopes=TENANT_SCOPES)
            asyncio.run(_end_key(self.live.settings, key, state))
            yield Caller(state, OWNER, TENANT_SCOPES, key, 401)

    def own_adapter(self) -> dict[str, Any]:
        """OWNER's, made if it isn't there."""
        files: Any = FILES | {"name": (None, OWN)}
        response = self.client.post("/v1/adapters", headers=_bearer(self.owners_key), files=files)
        assert response.is_success, response.text
        made: dict[str, Any] = response.json()
        return made

    def ask(self, route: str, case: Case, key: str | None, named: str = OWN) -> httpx.Response:
        method, _, path = route.partition(" ")
        options: dict[str, Any] = {"headers": _bearer(key)}
        if case.upload:
            options["files"] = FILES
        elif case.part:
            options["content"] = b"part"
            options["headers"]["x-content-sha256"] = hashlib.sha256(b"part").hexdigest()
        elif case.body:
            options["content"] = json.dumps(case.body).replace("{object}", named)
        return self.client.request(
            method, (case.path or path).replace("{object}", named), **options
        )


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(failures, "AT_ONCE", 10**6)  # all wrong keys here come from one address
        with live(tmp_path_factory.mktemp("authorization")) as running:
            yield World(running)


def expected(case: Case, caller: Caller) -> set[int]:
    if case.scope is None:
        return case.statuses
    if caller.refused is not None:
        return {caller.refused}
    if case.scope not in caller.scopes:
        return {403}
    return {404} if case.owned and caller.tenant != OWNER else case.statuses


def test_every_route_is_in_the_table(world: World) -> None:
    routes = {
        f"{method} {route.path_format}"
        for route in world.live.app.routes
        for method in route.methods
        if method != "OPTIONS"  # the framework's own, which says which methods there are
    }
    assert routes == set(TABLE)


@pytest.mark.parametrize(("route", "case"), CASES)
def test_a_caller_gets_what_its_scope_and_tenant_allow(
    route: str, case: Case, world: World
) -> None:
    world.own_adapter()
    for caller in world.callers:
        response = world.ask(route, case, caller.key)
        if response.is_success and route.startswith("DELETE"):
            world.own_adapter()
        about = f"{route} {case.path} {case.body}: {caller.name}: {response.text[:300]}"
        assert response.status_code in expected(case, caller), about
        if case.scope is not None and response.status_code >= 400:
            assert response.json().keys() == {"error"}, about


@pytest.mark.parametrize(("route", "case"), [(route, case) for route, case in CASES if case.owned])
def test_what_belongs_to_another_tenant_looks_like_what_is_absent(
    route: str, case: Case, world: World
) -> None:
    assert case.scope is not None
    key = world.live.key(OTHER, scopes=(case.scope,))
    adapter = world.own_adapter()
    for name, absent in ((OWN, ABSENT), (adapter["id"], adapter["id"][:-4] + "0000")):
        theirs = world.ask(route, case, key, name)
        nobodys = world.ask(route, case, key, absent)
        assert theirs.status_code == nobodys.status_code == 404
        assert theirs.text.replace(name, "…") == nobodys.text.replace(absent, "…")
        assert _telling(theirs) == _telling(nobodys)
    assert world.own_adapter()["id"] == adapter["id"], "it was changed by another tenant"


def test_lists_hold_the_callers_own_only(world: World) -> None:
    adapter = world.own_adapter()
    for path in ("/v1/models", "/v1/adapters"):
        own = world.client.get(path, headers=_bearer(world.owners_key)).text
        others = world.client.get(path, headers=_bearer(world.live.key(OTHER))).text
        assert OWN in own
        assert not {OWN, adapter["id"]} & set(others.split('"')), path


def test_a_name_means_each_tenants_own_adapter(world: World) -> None:
    """The same name and bytes twice: what one does to its own leaves the other's alone."""
    world.own_adapter()
    key = world.live.key(OTHER)
    files: Any = FILES | {"name": (None, OWN)}
    assert world.client.post("/v1/adapters", headers=_bearer(key), files=files).status_code == 201
    path = f"/v1/adapters/{OWN}"
    assert world.client.delete(path, headers=_bearer(key)).status_code == 200
    assert world.client.get(path, headers=_bearer(world.owners_key)).status_code == 200


@pytest.mark.parametrize("path", ["/v1/nothing", "/v1/adapters/a/b", "/nothing", "/v1"])
def test_a_path_without_a_route_says_the_same_to_everybody(path: str, world: World) -> None:
    answers = {
        (response.status_code, response.text)
        for caller in world.callers
        for response in [world.client.get(path, headers=_bearer(caller.key))]
    }
    assert len(answers) == 1
    assert answers.pop()[0] == 404


def _telling(response: httpx.Response) -> dict[str, str]:
    """Headers without those that differ from request to request."""
    differing = ("date", "x-request-id")
    return {name: text for name, text in response.headers.items() if name not in differing}


def _bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


def _mistyped(key: str) -> str:
    return key[:-1] + ("a" if key[-1] != "a" else "b")


def _other_secret(key: str) -> str:
    """A well-formed key with the public id of a real one."""
    body = key.rpartition("_")[0] + "_" + "0" * key_form.SECRET_CHARACTERS
    return body + key_form.checksum(body)


async def _set_status(settings: Settings, slug: str, status: str) -> None:
    await _execute(settings, update(Tenant).where(Tenant.slug == slug).values(status=status))


async def _end_key(settings: Settings, key: str, column: str) -> None:
    ended = {column: now() - timedelta(minutes=1)}
    named = ApiKey.public_id == key_form.public_id(key)
    await _execute(settings, update(ApiKey).where(named).values(ended))


async def _execute(settings: Settings, statement: Any) -> None:
    database = Database(async_url(settings.database.url.reveal(), settings.data_dir))
    try:
        async with database.session() as session:
            await session.execute(statement)
    finally:
        await database.close()
