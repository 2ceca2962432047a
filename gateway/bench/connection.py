"""One HTTP/1.1 connection that is used for one request after another.

A protocol rather than a client with streams: bytes are read, timed and parsed in the one call that
the event loop makes, without waking a task. With chunks of one token that is 15 µs of CPU a chunk
where aiohttp takes 26 to 36; most of what is left is the kernel's.
"""

import asyncio
import time
from typing import Protocol, cast

import httptools


class Receiver(Protocol):
    """Takes one answer, in order: a head, bodies, and one of `end` and `lost`."""

    def head(self, status: int, content_type: str, now: float) -> None: ...
    def body(self, data: bytes, now: float) -> None: ...
    def end(self, now: float) -> None: ...
    def lost(self, reason: str, now: float) -> None: ...


class Connection(asyncio.Protocol):
    """Times are `time.perf_counter`'s, taken once for what one read brought."""

    def __init__(self) -> None:
        self._receiver: Receiver | None = None
        self._content_type = ""
        self._now = 0.0
        self.closed = False
        self.idle_since: float | None = None
        """When its last answer was complete; None: something is on its way."""

    @property
    def usable(self) -> bool:
        return self.idle_since is not None and not self.closed

    def send(self, request: bytes, receiver: Receiver) -> None:
        if self.closed:  # by the other side, since it was opened
            receiver.lost("the server closed the connection", time.perf_counter())
            return
        assert self._receiver is None
        self.idle_since = None
        self._receiver, self._content_type = receiver, ""
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(request)

    def abort(self) -> None:
        """Close it at once; whoever still waits is told nothing more."""
        self._receiver = None
        self.closed = True
        self._transport.abort()

    # --- called by the event loop ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.idle_since = time.perf_counter()

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._receiver is None:  # nothing was asked
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._lose(f"the answer is not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._now = time.perf_counter()
        self._lose(str(exc) if exc else "the server closed the connection")

    def _lose(self, reason: str) -> None:
        receiver = self._receiver
        self.abort()
        if receiver is not None:
            receiver.lost(reason, self._now)

    # --- called by the parser ---

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._content_type = value.decode("latin-1").lower()

    def on_headers_complete(self) -> None:
        if self._receiver is not None:
            self._receiver.head(self._parser.get_status_code(), self._content_type, self._now)

    def on_body(self, data: bytes) -> None:
        if self._receiver is not None:
            self._receiver.body(data, self._now)

    def on_message_complete(self) -> None:
        receiver, self._receiver = self._receiver, None
        if self._parser.should_keep_alive():
            self.idle_since = self._now
        else:
            self.abort()
        if receiver is not None:
            receiver.end(self._now)
