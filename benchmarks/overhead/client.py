"""A client that costs little beside what it measures: connections that are kept, and no parsing
beyond where an answer ends."""

import asyncio
import json
import time
from typing import NamedTuple, Self, cast

from benchmarks.overhead.script import Script

QUESTION = "Why is the sea salt, and what has a river to do with it?"
"""46 tokens with the chat template's."""
LONG_QUESTION = " ".join([QUESTION] * 16)
"""A body of 1 KB."""
ANSWER_S_MAX = 60.0


class Address(NamedTuple):
    port: int
    key: str
    model: str

    def request(self, script: Script, stream: bool, question: str = QUESTION) -> bytes:
        messages = [{"role": "user", "content": question}]
        body = {"model": self.model, "messages": messages, "stream": stream} | script.parameters
        text = json.dumps(body).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{self.port}\r\n"
            f"authorization: Bearer {self.key}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(text)}\r\n\r\n"
        )
        return head.encode() + text


class WrongAnswer(Exception):
    """The message is what came."""


class Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._stream = False
        self._ended: asyncio.Future[None] | None = None

    @classmethod
    async def open(cls, port: int) -> Self:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(cls, "127.0.0.1", port)
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's has another base

    def connection_lost(self, exc: Exception | None) -> None:
        if self._ended and not self._ended.done():
            self._ended.set_exception(WrongAnswer(f"cut after {bytes(self._received)[-500:]!r}"))

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._ended and not self._ended.done() and self._is_whole():
            self._ended.set_result(None)

    async def ask(self, request: bytes, *, stream: bool) -> float:
        """Seconds to the end of the answer. Raises WrongAnswer."""
        assert self._transport is not None
        self._received.clear()
        self._stream = stream
        self._ended = asyncio.get_running_loop().create_future()
        asked_at = time.perf_counter()
        self._transport.write(request)
        async with asyncio.timeout(ANSWER_S_MAX):
            await self._ended
        taken = time.perf_counter() - asked_at
        if not self._received.startswith(b"HTTP/1.1 200 ") or b'"error"' in self._received:
            raise WrongAnswer(self._received[:2000].decode(errors="replace"))
        return taken

    @property
    def head(self) -> bytes:
        """Of the last answer."""
        return bytes(self._received).partition(b"\r\n\r\n")[0]

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _is_whole(self) -> bool:
        if self._received.endswith(b"\r\n0\r\n\r\n"):
            return True
        head, end, body = self._received.partition(b"\r\n\r\n")
        _, named, length = head.lower().partition(b"content-length: ")
        return bool(end and named) and len(body) >= int(length.split(b"\r\n")[0])


async def head_of(address: Address, script: Script) -> bytes:
    """Of one answer."""
    connection = await Connection.open(address.port)
    try:
        await connection.ask(address.request(script, stream=False), stream=False)
        return connection.head
    finally:
        connection.close()


async def ask_in_turn(address: Address, script: Script, count: int) -> list[float]:
    """The seconds of `count` answers on one connection, one after the other."""
    request = address.request(script, stream=False)
    connection = await Connection.open(address.port)
    try:
        return [await connection.ask(request, stream=False) for _ in range(count)]
    finally:
        connection.close()


async def ask_for(
    address: Address, script: Script, connections: int, seconds: float, question: str = QUESTION
) -> list[float]:
    """The seconds of all answers that were asked for within `seconds`: a closed loop."""
    request = address.request(script, stream=False, question=question)
    opened = [await Connection.open(address.port) for _ in range(connections)]
    until = time.perf_counter() + seconds

    async def ask(connection: Connection) -> list[float]:
        taken = []
        while time.perf_counter() < until:
            taken.append(await connection.ask(request, stream=False))
        return taken

    try:
        return [each for taken in await asyncio.gather(*map(ask, opened)) for each in taken]
    finally:
        for connection in opened:
            connection.close()


async def stream_at_once(address: Address, script: Script, streams: int, rounds: int) -> None:
    """Each of `streams` connections has `rounds` streams, one after the other."""
    request = address.request(script, stream=True)
    opened = [await Connection.open(address.port) for _ in range(streams)]

    async def ask(connection: Connection) -> None:
        for _ in range(rounds):
            await connection.ask(request, stream=True)

    try:
        await asyncio.gather(*map(ask, opened))
    finally:
        for connection in opened:
            connection.close()
