"""Sends requests, each on a connection of its own that may have served one before."""

import asyncio
import os
import ssl
import time
from collections.abc import Callable
from urllib.parse import SplitResult, urlsplit

from gateway import __version__
from gateway.bench.connection import Connection
from gateway.bench.shape import Endpoint
from gateway.bench.stream import AnswerReader
from gateway.bench.timeline import Timeline
from gateway.bench.workload import Request

PATHS: dict[Endpoint, str] = {"completions": "/completions", "chat": "/chat/completions"}
IDLE_S_MAX = 2.0
"""Servers close idle connections, uvicorn after five seconds; a request must not meet that."""


class AddressError(Exception):
    """The message says what is wrong with the URL."""


class Address:
    """A server and the path of an endpoint. Raises AddressError."""

    def __init__(self, url: str, endpoint: Endpoint) -> None:
        parts = _split(url)
        self.host, self.port = parts.hostname or "", parts.port or _default_port(parts)
        self.tls = parts.scheme == "https"
        self.netloc = parts.netloc
        self.path = parts.path.rstrip("/") + PATHS[endpoint]


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018  # raises for what is not a number
    except ValueError as error:
        raise AddressError(f"this is not a URL: {error}.") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise AddressError("it must begin with http:// or https:// and a host.")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise AddressError("it must have no user, no query and no fragment.")
    if not (url.isascii() and url.isprintable()) or " " in url:
        raise AddressError("it has characters that no URL has.")
    return parts


def _default_port(parts: SplitResult) -> int:
    return 443 if parts.scheme == "https" else 80


class Client:
    """`redact`: takes secrets out of what a server said."""

    def __init__(
        self, address: Address, api_key: str, timeout_s: float, redact: Callable[[str], str]
    ) -> None:
        self._address, self._timeout_s = address, timeout_s
        self._api_key, self._redact = api_key, redact
        self._tls = ssl.create_default_context() if address.tls else None
        self._idle: list[Connection] = []
        """Whoever takes one out has it alone; the one used last is at the end."""

    async def send(self, request: Request, timeline: Timeline) -> None:
        """Fills the timeline, whatever happens. If this is cancelled, it just stops there."""
        reader = AnswerReader(timeline, self._redact)
        connection = idle = self._take()
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = idle or await self._connect()
                connection.send(self._head(request) + request.body, reader)
                await reader.done
                if idle and timeline.failure and timeline.failure.kind == "connection":
                    # Closed as we sent, and not a byte came back: RFC 9112, section 9.3.1, has a
                    # new one tried. llama.cpp does so after each stream, keep-alive or not.
                    timeline.failure = timeline.ended_s = None
                    reader = AnswerReader(timeline, self._redact)
                    connection = await self._connect()
                    connection.send(self._head(request) + request.body, reader)
                    await reader.done
        except TimeoutError:
            reader.fail("timeout", f"no end after {self._timeout_s:g} s", time.perf_counter())
        except OSError as error:
            reader.fail("connection", _reason(error), time.perf_counter())
        finally:
            if connection is not None:
                self._give(connection, fit=timeline.completed)

    def close(self) -> None:
        for connection in self._idle:
            connection.abort()

    def _take(self) -> Connection | None:
        usable_since = time.perf_counter() - IDLE_S_MAX
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and (connection.idle_since or 0.0) > usable_since:
                return connection
            connection.abort()
        return None

    def _give(self, connection: Connection, *, fit: bool) -> None:
        if fit and connection.usable:
            self._idle.append(connection)
        else:
            connection.abort()

    async def _connect(self) -> Connection:
        address = self._address
        _, connection = await asyncio.get_running_loop().create_connection(
            Connection, address.host, address.port, ssl=self._tls
        )
        return connection

    def _head(self, request: Request) -> bytes:
        key = request.target.api_key or self._api_key
        lines = [
            f"POST {self._address.path} HTTP/1.1",
            f"host: {self._address.netloc}",
            f"user-agent: loragate-bench/{__version__}",
            "accept: text/event-stream",
            "content-type: application/json",
            f"content-length: {len(request.body)}",
            *([f"authorization: Bearer {key}"] if key else []),
        ]
        return "\r\n".join([*lines, "", ""]).encode()


def _reason(error: OSError) -> str:
    if isinstance(error, ConnectionError) and error.errno is not None:
        return os.strerror(error.errno)  # asyncio's own words name the call instead
    return error.strerror or str(error)
