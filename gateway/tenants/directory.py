"""The tenants: create, list, find, change, and end."""

import math
from collections.abc import Sequence
from typing import Literal

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.errors import Conflict, InvalidRequest, NotFound
from gateway.tenants.names import SLUG, checked_name
from gateway.tenants.plans import check_plan
from gateway.tenants.tables import Tenant

Status = Literal["active", "suspended", "deleted"]

WEIGHT_MIN, WEIGHT_MAX = 0.01, 1000.0


async def create_tenant(
    session: AsyncSession, slug: str, name: str = "", *, plan: str = "", weight: float = 1.0
) -> Tenant:
    """Raises InvalidRequest or, where the slug is taken, Conflict; the session is then spent."""
    if not SLUG.fullmatch(slug):
        raise InvalidRequest(
            "A tenant's slug is 1 to 63 lower-case letters, digits and inner hyphens, "
            "like `acme` or `acme-eu`.",
            param="slug",
        )
    await check_plan(session, plan)
    tenant = Tenant(
        slug=slug,
        name=checked_name(name, "A tenant") or slug,
        plan=plan,
        weight=_checked_weight(weight),
        status="active",
    )
    session.add(tenant)
    try:
        await session.flush()
    except IntegrityError:
        raise Conflict(f"There is already a tenant {slug!r}.", param="slug") from None
    return tenant


async def list_tenants(session: AsyncSession) -> Sequence[Tenant]:
    return (await session.scalars(select(Tenant).order_by(Tenant.slug))).all()


async def tenants_after(
    session: AsyncSession, after: str, limit: int, status: Status | None = None
) -> Sequence[Tenant]:
    """In the order in which they were made, those after the id `after`."""
    query = select(Tenant).where(Tenant.id > after).order_by(Tenant.id).limit(limit)
    if status is not None:
        query = query.where(Tenant.status == status)
    return (await session.scalars(query)).all()


async def tenant_by_slug(session: AsyncSession, slug: str, *, change: bool = False) -> Tenant:
    """To change it, nobody else does until the transaction ends, and it must not be deleted.

    Raises NotFound, Conflict.
    """
    query = select(Tenant).where(Tenant.slug == slug)
    tenant = None
    if SLUG.fullmatch(slug):
        tenant = await session.scalar(query.with_for_update(key_share=True) if change else query)
    if tenant is None:
        raise NotFound(f"There is no tenant {slug[:100]!r}. See `loragate tenants list`.")
    if change and tenant.status == "deleted":
        raise Conflict(f"The tenant {slug!r} has been deleted.")
    return tenant


async def change_tenant(
    session: AsyncSession,
    tenant: Tenant,
    *,
    name: str | None = None,
    plan: str | None = None,
    weight: float | None = None,
) -> None:
    """What is None stays. Raises InvalidRequest."""
    if name is not None:
        tenant.name = checked_name(name, "A tenant") or tenant.slug
    if plan is not None:
        await check_plan(session, plan)
        tenant.plan = plan
    if weight is not None:
        tenant.weight = _checked_weight(weight)


def _checked_weight(weight: float) -> float:
    if not (math.isfinite(weight) and WEIGHT_MIN <= weight <= WEIGHT_MAX):
        raise InvalidRequest(
            f"A tenant's weight is a number from {WEIGHT_MIN:g} to {WEIGHT_MAX:g}.", param="weight"
        )
    return weight
