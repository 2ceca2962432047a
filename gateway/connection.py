"""What a handler may want of a client's connection: its body, and to know when it is gone."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from litestar import Request
from litestar.types import Receive

from gateway.errors import ApiError, InvalidRequest, TooLarge

T = TypeVar("T")

SILENCE_S = 60.0
"""A body of which nothing comes for so long is given up: its sender would hold a place for ever."""


class ClientGone(ApiError):
    """The client left before its answer; nobody reads this error, but a log line may."""

    status, type, code = 499, "invalid_request_error", "client_closed_request"

    def __init__(self) -> None:
        super().__init__("The client closed the connection.")


async def chunks(request: Request[Any, Any, Any], bytes_max: int) -> AsyncIterator[bytes]:
    """The body as it arrives, nothing kept.

    Raises TooLarge past `bytes_max`, InvalidRequest if it stops to arrive, and ClientGone.
    """
    _refuse_longer(request, bytes_max)
    size, more = 0, True
    while more:
        try:
            async with asyncio.timeout(SILENCE_S):
                message = await request.receive()
        except TimeoutError:
            raise InvalidRequest(
                f"The request body is not complete: nothing came for {SILENCE_S:.0f} s."
            ) from None
        if message["type"] != "http.request":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > bytes_max:
            raise _too_large(bytes_max)
        if chunk:
            yield chunk
        more = message.get("more_body", False)


async def read_body(request: Request[Any, Any, Any], bytes_max: int) -> bytes:
    """The whole body, of which never more than `bytes_max` are kept. Raises as `chunks` does."""
    return b"".join([chunk async for chunk in chunks(request, bytes_max)])


def _refuse_longer(request: Request[Any, Any, Any], bytes_max: int) -> None:
    """Raise TooLarge if the request says itself that its body is longer."""
    for name, length in request.scope["headers"]:
        if name == b"content-length" and length.isdigit() and int(length[:20]) > bytes_max:
            raise _too_large(bytes_max)


def _too_large(bytes_max: int) -> TooLarge:
    return TooLarge(f"The request body is larger than the {bytes_max} bytes that are read here.")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do `work`, but cancel it as soon as the client leaves, and then raise ClientGone.

    The body must have been read: the next message from `receive` can only be the disconnect.
    Litestar by itself lets a handler go on when nobody waits for it any more. The work is done in
    the caller's own task.
    """
    working = asyncio.current_task()
    assert working is not None
    cancelling = working.cancelling()
    client_gone = False

    async def watch() -> None:
        nonlocal client_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        client_gone = True
        working.cancel()

    watching = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if client_gone and working.uncancel() <= cancelling:
            raise ClientGone from None
        raise
    finally:
        if not watching.done():
            watching.cancel()
            await asyncio.wait((watching,))
