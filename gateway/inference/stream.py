"""Server-sent events: an answer sent while it is made.

The status line waits for the first frame, so that whatever fails before it gets its own status.
A stream that has begun always ends with `[DONE]`, after an error with that error before it: clients
take a stream that just stops for a complete one.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import Any

import msgspec
from litestar.types import Receive, Scope, Send

from gateway.connection import ClientGone, unless_gone
from gateway.errors import ApiError
from gateway.inference.whole import encoded

logger = logging.getLogger(__name__)

HOLD_S = 30.0
"""How long the status line may wait: proxies give up on a server that is silent for a minute."""
KEEP_ALIVE_S = 10.0
STALL_S = 60.0
"""A client that takes nothing for so long is given up."""
LAST_WORD_S = 1.0
"""For the error frame of a stream that the server itself cuts."""

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}

Frames = AsyncGenerator[bytes, None]


def frame(message: object) -> bytes:
    return b"data: " + msgspec.json.encode(message) + b"\n\n"


class EventStream:
    """What a handler returns: an ASGI app that makes the frames while it sends them."""

    def __init__(self, frames: Frames, late_headers: Mapping[str, str] | None = None) -> None:
        """`late_headers`: read when the first frame is there."""
        self._frames = frames
        self._late_headers = {} if late_headers is None else late_headers

    async def start(self, send: Send) -> None:
        headers = encoded({**HEADERS, **self._late_headers})
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError as long as nothing was sent."""
        writer = _Writer(send, self)
        try:
            async with aclosing(self._frames):
                await unless_gone(receive, _with_ticks(writer, _send_all(writer, self._frames)))
        except ClientGone:
            if not writer.started:
                raise


class _Writer:
    """The response's sending side, shared by the frames and the keep-alive."""

    def __init__(self, send: Send, response: EventStream) -> None:
        self._send, self._response = send, response
        self._lock = asyncio.Lock()
        self.started = False
        self.since = time.monotonic()
        """When the last write began; the start, before the first."""
        self.writing = False

    async def write(self, data: bytes, *, more: bool = True) -> None:
        async with self._lock:
            self.since, self.writing = time.monotonic(), True
            if not self.started:
                self.started = True
                await self._response.start(self._send)
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
            self.writing = False


async def _send_all(writer: _Writer, frames: Frames) -> None:
    try:
        async for data in frames:
            await writer.write(data)
        await writer.write(DONE, more=False)
    except asyncio.CancelledError:
        if writer.started and not writer.writing:  # the server stops; or nobody hears it
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORD_S):
                    await writer.write(_last_words(_STOPPED), more=False)
        raise
    except Exception as error:
        if not writer.started:
            raise
        if not isinstance(error, ApiError):
            logger.exception("a stream failed")
            error = ApiError("The server failed while it answered.")
        await writer.write(_last_words(error), more=False)


_STOPPED = ApiError("The server stopped before the answer was complete.", code="server_stopped")


def _last_words(error: ApiError) -> bytes:
    return frame(error.body()) + DONE


async def _with_ticks(writer: _Writer, sending: Coroutine[Any, Any, None]) -> None:
    """Send, with a comment now and then through silences, and not for ever to a stalled reader."""
    work = asyncio.ensure_future(sending)
    ticks = asyncio.ensure_future(_ticks(writer))
    try:
        await asyncio.wait((work, ticks), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
        else:
            logger.info("a stream was cut: its reader took nothing for %d s", STALL_S)
    finally:
        for task in (work, ticks):
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task


async def _ticks(writer: _Writer) -> None:
    """Returns when the reader has stalled."""
    while True:
        silent = time.monotonic() - writer.since
        if writer.writing:
            if silent >= STALL_S:
                return
            await asyncio.sleep(min(STALL_S - silent, KEEP_ALIVE_S))
            continue
        patience = KEEP_ALIVE_S if writer.started else HOLD_S
        if silent >= patience:
            try:
                async with asyncio.timeout(STALL_S):
                    await writer.write(KEEP_ALIVE)
            except TimeoutError:
                return
        else:
            await asyncio.sleep(min(patience - silent, KEEP_ALIVE_S))
