"""What every request passes, first on its way in and last on its way out, whether a route matches
it or not: its id, the refusal while the server drains, an answer to any error that the inner app
let out, and the line in the access log.
"""

import asyncio
import logging
import re
import secrets
import time
from dataclasses import dataclass

import msgspec
from litestar.enums import ScopeType
from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send

from gateway.drain import Drain
from gateway.errors import ApiError, Overloaded
from gateway.rendering import INTERNAL_MESSAGE
from gateway.telemetry import redact, request_id

log = logging.getLogger(__name__)
access_log = logging.getLogger("gateway.access")

SANE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
HEALTH = "/health/"
CLIENT_GONE = 499
"""What the log says of a client that left before its answer began."""

Headers = list[tuple[bytes, bytes]]


class Boundary:
    """An ASGI app around an ASGI app."""

    def __init__(self, inner: ASGIApp, drain: Drain) -> None:
        self._inner = inner
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await self._inner(scope, receive, send)
            return
        exchange = Exchange(scope, _request_id(scope), send, time.perf_counter())
        scope["state"]["request_id"] = exchange.request_id
        token = request_id.set(exchange.request_id)
        try:
            if scope["path"].startswith(HEALTH):
                await self._inner(scope, receive, exchange.send)
            elif self._drain.begun:
                await _answer(exchange.send, _draining(), close=True)
            else:
                with self._drain.request():
                    await self._inner(scope, receive, exchange.send)
        except (Exception, asyncio.CancelledError) as error:
            if exchange.started or _was_cancelled(error):
                raise
            log.exception("unforeseen error in %s %s", scope["method"], exchange.route)
            await _answer(exchange.send, ApiError(INTERNAL_MESSAGE))
        finally:
            exchange.log()
            request_id.reset(token)


@dataclass
class Exchange:
    """One request and its answer."""

    scope: HTTPScope
    request_id: str
    client: Send
    began: float
    status: int = CLIENT_GONE
    started: bool = False

    @property
    def route(self) -> str:
        """Not the path itself: a client's own text has no end of values, and may hold anything."""
        return str(self.scope.get("path_template", "unknown route"))

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.started = message["status"], True
            headers: Headers = [*message["headers"], (b"x-request-id", self.request_id.encode())]
            message = {**message, "headers": headers}
        await self.client(message)

    def log(self) -> None:
        method, route = self.scope["method"], self.route
        access_log.log(
            logging.DEBUG if route.startswith(HEALTH) else logging.INFO,
            "%s %s %d",
            method,
            route,
            self.status,
            extra={
                "fields": {
                    "method": method,
                    "route": route,
                    "status": self.status,
                    "ms": round((time.perf_counter() - self.began) * 1000, 2),
                    "tenant": self.scope["state"].get("tenant"),
                }
            },
        )


def _request_id(scope: HTTPScope) -> str:
    """The client's own, if it is fit to be repeated in headers and logs, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            given = value.decode("latin-1")
            if SANE_ID.fullmatch(given) and redact(given) == given:
                return given
    return f"req_{secrets.token_hex(16)}"


def _draining() -> ApiError:
    return Overloaded("This server is shutting down. Try again: another one will answer.")


def _was_cancelled(error: BaseException) -> bool:
    """Whether somebody wanted this request to end, rather than something it awaited."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


async def _answer(send: Send, error: ApiError, *, close: bool = False) -> None:
    body = msgspec.json.encode(error.body())
    headers: Headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *([(b"connection", b"close")] if close else []),
        *((name.encode(), value.encode()) for name, value in error.headers().items()),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})
