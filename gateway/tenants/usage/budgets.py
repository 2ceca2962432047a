"""Budgets: what a tenant, or one of its keys, may spend in a day or a month."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal

from msgspec import Struct
from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.db import now
from gateway.errors import InvalidRequest, NotFound
from gateway.tenants import directory, keys
from gateway.tenants.admin.desk import Change
from gateway.tenants.announcements import Changed
from gateway.tenants.limits.bounds import period_of
from gateway.tenants.limits.rows import key_owner, tenant_owner
from gateway.tenants.usage.tables import Budget, BudgetAlert

Period = Literal["day", "month"]

AMOUNT_NANOS_MAX = 10**18
"""A thousand million of the currency; sums of nanos fit 64 bits."""
PERCENTS_MAX = 10
PERCENT_MAX = 1000


class Terms(Struct, frozen=True):
    """What a budget says, whoever's it is."""

    amount_nanos: int
    hard: bool = True
    alert_percents: tuple[int, ...] = ()
    webhook_url: str = ""
    """Already found fit by `webhooks.check_setting`."""


async def set_budget(
    change: Change, slug: str, period: Period, terms: Terms, key: str | None = None
) -> Budget:
    """Make or replace the budget of a tenant, or of its `key` (an id or public id).

    Its thresholds count anew: what it has alerted of may be alerted of again. Raises
    InvalidRequest, NotFound, Conflict.
    """
    _check(terms)
    session = change.session
    tenant_id = (await directory.tenant_by_slug(session, slug, change=True)).id
    owner = await _owner(session, tenant_id, key)
    budget = await session.scalar(
        select(Budget).where(
            Budget.tenant_id == tenant_id, Budget.owner == owner, Budget.period == period
        )
    )
    before = None if budget is None else audited(budget)
    if budget is None:
        budget = Budget(tenant_id=tenant_id, owner=owner, period=period)
        session.add(budget)
    budget.amount_nanos = terms.amount_nanos
    budget.hard = terms.hard
    budget.alert_percents = sorted(set(terms.alert_percents))
    budget.webhook_url = terms.webhook_url
    await session.flush()
    await session.execute(delete(BudgetAlert).where(BudgetAlert.budget_id == budget.id))
    await change.record(
        "budget.set",
        f"budget:{budget.id}",
        tenant_id=tenant_id,
        before=before,
        after=audited(budget),
        told=Changed(tenants=(tenant_id,)),
    )
    return budget


async def list_budgets(session: AsyncSession, slug: str) -> Sequence[Budget]:
    """Raises NotFound."""
    tenant = await directory.tenant_by_slug(session, slug)
    query = select(Budget).where(Budget.tenant_id == tenant.id).order_by(Budget.id)
    return (await session.scalars(query)).all()


async def delete_budget(change: Change, slug: str, budget_id: str) -> Budget:
    """Raises NotFound, Conflict."""
    session = change.session
    tenant_id = (await directory.tenant_by_slug(session, slug, change=True)).id
    budget = None
    if keys.ID.fullmatch(budget_id):  # anything else is not even looked up
        named = Budget.tenant_id == tenant_id, Budget.id == budget_id
        budget = await session.scalar(select(Budget).where(*named))
    if budget is None:
        raise NotFound(f"This tenant has no budget {budget_id[:100]!r}.")
    await session.execute(delete(Budget).where(Budget.id == budget.id))
    await change.record(
        "budget.delete",
        f"budget:{budget.id}",
        tenant_id=tenant_id,
        before=audited(budget),
        told=Changed(tenants=(tenant_id,)),
    )
    return budget


def audited(budget: Budget) -> dict[str, Any]:
    return {
        "owner": budget.owner,
        "period": budget.period,
        "amount_nanos": budget.amount_nanos,
        "hard": budget.hard,
        "alert_percents": list(budget.alert_percents),
        "webhook_url": budget.webhook_url,
    }


def _check(terms: Terms) -> None:
    if not 0 <= terms.amount_nanos <= AMOUNT_NANOS_MAX:
        raise InvalidRequest(
            f"A budget lies between 0 and {AMOUNT_NANOS_MAX} nanos.", param="amount_nanos"
        )
    percents = set(terms.alert_percents)
    if len(percents) > PERCENTS_MAX or not all(1 <= one <= PERCENT_MAX for one in percents):
        raise InvalidRequest(
            f"Alerts are up to {PERCENTS_MAX} thresholds from 1 to {PERCENT_MAX} percent.",
            param="alert_percents",
        )


async def _owner(session: AsyncSession, tenant_id: str, key: str | None) -> str:
    if key is None:
        return tenant_owner(tenant_id)
    return key_owner((await keys.find_key(session, tenant_id, key)).id)


def this_period(budget: Budget) -> datetime:
    """When the one began that runs now, in UTC."""
    period: Period = "day" if budget.period == "day" else "month"
    return period_of(period, now())[0]
