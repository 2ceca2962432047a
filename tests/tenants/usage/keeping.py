"""A tenant and a ledger, for tests of what is written into it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from sqlalchemy import select

from gateway.db import Database
from gateway.tenants import directory
from gateway.tenants.admin.desk import Change
from gateway.tenants.audit.trail import Actor
from gateway.tenants.keys import Principal
from gateway.tenants.usage.ledger import Ledger, Record
from gateway.tenants.usage.rates import Rates
from gateway.tenants.usage.tables import UsageEntry

RATES = Rates(input_micros=1000, cached_input_micros=100, output_micros=3000)


async def make_principal(database: Database, slug: str = "acme") -> Principal:
    async with database.session() as session:
        tenant = await directory.create_tenant(session, slug)
    return Principal(tenant.id, slug, f"key-of-{slug}", frozenset(["inference"]))


@asynccontextmanager
async def changing(database: Database) -> AsyncIterator[Change]:
    """One of the operator's changes, of which nobody is told."""
    async with database.writing() as session:
        yield Change(session, Actor("shell:test"))


def ledger_of(database: Database, folder: Path) -> Ledger:
    return Ledger(database, folder / "usage")


def opened(ledger: Ledger, principal: Principal, name: str = "r1") -> Record:
    return ledger.open(
        request_id=name, principal=principal, model="base", adapter_digest=None, rates=RATES
    )


async def rows_of(database: Database) -> Sequence[UsageEntry]:
    async with database.session() as session:
        return (await session.scalars(select(UsageEntry).order_by(UsageEntry.request_id))).all()


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  (nothing tells of it)
            await asyncio.sleep(0.005)
