"""The operator's verbs for tenants, each with its entry in the audit trail."""

from typing import Any

from gateway.tenants import directory
from gateway.tenants.admin.desk import Change
from gateway.tenants.announcements import Changed
from gateway.tenants.tables import Tenant


async def create(change: Change, slug: str, name: str, plan: str, weight: float) -> Tenant:
    """Raises InvalidRequest, Conflict."""
    tenant = await directory.create_tenant(change.session, slug, name, plan=plan, weight=weight)
    await change.record(
        "tenant.create", _target(tenant), tenant_id=tenant.id, after=audited(tenant)
    )
    return tenant


async def update(
    change: Change,
    slug: str,
    *,
    name: str | None = None,
    plan: str | None = None,
    weight: float | None = None,
) -> Tenant:
    """What is None stays. Raises NotFound, Conflict, InvalidRequest."""
    tenant = await directory.tenant_by_slug(change.session, slug, change=True)
    before = audited(tenant)
    await directory.change_tenant(change.session, tenant, name=name, plan=plan, weight=weight)
    await _record(change, "tenant.set", tenant, before)
    return tenant


async def suspend(change: Change, slug: str) -> Tenant:
    """Its keys are refused with 403 until it is activated; a second time changes nothing.

    Raises NotFound, Conflict.
    """
    return await _move(change, slug, "tenant.suspend", "suspended")


async def activate(change: Change, slug: str) -> Tenant:
    """A second time changes nothing. Raises NotFound, Conflict."""
    return await _move(change, slug, "tenant.activate", "active")


async def delete(change: Change, slug: str) -> Tenant:
    """For good: its keys are unknown from now on, and its adapters out of reach. What it used stays
    on record, and its slug taken. Raises NotFound, Conflict."""
    return await _move(change, slug, "tenant.delete", "deleted")


async def _move(change: Change, slug: str, action: str, status: directory.Status) -> Tenant:
    tenant = await directory.tenant_by_slug(change.session, slug, change=True)
    before = audited(tenant)
    if tenant.status != status:
        tenant.status = status
        await _record(change, action, tenant, before)
    return tenant


async def _record(change: Change, action: str, tenant: Tenant, before: dict[str, Any]) -> None:
    if audited(tenant) != before:
        await change.record(
            action,
            _target(tenant),
            tenant_id=tenant.id,
            before=before,
            after=audited(tenant),
            told=Changed(tenants=(tenant.id,)),
        )


def audited(tenant: Tenant) -> dict[str, Any]:
    return {
        "slug": tenant.slug,
        "name": tenant.name,
        "plan": tenant.plan,
        "status": tenant.status,
        "weight": tenant.weight,
    }


def _target(tenant: Tenant) -> str:
    return f"tenant:{tenant.id}"
