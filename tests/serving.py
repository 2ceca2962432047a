"""The app as clients see it, without a network: for tests of routes, errors and access."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from litestar import Litestar

from gateway.db import Database, async_url
from gateway.settings import Database as DatabaseSettings
from gateway.settings import Secret, Settings
from gateway.tenants import directory, keys
from gateway.tenants.keys import TENANT_SCOPES, IssuedKey
from gateway.tenants.pepper import open_key_hash


def settings_for(data_dir: Path, database_url: str = "") -> Settings:
    return Settings(data_dir=data_dir, database=DatabaseSettings(url=Secret(database_url)))


@asynccontextmanager
async def client_of(app: Litestar) -> AsyncIterator[httpx.AsyncClient]:
    """The app, started, and a client without a key."""
    asgi: Any = app  # Litestar types ASGI more closely than httpx
    transport = httpx.ASGITransport(asgi, raise_app_exceptions=False)
    async with (
        started(app),
        httpx.AsyncClient(transport=transport, base_url="http://gateway.test") as client,
    ):
        yield client


@asynccontextmanager
async def started(app: Litestar) -> AsyncIterator[None]:
    """The app's lifespan in a task of its own: a fixture is left in another than it was entered."""
    up, down = asyncio.Event(), asyncio.Event()

    async def live() -> None:
        async with app.lifespan():
            up.set()
            await down.wait()

    living = asyncio.create_task(live())
    waiting = asyncio.create_task(up.wait())
    await asyncio.wait((living, waiting), return_when=asyncio.FIRST_COMPLETED)
    try:
        if living.done():
            await living  # raises why it couldn't start
        yield
    finally:
        waiting.cancel()
        down.set()
        await asyncio.wait([living])
    await living


async def issue_key(
    settings: Settings,
    slug: str | None = "acme",
    scopes: tuple[str, ...] = TENANT_SCOPES,
    **options: Any,
) -> IssuedKey:
    """A key of the tenant `slug`, which is made if it isn't there; None: an admin key. `options`
    are those of `create_key`. The app must have started."""
    url = settings.database.url.reveal()
    database = Database(async_url(url, settings.data_dir))
    try:
        async with database.session() as session:
            tenant_id = None
            if slug is not None:
                tenants = {tenant.slug: tenant for tenant in await directory.list_tenants(session)}
                tenant = tenants.get(slug) or await directory.create_tenant(session, slug)
                tenant_id = tenant.id
            return await keys.create_key(
                session, open_key_hash(settings), tenant_id, "test", scopes, **options
            )
    finally:
        await database.close()


def bearer(issued: IssuedKey) -> dict[str, str]:
    return {"authorization": f"Bearer {issued.text.reveal()}"}
