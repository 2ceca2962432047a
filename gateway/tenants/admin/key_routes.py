"""Tenants' keys over HTTP, for the operator. Admin keys are made in the shell."""

from datetime import timedelta

from litestar import Router, get, post
from litestar.params import JSONBody

from gateway.errors import InvalidRequest
from gateway.injection import Injected
from gateway.tenants import keys as key_rows
from gateway.tenants.admin import keys
from gateway.tenants.admin.access import After, KeyId, Limit, Slug, moment
from gateway.tenants.admin.access import actor as actor_dependency
from gateway.tenants.admin.desk import Desk
from gateway.tenants.admin.objects import (
    IssuedKeyObject,
    KeyObject,
    NewKey,
    Page,
    Rotation,
    issued_key_object,
    key_object,
    page,
)
from gateway.tenants.audit.trail import Actor


@post(
    "/",
    operation_id="createKey",
    summary="Create a key of a tenant",
    description="The answer holds the key itself, this once.",
)
async def create_key(
    slug: Slug, data: JSONBody[NewKey], actor: Injected[Actor], desk: Injected[Desk]
) -> IssuedKeyObject:
    async with desk.change(actor) as change:
        issued = await keys.create(
            desk,
            change,
            slug,
            data.name,
            key_rows.TENANT_SCOPES if data.scopes is None else data.scopes,
            moment(data.expires_at, "expires_at"),
            data.allowed_adapters,
            data.allowed_networks,
        )
    return issued_key_object(issued)


@get(
    "/",
    operation_id="listKeys",
    summary="A tenant's keys, revoked ones too",
)
async def list_keys(
    slug: Slug,
    actor: Injected[Actor],
    desk: Injected[Desk],
    limit: Limit = 20,
    after: After = None,
) -> Page[KeyObject]:
    async with desk.look() as session:
        tenant_id = await keys.owner_id(session, slug)
        found = await key_rows.list_keys(session, tenant_id, after=after or "", limit=limit + 1)
    return page([key_object(key) for key in found], limit)


@get("/{key:str}", operation_id="getKey", summary="One key")
async def get_key(
    slug: Slug, key: KeyId, actor: Injected[Actor], desk: Injected[Desk]
) -> KeyObject:
    async with desk.look() as session:
        tenant_id = await keys.owner_id(session, slug)
        return key_object(await key_rows.find_key(session, tenant_id, key))


@post(
    "/{key:str}/rotate",
    operation_id="rotateKey",
    summary="Replace a key by a new one",
    description="The new key may do what the old one may, under the same limits; the old one goes "
    "on for `overlap_hours`.",
)
async def rotate_key(
    slug: Slug,
    key: KeyId,
    actor: Injected[Actor],
    desk: Injected[Desk],
    data: JSONBody[Rotation | None] = None,
) -> IssuedKeyObject:
    data = data or Rotation()
    async with desk.change(actor) as change:
        issued = await keys.rotate(desk, change, slug, key, _overlap(data.overlap_hours))
    return issued_key_object(issued)


@post(
    "/{key:str}/revoke",
    status_code=200,
    operation_id="revokeKey",
    summary="Revoke a key for good",
)
async def revoke_key(
    slug: Slug, key: KeyId, actor: Injected[Actor], desk: Injected[Desk]
) -> KeyObject:
    async with desk.change(actor) as change:
        revoked = await keys.revoke(change, slug, key)
    return key_object(revoked)


def _overlap(hours: float) -> timedelta:
    try:
        return timedelta(hours=hours)
    except (OverflowError, ValueError):
        raise InvalidRequest("The overlap is too long.", param="overlap_hours") from None


router = Router(
    "/v1/admin/tenants/{slug:str}/keys",
    route_handlers=[create_key, list_keys, get_key, rotate_key, revoke_key],
    dependencies=actor_dependency,
    tags=["Admin: keys"],
)
