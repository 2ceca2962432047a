"""The operator's verbs for limits and plans, each with its entry in the audit trail."""

from collections.abc import Mapping

import msgspec
from msgspec import Struct
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.tenants import directory, keys, plans
from gateway.tenants.admin.desk import Change
from gateway.tenants.announcements import Changed
from gateway.tenants.limits import rows
from gateway.tenants.limits.rules import Limits
from gateway.tenants.plans import Plan

Changes = Mapping[str, int | None]
"""None: no limit of this kind."""


class TenantLimits(Struct, frozen=True):
    own: Limits
    effective: Limits
    """Its own, and its plan's where it has none."""


async def tenant_limits(session: AsyncSession, slug: str) -> TenantLimits:
    """Raises NotFound."""
    tenant = await directory.tenant_by_slug(session, slug)
    own = await rows.limits_of(session, rows.tenant_owner(tenant.id))
    plan = await rows.limits_of(session, rows.plan_owner(tenant.plan))
    return TenantLimits(own, rows.either(own, plan))


async def key_limits(session: AsyncSession, slug: str, key: str) -> Limits:
    """Raises NotFound."""
    tenant = await directory.tenant_by_slug(session, slug)
    row = await keys.find_key(session, tenant.id, key)
    return await rows.limits_of(session, rows.key_owner(row.id))


async def set_tenant_limits(change: Change, slug: str, changes: Changes) -> TenantLimits:
    """Raises NotFound, Conflict, InvalidRequest."""
    tenant = await directory.tenant_by_slug(change.session, slug, change=True)
    told = Changed(tenants=(tenant.id,))
    await _set(change, rows.tenant_owner(tenant.id), changes, tenant.id, told)
    return await tenant_limits(change.session, slug)


async def set_key_limits(change: Change, slug: str, key: str, changes: Changes) -> Limits:
    """Raises NotFound, Conflict, InvalidRequest."""
    tenant = await directory.tenant_by_slug(change.session, slug, change=True)
    row = await keys.find_key(change.session, tenant.id, key, change=True)
    told = Changed(keys=(row.public_id,))
    return await _set(change, rows.key_owner(row.id), changes, tenant.id, told)


async def set_plan(change: Change, name: str, changes: Changes) -> Plan:
    """Make it, if it isn't there. Raises InvalidRequest."""
    plans.check_plan_name(name)
    told = Changed(everything=True)  # it may have any number of tenants
    return Plan(name, await _set(change, rows.plan_owner(name), changes, None, told))


async def delete_plan(change: Change, name: str) -> None:
    """Raises NotFound, Conflict."""
    plan = await plans.delete_plan(change.session, name)
    await change.record(
        "plan.delete", rows.plan_owner(name), tenant_id=None, before=_audited(plan.limits)
    )


async def _set(
    change: Change, owner: str, changes: Changes, tenant_id: str | None, told: Changed
) -> Limits:
    before, after = await rows.change_limits(change.session, owner, changes)
    await change.record(
        "limits.set",
        owner,
        tenant_id=tenant_id,
        before=_audited(before),
        after=_audited(after),
        told=told,
    )
    return after


def _audited(limits: Limits) -> dict[str, int]:
    told: dict[str, int | None] = msgspec.structs.asdict(limits)
    return {kind: value for kind, value in told.items() if value is not None}
