"""Work that goes on beside what a process serves, from its start to its end."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

CANCEL_AGAIN_S = 0.25


@asynccontextmanager
async def in_background(*works: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Each in a task of its own, which is cancelled and awaited on the way out. What one has raised
    is raised then, once all have ended."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            while not task.done():  # a timeout within it can swallow a cancellation (Python 3.11)
                task.cancel()
                await asyncio.wait((task,), timeout=CANCEL_AGAIN_S)
        for task in tasks:
            if not task.cancelled():
                task.result()
