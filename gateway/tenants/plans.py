"""Plans: limits under a name, which hold for each tenant of the plan that has none of its own.

A plan is its row of limits; there is nothing else to it.
"""

from collections.abc import Sequence

from msgspec import Struct
from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.errors import Conflict, InvalidRequest, NotFound
from gateway.tenants.limits.rows import as_limits, plan_owner
from gateway.tenants.limits.rules import Limits
from gateway.tenants.names import SLUG
from gateway.tenants.tables import LimitRow, Tenant


class Plan(Struct, frozen=True):
    name: str
    limits: Limits


async def list_plans(session: AsyncSession) -> Sequence[Plan]:
    """By name."""
    prefix = plan_owner("")
    query = select(LimitRow).where(LimitRow.owner.startswith(prefix)).order_by(LimitRow.owner)
    return [_plan(row) for row in (await session.scalars(query)).all()]


async def find_plan(session: AsyncSession, name: str) -> Plan:
    """Raises NotFound."""
    row = await session.get(LimitRow, plan_owner(name)) if SLUG.fullmatch(name) else None
    if row is None:
        raise NotFound(f"There is no plan {name[:100]!r}. See `loragate plans list`.")
    return _plan(row)


async def delete_plan(session: AsyncSession, name: str) -> Plan:
    """Raises NotFound and, while tenants are on it, Conflict."""
    plan = await find_plan(session, name)
    # before the look at the tenants: whoever puts one on the plan waits for us, or we for him
    await session.execute(delete(LimitRow).where(LimitRow.owner == plan_owner(name)))
    on_it = select(Tenant.slug).where(Tenant.plan == name, Tenant.status != "deleted").limit(1)
    if (slug := await session.scalar(on_it)) is not None:
        raise Conflict(f"The plan {name!r} has tenants, {slug!r} for one. Give them another first.")
    return plan


def check_plan_name(name: str) -> None:
    """Raises InvalidRequest."""
    if not SLUG.fullmatch(name):
        raise InvalidRequest(
            "A plan's name is 1 to 63 lower-case letters, digits and inner hyphens, like `pro`.",
            param="plan",
        )


async def check_plan(session: AsyncSession, name: str) -> None:
    """That a tenant can be on it, until the transaction ends; empty: on none.

    Raises InvalidRequest.
    """
    if not name:
        return
    check_plan_name(name)
    owner = select(LimitRow.owner).where(LimitRow.owner == plan_owner(name))
    if await session.scalar(owner.with_for_update(read=True)) is None:
        raise InvalidRequest(
            f"There is no plan {name!r}. `loragate plans set {name}` makes it.", param="plan"
        )


def _plan(row: LimitRow) -> Plan:
    return Plan(row.owner.removeprefix(plan_owner("")), as_limits(row))
