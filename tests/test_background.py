import asyncio
from contextlib import suppress

import pytest

from gateway.background import in_background


async def test_each_work_runs_until_the_way_out():
    turns = {"a": 0, "b": 0}

    async def turn(name: str) -> None:
        while True:
            turns[name] += 1
            await asyncio.sleep(0)

    async with in_background(turn("a"), turn("b")):
        await asyncio.sleep(0.01)
    ended = dict(turns)
    assert min(ended.values()) > 1
    await asyncio.sleep(0.01)
    assert turns == ended


async def test_a_cancellation_that_is_swallowed_is_repeated():
    cancelled = 0

    async def swallowing() -> None:
        nonlocal cancelled
        for _ in range(2):
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
            cancelled += 1
        await asyncio.sleep(60)

    async with in_background(swallowing()):
        await asyncio.sleep(0)
    assert cancelled == 2


async def test_what_a_work_has_died_of_is_raised_and_the_others_are_ended_first():
    ended = asyncio.Event()

    async def failing() -> None:
        raise OSError("planted")

    async def going_on() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    with pytest.raises(OSError, match="planted"):
        async with in_background(failing(), going_on()):
            await asyncio.sleep(0.01)
    assert ended.is_set()
