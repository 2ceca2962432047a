"""Work for a client ends when the client leaves, and only then."""

import asyncio
from typing import Any

import pytest
from litestar.types import HTTPDisconnectEvent, HTTPRequestEvent

from gateway.connection import ClientGone, unless_gone

PART: HTTPRequestEvent = {"type": "http.request", "body": b"", "more_body": False}
GONE: HTTPDisconnectEvent = {"type": "http.disconnect"}


class Client:
    """`turns`: how often the loop turns before each message."""

    def __init__(self, turns: int = 0) -> None:
        self.left = asyncio.Event()
        self.asked = 0
        self._turns = turns

    async def receive(self) -> Any:
        self.asked += 1
        for _ in range(self._turns):
            await asyncio.sleep(0)
        if self.asked == 1:  # a late part of the body
            return PART
        await self.left.wait()
        return GONE


async def forever(begun: asyncio.Event, ended: list[str]) -> None:
    begun.set()
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("cleaned up")


async def test_work_that_ends_gives_its_result_and_stops_the_watch() -> None:
    client = Client()

    async def work() -> int:
        await asyncio.sleep(0.001)
        return 7

    assert await unless_gone(client.receive, work()) == 7
    client.left.set()
    await asyncio.sleep(0.01)
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


@pytest.mark.parametrize("turns", [0, 3])
async def test_work_is_cancelled_as_soon_as_the_client_leaves(turns: int) -> None:
    client, begun, ended = Client(turns), asyncio.Event(), list[str]()
    task = asyncio.create_task(unless_gone(client.receive, forever(begun, ended)))
    await begun.wait()
    client.left.set()
    with pytest.raises(ClientGone):
        await asyncio.wait_for(task, 1.0)
    assert ended == ["cleaned up"]
    assert not task.cancelling()


async def test_a_client_that_has_left_before_is_noticed_at_once() -> None:
    async def receive() -> Any:
        return GONE

    ended = list[str]()
    with pytest.raises(ClientGone):
        await unless_gone(receive, forever(asyncio.Event(), ended))
    assert ended == ["cleaned up"]


async def test_who_is_cancelled_from_outside_is_not_told_that_the_client_left() -> None:
    client, begun, ended = Client(), asyncio.Event(), list[str]()
    task = asyncio.create_task(unless_gone(client.receive, forever(begun, ended)))
    await begun.wait()
    task.cancel()
    client.left.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["cleaned up"]


async def test_an_error_of_the_work_comes_out_as_it_is() -> None:
    async def work() -> None:
        raise ValueError("of the work")

    client = Client()
    with pytest.raises(ValueError, match="of the work"):
        await unless_gone(client.receive, work())


async def test_a_failing_connection_does_not_end_the_work() -> None:
    failures = list[object]()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failures.append(context["exception"]))
    broken = loop.create_future()

    async def receive() -> Any:
        await broken

    async def work() -> int:
        broken.set_exception(OSError("cut"))
        await asyncio.sleep(0.01)
        return 7

    assert await unless_gone(receive, work()) == 7
    assert [str(each) for each in failures] == ["cut"]
