"""Tenants over HTTP, for the operator."""

from typing import Annotated

from litestar import Router, delete, get, patch, post
from litestar.params import JSONBody, QueryParameter

from gateway.injection import Injected
from gateway.tenants import directory
from gateway.tenants.admin import tenants
from gateway.tenants.admin.access import After, Limit, Slug
from gateway.tenants.admin.access import actor as actor_dependency
from gateway.tenants.admin.desk import Desk
from gateway.tenants.admin.objects import (
    NewTenant,
    Page,
    TenantChanges,
    TenantObject,
    page,
    tenant_object,
)
from gateway.tenants.audit.trail import Actor
from gateway.tenants.directory import Status


@post(
    "/",
    operation_id="createTenant",
    summary="Create a tenant",
)
async def create_tenant(
    data: JSONBody[NewTenant], actor: Injected[Actor], desk: Injected[Desk]
) -> TenantObject:
    async with desk.change(actor) as change:
        made = await tenants.create(change, data.slug, data.name, data.plan, data.weight)
    return tenant_object(made)


@get("/", operation_id="listTenants", summary="All tenants")
async def list_tenants(
    actor: Injected[Actor],
    desk: Injected[Desk],
    status: Annotated[Status | None, QueryParameter(description="Only these.")] = None,
    limit: Limit = 20,
    after: After = None,
) -> Page[TenantObject]:
    async with desk.look() as session:
        found = await directory.tenants_after(session, after or "", limit + 1, status)
    return page([tenant_object(tenant) for tenant in found], limit)


@get("/{slug:str}", operation_id="getTenant", summary="One tenant")
async def get_tenant(slug: Slug, actor: Injected[Actor], desk: Injected[Desk]) -> TenantObject:
    async with desk.look() as session:
        return tenant_object(await directory.tenant_by_slug(session, slug))


@patch(
    "/{slug:str}",
    operation_id="changeTenant",
    summary="Change a tenant's name, plan or weight",
)
async def change_tenant(
    slug: Slug, data: JSONBody[TenantChanges], actor: Injected[Actor], desk: Injected[Desk]
) -> TenantObject:
    async with desk.change(actor) as change:
        changed = await tenants.update(
            change, slug, name=data.name, plan=data.plan, weight=data.weight
        )
    return tenant_object(changed)


@post(
    "/{slug:str}/suspend",
    status_code=200,
    operation_id="suspendTenant",
    summary="Refuse a tenant's keys for now",
)
async def suspend_tenant(slug: Slug, actor: Injected[Actor], desk: Injected[Desk]) -> TenantObject:
    async with desk.change(actor) as change:
        changed = await tenants.suspend(change, slug)
    return tenant_object(changed)


@post(
    "/{slug:str}/activate",
    status_code=200,
    operation_id="activateTenant",
    summary="Let a suspended tenant in again",
)
async def activate_tenant(slug: Slug, actor: Injected[Actor], desk: Injected[Desk]) -> TenantObject:
    async with desk.change(actor) as change:
        changed = await tenants.activate(change, slug)
    return tenant_object(changed)


@delete(
    "/{slug:str}",
    status_code=200,
    operation_id="deleteTenant",
    summary="Delete a tenant for good",
    description="Its keys are unknown and its adapters out of reach from now on. What it used "
    "stays on record, and its slug taken.",
)
async def delete_tenant(slug: Slug, actor: Injected[Actor], desk: Injected[Desk]) -> TenantObject:
    async with desk.change(actor) as change:
        deleted = await tenants.delete(change, slug)
    return tenant_object(deleted)


router = Router(
    "/v1/admin/tenants",
    route_handlers=[
        create_tenant,
        list_tenants,
        get_tenant,
        change_tenant,
        suspend_tenant,
        activate_tenant,
        delete_tenant,
    ],
    dependencies=actor_dependency,
    tags=["Admin: tenants"],
)
