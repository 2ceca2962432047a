"""Budgets as they are stored, where keys need to know of them."""

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.tenants.usage.tables import Budget


async def copy_budgets(session: AsyncSession, owner: str, to: str) -> None:
    """The same amounts for another owner, who has spent nothing of them yet."""
    for budget in (await session.scalars(select(Budget).where(Budget.owner == owner))).all():
        session.add(
            Budget(
                tenant_id=budget.tenant_id,
                owner=to,
                period=budget.period,
                amount_nanos=budget.amount_nanos,
                hard=budget.hard,
                alert_percents=budget.alert_percents,
                webhook_url=budget.webhook_url,
            )
        )
