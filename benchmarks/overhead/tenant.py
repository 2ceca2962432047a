"""A tenant for which the gateway has everything to do: limits and budgets, of the tenant and of its
key, that are never reached, and a price."""

from gateway.db import Database, async_url
from gateway.settings import Settings
from gateway.tenants import directory, keys
from gateway.tenants.pepper import open_key_hash
from gateway.tenants.tables import LimitRow
from gateway.tenants.usage.tables import Budget, Price

PLENTY = 10**9
MICROS = 1_000_000


async def make(settings: Settings) -> str:
    """Its key. The gateway must have started."""
    database = Database(async_url(settings.database.url.reveal(), settings.data_dir))
    try:
        async with database.session() as session:
            tenant = await directory.create_tenant(session, "measured")
            issued = await keys.create_key(session, open_key_hash(settings), tenant.id)
            for owner in (f"tenant:{tenant.id}", f"key:{issued.row.id}"):
                session.add(
                    LimitRow(
                        owner=owner,
                        requests_per_minute=PLENTY,
                        tokens_per_minute=PLENTY,
                        concurrent_requests=PLENTY,
                        request_tokens_max=PLENTY,
                    )
                )
                for period in ("day", "month"):
                    amount = PLENTY * MICROS
                    session.add(
                        Budget(tenant_id=tenant.id, owner=owner, period=period, amount_nanos=amount)
                    )
            price = {"input_micros": MICROS, "cached_input_micros": MICROS // 10}
            session.add(Price(model="*", output_micros=3 * MICROS, **price))
    finally:
        await database.close()
    return issued.text.reveal()
