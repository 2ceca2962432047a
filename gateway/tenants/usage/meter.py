"""What runs beside the requests to know what they use: prices, the ledger, alerts."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from gateway.db import Database
from gateway.settings import Settings
from gateway.tenants.usage.alerts import Alerts
from gateway.tenants.usage.ledger import Ledger
from gateway.tenants.usage.prices import PriceBook
from gateway.tenants.usage.webhooks import Webhooks

FOLDER = "usage"
"""In `data_dir`."""


def journal_folder(settings: Settings) -> Path:
    return settings.data_dir / FOLDER


class Meter:
    def __init__(self, settings: Settings, database: Database) -> None:
        usage = settings.usage
        self.prices = PriceBook(database)
        self._alerts = Alerts(database, Webhooks(usage.webhook_secret, local=usage.webhook_local))
        self.ledger = Ledger(database, journal_folder(settings), self._alerts.written)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Raises DatabaseUnavailable, OSError."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.prices.running())
            await stack.enter_async_context(self._alerts.running())
            await stack.enter_async_context(self.ledger.running())
            yield
