"""Limits and plans over HTTP, for the operator."""

from litestar import Router, delete, get, patch
from litestar.params import JSONBody

from gateway.injection import Injected
from gateway.tenants import plans
from gateway.tenants.admin import limits
from gateway.tenants.admin.access import KeyId, PlanName, Slug
from gateway.tenants.admin.access import actor as actor_dependency
from gateway.tenants.admin.desk import Desk
from gateway.tenants.admin.objects import (
    DeletedObject,
    LimitChanges,
    LimitsObject,
    Page,
    PlanObject,
    TenantLimitsObject,
    plan_object,
    tenant_limits_object,
)
from gateway.tenants.audit.trail import Actor


@get(
    "/tenants/{slug:str}/limits",
    operation_id="getTenantLimits",
    summary="A tenant's limits",
)
async def get_tenant_limits(
    slug: Slug, actor: Injected[Actor], desk: Injected[Desk]
) -> TenantLimitsObject:
    async with desk.look() as session:
        return tenant_limits_object(await limits.tenant_limits(session, slug))


@patch(
    "/tenants/{slug:str}/limits",
    operation_id="setTenantLimits",
    summary="Change some of a tenant's limits",
)
async def set_tenant_limits(
    slug: Slug, data: JSONBody[LimitChanges], actor: Injected[Actor], desk: Injected[Desk]
) -> TenantLimitsObject:
    async with desk.change(actor) as change:
        changed = await limits.set_tenant_limits(change, slug, data.given())
    return tenant_limits_object(changed)


@get(
    "/tenants/{slug:str}/keys/{key:str}/limits",
    operation_id="getKeyLimits",
    summary="A key's own limits",
)
async def get_key_limits(
    slug: Slug, key: KeyId, actor: Injected[Actor], desk: Injected[Desk]
) -> LimitsObject:
    async with desk.look() as session:
        return LimitsObject(await limits.key_limits(session, slug, key))


@patch(
    "/tenants/{slug:str}/keys/{key:str}/limits",
    operation_id="setKeyLimits",
    summary="Change some of a key's limits",
    description="They hold beside the tenant's.",
)
async def set_key_limits(
    slug: Slug,
    key: KeyId,
    data: JSONBody[LimitChanges],
    actor: Injected[Actor],
    desk: Injected[Desk],
) -> LimitsObject:
    async with desk.change(actor) as change:
        changed = await limits.set_key_limits(change, slug, key, data.given())
    return LimitsObject(changed)


@get("/plans", operation_id="listPlans", summary="All plans")
async def list_plans(actor: Injected[Actor], desk: Injected[Desk]) -> Page[PlanObject]:
    async with desk.look() as session:
        found = await plans.list_plans(session)
    return Page([plan_object(plan) for plan in found], has_more=False)


@get("/plans/{name:str}", operation_id="getPlan", summary="One plan")
async def get_plan(name: PlanName, actor: Injected[Actor], desk: Injected[Desk]) -> PlanObject:
    async with desk.look() as session:
        return plan_object(await plans.find_plan(session, name))


@patch(
    "/plans/{name:str}",
    operation_id="setPlan",
    summary="Make a plan, or change some of its limits",
)
async def set_plan(
    name: PlanName, data: JSONBody[LimitChanges], actor: Injected[Actor], desk: Injected[Desk]
) -> PlanObject:
    async with desk.change(actor) as change:
        changed = await limits.set_plan(change, name, data.given())
    return plan_object(changed)


@delete(
    "/plans/{name:str}",
    status_code=200,
    operation_id="deletePlan",
    summary="Delete a plan that no tenant is on",
)
async def delete_plan(
    name: PlanName, actor: Injected[Actor], desk: Injected[Desk]
) -> DeletedObject:
    async with desk.change(actor) as change:
        await limits.delete_plan(change, name)
    return DeletedObject(name, "plan")


router = Router(
    "/v1/admin",
    route_handlers=[
        get_tenant_limits,
        set_tenant_limits,
        get_key_limits,
        set_key_limits,
        list_plans,
        get_plan,
        set_plan,
        delete_plan,
    ],
    dependencies=actor_dependency,
    tags=["Admin: limits"],
)
