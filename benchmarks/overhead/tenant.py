"""A tenant for which the gateway has everything to do: limits and budgets, of the tenant and of its
key, that are never reached, and a price. The operator's own verbs make it."""

from sqlalchemy import func, select

from gateway.db import Database, async_url
from gateway.settings import Settings
from gateway.tenants.admin import keys, limits, tenants
from gateway.tenants.admin.desk import Change, Desk
from gateway.tenants.admin.shell import actor, with_desk
from gateway.tenants.usage import budgets, prices
from gateway.tenants.usage.rates import Rates
from gateway.tenants.usage.tables import UsageEntry

SLUG = "measured"
PLENTY = 10**9
MICROS = 1_000_000
PERIODS: tuple[budgets.Period, ...] = ("day", "month")
RATES = Rates(input_micros=MICROS, cached_input_micros=MICROS // 10, output_micros=3 * MICROS)
LIMITS = {
    "requests_per_minute": PLENTY,
    "tokens_per_minute": PLENTY,
    "concurrent_requests": PLENTY,
    "request_tokens_max": PLENTY,
}


def make(settings: Settings) -> str:
    """Its key. A gateway that runs already knows the price within `prices.REFRESH_S`."""

    async def act(desk: Desk) -> str:
        async with desk.change(actor()) as change:
            return await _made(desk, change)

    return with_desk(settings, act)


async def _made(desk: Desk, change: Change) -> str:
    await prices.set_price(change, RATES, model=prices.ANY)
    await tenants.create(change, SLUG, "", "", 1.0)
    issued = await keys.create(desk, change, SLUG)
    key = issued.row.public_id
    await limits.set_tenant_limits(change, SLUG, LIMITS)
    await limits.set_key_limits(change, SLUG, key, LIMITS)
    for period in PERIODS:
        terms = budgets.Terms(PLENTY * MICROS)
        await budgets.set_budget(change, SLUG, period, terms)
        await budgets.set_budget(change, SLUG, period, terms, key)
    return issued.text.reveal()


async def charged(settings: Settings) -> int:
    """How many requests stand in the ledger with what they cost."""
    database = Database(async_url(settings.database.url.reveal(), settings.data_dir))
    count = select(func.count()).where(UsageEntry.cost_nanos > 0)
    try:
        async with database.reading() as connection:
            return int((await connection.execute(count)).scalar_one())
    finally:
        await database.close()
