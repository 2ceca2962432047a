"""The OpenAI API. `handlers` is all that the app needs of it."""

from litestar import Router
from litestar.di import Provide

from gateway.adapters.store import AdapterStore
from gateway.db import Database
from gateway.engine.client import Engine
from gateway.inference import chat, completions, models
from gateway.inference.generation import Walk
from gateway.inference.tokenizers import TokenizerSource
from gateway.injection import Injected
from gateway.settings import Settings
from gateway.tenants.keys import Principal
from gateway.tenants.limits.limiter import Limiter
from gateway.tenants.usage.meter import Meter


def _walk(
    principal: Injected[Principal],
    settings: Injected[Settings],
    engine: Injected[Engine],
    database: Injected[Database],
    store: Injected[AdapterStore],
    tokenizers: Injected[TokenizerSource],
    limiter: Injected[Limiter],
    meter: Injected[Meter],
) -> Walk:
    return Walk(principal, settings, engine, database, store, tokenizers, limiter, meter)


handlers = [
    Router(
        path="/",
        route_handlers=[
            chat.create_chat_completion,
            completions.create_completion,
            models.list_models,
            models.retrieve_model,
        ],
        dependencies={"walk": Provide(_walk, sync_to_thread=False)},
    )
]
