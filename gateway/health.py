"""Probes, without a key. `live` tells of this process alone: no restart brings a database back."""

import asyncio
from typing import Literal

from litestar import Response, get
from litestar.openapi.datastructures import ResponseSpec
from msgspec import Struct
from sqlalchemy import text

from gateway.db import Database
from gateway.drain import Drain
from gateway.engine.client import Engine
from gateway.errors import DatabaseUnavailable
from gateway.injection import Injected

DATABASE_S = 2.0
"""A probe waits for a second or two; an answer after that is of no use to it."""
RETRY_AFTER_S = "2"

PUBLIC: list[dict[str, list[str]]] = [{}]
"""Security requirement of routes that need no key."""


class Live(Struct, frozen=True):
    status: Literal["live"] = "live"


class Readiness(Struct, frozen=True):
    """Which part, if any, keeps this server from answering requests."""

    engine: Literal["ready", "loading"]
    database: Literal["ready", "unreachable"]
    server: Literal["ready", "draining"]

    @property
    def ready(self) -> bool:
        return self.engine == self.database == self.server == "ready"


@get(
    "/health/live",
    operation_id="live",
    summary="The process runs",
    tags=["Health"],
    security=PUBLIC,
)
async def live() -> Live:
    return Live()


@get(
    "/health/ready",
    operation_id="ready",
    summary="Requests can be answered",
    description="503 while the model is loading, the database is away or the server shuts down.",
    tags=["Health"],
    security=PUBLIC,
    responses={503: ResponseSpec(Readiness, description="Which part is not ready.")},
)
async def ready(
    engine: Injected[Engine], database: Injected[Database], drain: Injected[Drain]
) -> Response[Readiness]:
    readiness = Readiness(
        engine="loading" if engine.info is None else "ready",
        database="ready" if await _answers(database) else "unreachable",
        server="draining" if drain.begun else "ready",
    )
    if readiness.ready:
        return Response(readiness)
    return Response(readiness, status_code=503, headers={"retry-after": RETRY_AFTER_S})


async def _answers(database: Database) -> bool:
    try:
        async with asyncio.timeout(DATABASE_S), database.session() as session:
            await session.execute(text("SELECT 1"))
    except (DatabaseUnavailable, TimeoutError):
        return False
    return True


handlers = [live, ready]
