"""Alerts: that a budget's threshold was crossed is noted once, and sent until it has arrived.

The rows are the outbox. Whoever moves a row's `next_try_at` first has the delivery; should that
gateway die, the time that it has set comes, and another one tries.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any

import msgspec
from msgspec import Struct
from sqlalchemy import CursorResult, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.background import in_background
from gateway.db import Database, new_id, now
from gateway.errors import DatabaseUnavailable
from gateway.tenants.tables import Tenant
from gateway.tenants.usage.budgets import this_period
from gateway.tenants.usage.entries import Entry, spent_since
from gateway.tenants.usage.tables import Budget, BudgetAlert
from gateway.tenants.usage.webhooks import Webhooks

log = logging.getLogger(__name__)

CHECK_EVERY_S = 1.0
CHECK_SHARE_MAX = 0.05
"""Of the time; sums over a large ledger take theirs."""
CLAIM_S = 60.0
"""Longer than a delivery takes; after it, a gateway that died with one is stepped in for."""
BACKOFF_S = 5.0
BACKOFF_S_MAX = 3600.0
TRIES_MAX = 16
"""About seven hours, if none arrives."""
AT_ONCE = 16


class Message(Struct, frozen=True, kw_only=True):
    """What a webhook gets as JSON. A second delivery has the same id."""

    id: str
    type: str = "budget.alert"
    created_at: int
    tenant: str
    budget_id: str
    owner: str
    period: str
    period_start: int
    percent: int
    amount_nanos: int
    spent_nanos: int


class Alerts:
    def __init__(self, database: Database, webhooks: Webhooks) -> None:
        self._database = database
        self._webhooks = webhooks
        self._everyone = True
        """Whether all budgets are to be looked at: at the start, as what was written last may not
        have been."""
        self._spenders: set[str] = set()

    def written(self, entries: Sequence[Entry]) -> None:
        """These have come into the ledger."""
        self._spenders.update(entry.tenant_id for entry in entries if entry.cost_nanos)

    async def check(self) -> None:
        """Note the thresholds that were crossed. Raises DatabaseUnavailable."""
        if not (self._everyone or self._spenders):
            return
        everyone, spenders = self._everyone, self._spenders
        self._everyone, self._spenders = False, set()
        try:
            for budget in await self._budgets(None if everyone else spenders):
                await self._check(budget)
        except BaseException:
            self._everyone |= everyone
            self._spenders |= spenders
            raise

    async def _budgets(self, tenants: set[str] | None) -> Sequence[Budget]:
        query = select(Budget)
        if tenants is not None:
            query = query.where(Budget.tenant_id.in_(tenants))
        async with self._database.session() as session:
            return (await session.scalars(query)).all()

    async def _check(self, budget: Budget) -> None:
        start = this_period(budget)
        async with self._database.session() as session:
            noted = await session.scalars(
                select(BudgetAlert.percent).where(
                    BudgetAlert.budget_id == budget.id, BudgetAlert.period_start == start
                )
            )
            if not (left := set(budget.alert_percents) - set(noted)):
                return
            spent = await spent_since(await session.connection(), budget.owner, start)
        for percent in sorted(left):
            if spent * 100 >= percent * budget.amount_nanos:
                await self._note(budget, start, percent, spent)

    async def _note(self, budget: Budget, start: datetime, percent: int, spent: int) -> None:
        """In a transaction that begins with writing: SQLite may refuse it to one that has read."""
        async with self._database.session() as session:
            is_first = await _insert(await session.connection(), budget, start, percent, spent)
        if is_first:
            said = "%s has spent %d%% of its budget for the %s"
            log.warning(said, budget.owner, percent, budget.period)

    async def deliver(self) -> None:
        """Send what is due, once. Raises DatabaseUnavailable."""
        async with self._database.session() as session:
            due = (
                await session.execute(
                    select(BudgetAlert, Budget, Tenant.slug)
                    .join(Budget, BudgetAlert.budget_id == Budget.id)
                    .join(Tenant, Budget.tenant_id == Tenant.id)
                    .where(BudgetAlert.next_try_at <= now())
                    .order_by(BudgetAlert.next_try_at)
                    .limit(AT_ONCE)
                )
            ).all()
        await asyncio.gather(*(self._deliver(alert, budget, slug) for alert, budget, slug in due))

    async def _deliver(self, alert: BudgetAlert, budget: Budget, tenant: str) -> None:
        mine = now() + timedelta(seconds=CLAIM_S)
        if not await self._move(alert, alert.next_try_at, mine, tries=alert.tries + 1):
            return  # another gateway has it
        body = msgspec.json.encode(_message(alert, budget, tenant))
        failure = await self._webhooks.send(budget.webhook_url, body, int(time.time()))
        if not failure:
            await self._move(alert, mine, None, sent_at=now())
            return
        tries = alert.tries + 1
        following = None if tries >= TRIES_MAX else now() + timedelta(seconds=pause_s(tries))
        log.warning(
            "alert %s of %s has not arrived (%s), %s",
            alert.id,
            budget.owner,
            failure,
            "and is given up" if following is None else f"try {tries}",
        )
        await self._move(alert, mine, following)

    async def _move(
        self, alert: BudgetAlert, seen: datetime | None, to: datetime | None, **more: Any
    ) -> bool:
        """From one time to the next; False if somebody else has moved it."""
        async with self._database.session() as session:
            result = await session.execute(
                update(BudgetAlert)
                .where(BudgetAlert.id == alert.id, BudgetAlert.next_try_at == seen)
                .values(next_try_at=to, **more)
                .execution_options(synchronize_session=False)
            )
        assert isinstance(result, CursorResult)
        return result.rowcount == 1

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        try:
            async with in_background(self._forever(self.check), self._forever(self.deliver)):
                yield
        finally:
            await self._webhooks.close()

    async def _forever(self, act: Any) -> None:
        while True:
            began = time.monotonic()
            try:
                await act()
            except (DatabaseUnavailable, DBAPIError) as error:
                log.warning("alerts wait: %s", error)
            took_s = time.monotonic() - began
            await asyncio.sleep(max(CHECK_EVERY_S, took_s / CHECK_SHARE_MAX))


async def _insert(
    connection: AsyncConnection, budget: Budget, start: datetime, percent: int, spent: int
) -> bool:
    """False if it was noted before, by whichever gateway."""
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    moment = now()
    result = await connection.execute(
        insert(BudgetAlert)
        .values(
            id=new_id(),
            budget_id=budget.id,
            period_start=start,
            percent=percent,
            spent_nanos=spent,
            created_at=moment,
            tries=0,
            next_try_at=moment if budget.webhook_url else None,
        )
        .on_conflict_do_nothing()
    )
    return result.rowcount == 1


def _message(alert: BudgetAlert, budget: Budget, tenant: str) -> Message:
    return Message(
        id=alert.id,
        created_at=int(alert.created_at.timestamp()),
        tenant=tenant,
        budget_id=budget.id,
        owner=budget.owner,
        period=budget.period,
        period_start=int(alert.period_start.timestamp()),
        percent=alert.percent,
        amount_nanos=budget.amount_nanos,
        spent_nanos=alert.spent_nanos,
    )


def pause_s(tries: int) -> float:
    """After so many tries in vain: doubled each time, and spread, so that a receiver that was away
    does not get all of them at once."""
    return min(BACKOFF_S * 2.0 ** (tries - 1), BACKOFF_S_MAX) * random.uniform(0.5, 1.5)
