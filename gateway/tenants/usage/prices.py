"""What tokens cost: rates, the rows that set them, and the book that requests look into.

Of the prices that have begun, the most particular counts, and of equals the latest:

    the tenant's for the adapter > everyone's for the adapter > the tenant's for the base model
    > the tenant's for * > everyone's for the base model > everyone's for *

An adapter is priced by its name, however the request calls it. Where there is none, it is free.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.background import in_background
from gateway.db import Database, now
from gateway.errors import DatabaseUnavailable, InvalidRequest
from gateway.tenants import directory
from gateway.tenants.admin.desk import Change
from gateway.tenants.names import can_be_model
from gateway.tenants.usage.rates import FREE, Rates
from gateway.tenants.usage.tables import Price

log = logging.getLogger(__name__)

REFRESH_S = 5.0
"""A new price is in force everywhere after so long."""
MICROS_MAX = 10**12
"""A million of the currency for a million tokens: more is a slip, and sums must fit 64 bits."""
ANY = "*"
GRACE = timedelta(minutes=1)
"""Whoever asks for a price from now on says a moment that is over when it is read."""


async def set_price(
    change: Change,
    rates: Rates,
    *,
    model: str,
    tenant: str | None = None,
    valid_from: datetime | None = None,
) -> Price:
    """A new row; those before it stay as they were, for what was used under them. `tenant`: a slug,
    None for everyone.

    Raises InvalidRequest, NotFound, Conflict.
    """
    for name in Rates.__struct_fields__:
        if not 0 <= getattr(rates, name) <= MICROS_MAX:
            raise InvalidRequest(
                f"A price lies between 0 and {MICROS_MAX} millionths for a million tokens.",
                param=name,
            )
    if not can_be_model(model):
        raise InvalidRequest(
            "A price is for the base model, an adapter's name, or `*` for all.", param="model"
        )
    moment = now()
    if valid_from is not None and valid_from < moment - GRACE:
        raise InvalidRequest(
            "A price cannot begin in the past: what was used is charged already.",
            param="valid_from",
        )
    tenant_id = None
    if tenant is not None:
        tenant_id = (await directory.tenant_by_slug(change.session, tenant, change=True)).id
    before = (await _latest(change.session, moment)).get((tenant_id, model))
    price = Price(
        tenant_id=tenant_id,
        model=model,
        input_micros=rates.input_micros,
        cached_input_micros=rates.cached_input_micros,
        output_micros=rates.output_micros,
        valid_from=max(valid_from or moment, moment),
    )
    change.session.add(price)
    await change.session.flush()
    await change.record(
        "price.set",
        f"price:{price.id}",
        tenant_id=tenant_id,
        before=None if before is None else audited(before),
        after=audited(price),
    )
    return price


async def list_prices(session: AsyncSession) -> Sequence[Price]:
    """Those in force, and those that will be."""
    moment = now()
    coming = await session.scalars(
        select(Price).where(Price.valid_from > moment).order_by(Price.valid_from, Price.id)
    )
    inforce = (await _latest(session, moment)).values()
    return [*sorted(inforce, key=lambda row: (row.tenant_id or "", row.model)), *coming]


async def _latest(session: AsyncSession, moment: datetime) -> dict[tuple[str | None, str], Price]:
    """By tenant and model, of all that have begun."""
    begun = (
        select(
            Price.id,
            func.row_number()
            .over(
                partition_by=(Price.tenant_id, Price.model),
                order_by=(Price.valid_from.desc(), Price.id.desc()),
            )
            .label("place"),
        )
        .where(Price.valid_from <= moment)
        .subquery()
    )
    latest = select(Price).join(begun, begun.c.id == Price.id).where(begun.c.place == 1)
    return {(row.tenant_id, row.model): row for row in await session.scalars(latest)}


def audited(price: Price) -> dict[str, Any]:
    return {
        "model": price.model,
        "input_micros": price.input_micros,
        "cached_input_micros": price.cached_input_micros,
        "output_micros": price.output_micros,
        "valid_from": price.valid_from.isoformat(timespec="seconds"),
    }


class PriceBook:
    """All prices in force, in memory: a request never waits for them."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: dict[tuple[str | None, str], Rates] = {}

    def rates(self, tenant_id: str, model: str, base: str) -> Rates:
        """`model`: the adapter's name, or `base` for the base model itself."""
        for place in _order(tenant_id, model, base):
            found = self._known.get(place)
            if found is not None:
                return found
        return FREE

    async def refresh(self) -> None:
        """Raises DatabaseUnavailable; what was known is then believed on."""
        async with self._database.session() as session:
            rows = await _latest(session, now())
        self._known = {
            place: Rates(row.input_micros, row.cached_input_micros, row.output_micros)
            for place, row in rows.items()
        }

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Read once before anything is served, and again now and then. Raises
        DatabaseUnavailable."""
        await self.refresh()
        async with in_background(self._refresh_forever()):
            yield

    async def _refresh_forever(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                await self.refresh()
            except DatabaseUnavailable:
                log.warning("prices not read: no database; those known are believed on")


def _order(tenant_id: str, model: str, base: str) -> Iterator[tuple[str | None, str]]:
    yield tenant_id, model
    if model != base:
        yield None, model
        yield tenant_id, base
    yield tenant_id, ANY
    yield None, base
    yield None, ANY
