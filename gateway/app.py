"""The HTTP side: builds its parts, wires the routes, opens and closes what must be.

Nothing else builds any of them. The engine, in a process of its own, is given: it takes longer to
load than all of this, and is started before.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

from litestar import Litestar, MediaType, Request, Router, get
from litestar.di import Provide
from litestar.openapi import OpenAPIConfig
from litestar.openapi.spec import Components, SecurityScheme

from gateway import __version__, health, inference
from gateway.adapters import routes as adapters
from gateway.adapters import version_routes as versions
from gateway.adapters.details import Details
from gateway.adapters.janitor import Janitor
from gateway.adapters.meaning import meaning_of
from gateway.adapters.resumable import routes as resumable
from gateway.adapters.resumable.uploads import Uploads
from gateway.adapters.store import AdapterStore, store_folder
from gateway.boundary import Boundary
from gateway.db import Database, async_url
from gateway.docs_page import DocsPage, only_the_page
from gateway.drain import Drain
from gateway.engine.client import Engine
from gateway.inference.generation import Walk
from gateway.inference.tokenizers import TokenizerSource
from gateway.injection import Injected, in_turn
from gateway.migrate import prepare
from gateway.openapi_failures import document_failures
from gateway.redis_client import connect
from gateway.rendering import exception_handlers
from gateway.settings import Settings
from gateway.tenants import routes as tenants
from gateway.tenants.admin.desk import Desk
from gateway.tenants.announcements import Announcer
from gateway.tenants.auth import Authenticator, bootstrap_key
from gateway.tenants.key_cache import KeyCache
from gateway.tenants.keys import Principal
from gateway.tenants.known_keys import known_key
from gateway.tenants.last_used import LastUsed
from gateway.tenants.limits.counting import CountingLimiter
from gateway.tenants.limits.degraded import DegradingCounters
from gateway.tenants.limits.local import LocalCounters
from gateway.tenants.limits.shared import SharedCounters
from gateway.tenants.networks import Sources
from gateway.tenants.pepper import open_key_hash
from gateway.tenants.usage import routes as usage
from gateway.tenants.usage.adapter_use import AdapterUse
from gateway.tenants.usage.entries import Spending
from gateway.tenants.usage.meter import Meter

DESCRIPTION = (
    "Many tenants' LoRA adapters on one shared base model. The routes under /v1 are those of "
    "OpenAI's API: set `base_url` and `api_key` of any client of theirs, and name an adapter, or "
    "the base model, as `model`."
)


def create_app(settings: Settings, engine: Engine) -> Litestar:
    """The ASGI app; nothing is opened until it starts.

    `app.state` holds `engine`, `meter` and `drain` for whoever runs the app. Raises SettingsError.
    """
    drain = Drain()
    database = Database(
        async_url(settings.database.url.reveal(), settings.data_dir), settings.database.pool_size
    )
    store = AdapterStore(store_folder(settings))
    uploads = Uploads(settings, database)
    tokenizers = TokenizerSource(engine)
    redis = connect(settings)
    announcer = Announcer(redis)
    sources = Sources(settings)
    counters = DegradingCounters(SharedCounters(redis), settings.limits) if redis else None
    limiter = CountingLimiter(counters or LocalCounters(), Spending(database))
    meter = Meter(settings, database)

    @asynccontextmanager
    async def lifespan(app: Litestar) -> AsyncIterator[None]:
        await prepare(settings)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(database.close)
            await _rehearse(database)
            store.open()
            stack.callback(store.sandbox.close)
            await stack.enter_async_context(uploads.running())
            if redis is not None:
                stack.push_async_callback(redis.aclose)
            key_hash = open_key_hash(settings)
            last_used = LastUsed(database)
            app.state.authenticator = Authenticator(
                KeyCache(database, announcer),
                key_hash,
                last_used,
                sources,
                bootstrap_key(settings, key_hash),
            )
            app.state.desk = Desk(database, key_hash, announcer, settings.keys.environment)
            await stack.enter_async_context(announcer.running())
            await stack.enter_async_context(last_used.running())
            if counters:
                await stack.enter_async_context(counters.watching())
            await stack.enter_async_context(limiter.running())
            await stack.enter_async_context(meter.running())  # closed after the engine's last word
            stack.push_async_callback(engine.close)
            await engine.start()
            await stack.enter_async_context(Janitor(database, store, engine).running())
            if settings.engine.model:
                ahead = asyncio.create_task(tokenizers.load_ahead(settings.engine.model))
                stack.callback(ahead.cancel)
            yield

    app = Litestar(
        route_handlers=[
            *health.handlers,
            openapi_document,
            *adapters.handlers,
            *resumable.handlers,
            *versions.handlers,
            *inference.handlers,
            *tenants.handlers,
            *usage.handlers,
        ],
        dependencies=in_turn(
            settings=settings,
            database=database,
            engine=engine,
            store=store,
            uploads=uploads,
            details=Details(database, store, engine, AdapterUse(database)),
            drain=drain,
        )
        | {
            "principal": Provide(_principal),
            "request_id": Provide(_request_id, sync_to_thread=False),
            "desk": Provide(_desk, sync_to_thread=False),
        },
        exception_handlers=exception_handlers,
        lifespan=[lifespan],
        openapi_config=_openapi(),
        request_max_body_size=settings.server.body_bytes_max,
        logging_config=None,
    )
    document_failures(app)
    app.state.engine, app.state.meter, app.state.drain = engine, meter, drain
    app.state.walk = partial(
        Walk,
        settings=settings,
        engine=engine,
        database=database,
        store=store,
        tokenizers=tokenizers,
        limiter=limiter,
        meter=meter,
    )
    # around the router, not in it: requests that match no route pass, too
    app.asgi_handler = Boundary(app.asgi_handler, drain)
    return app


async def _rehearse(database: Database) -> None:
    """Ask once what most requests ask, so that no client waits while it is compiled."""
    async with database.reading() as connection:
        await known_key(connection, "")
        await meaning_of(connection, "", "none")


async def _principal(request: Request[Any, Any, Any], drain: Injected[Drain]) -> Principal:
    """`drain` makes it the last in turn, see `in_turn`."""
    authenticator: Authenticator = request.app.state.authenticator
    return await authenticator(request)


def _desk(request: Request[Any, Any, Any]) -> Desk:
    desk: Desk = request.app.state.desk
    return desk


def _request_id(request: Request[Any, Any, Any]) -> str:
    return str(request.scope["state"]["request_id"])


@get("/openapi.json", include_in_schema=False, media_type=MediaType.JSON, sync_to_thread=False)
def openapi_document(request: Request[Any, Any, Any]) -> dict[str, Any]:
    return request.app.openapi_schema.to_schema()


def _openapi() -> OpenAPIConfig:
    return OpenAPIConfig(
        title="Loragate",
        version=__version__,
        description=DESCRIPTION,
        components=Components(
            security_schemes={
                "bearer": SecurityScheme(
                    type="http", scheme="bearer", description="An API key, `lg_sk_…`."
                )
            }
        ),
        security=[{"bearer": []}],
        render_plugins=[DocsPage()],
        openapi_router=Router(
            "/docs", route_handlers=[], include_in_schema=False, before_request=only_the_page
        ),
    )
