"""Stopping without cutting anybody off: no new requests, while those that run may finish."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Drain:
    def __init__(self) -> None:
        self.begun = False
        self.running = 0
        """Requests being answered now."""
        self._idle = asyncio.Event()
        self._idle.set()

    def begin(self) -> None:
        """From now on, new requests are refused. A second time changes nothing."""
        self.begun = True

    @contextmanager
    def request(self) -> Iterator[None]:
        self.running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self._idle.set()

    async def finished(self, within_s: float) -> bool:
        """Wait until no request runs; False if some still do after `within_s`."""
        try:
            async with asyncio.timeout(within_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
