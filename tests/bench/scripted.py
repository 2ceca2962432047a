"""A server of OpenAI-like streams that does exactly what a test's script says, in a thread."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from gateway.bench.shape import Range, Shape
from gateway.bench.targets import Target
from gateway.bench.workload import Request

CHUNKED = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
)
DONE = b"data: [DONE]\n\n"
LAST_CHUNK = b"0\r\n\r\n"


@dataclass
class Call:
    """One request, and the means to answer it."""

    head: str
    body: dict[str, Any]
    writer: asyncio.StreamWriter

    async def send(self, *events: bytes, after_s: float = 0.0) -> None:
        """Each as one HTTP chunk."""
        await asyncio.sleep(after_s)
        for event in events:
            self.writer.write(b"%x\r\n%s\r\n" % (len(event), event))
        await self.writer.drain()

    async def begin(self) -> None:
        self.writer.write(CHUNKED)

    async def end(self) -> None:
        self.writer.write(LAST_CHUNK)

    def cut(self) -> None:
        self.writer.transport.abort()

    async def refuse(self, status: int, body: bytes, kind: str = "application/json") -> None:
        head = (
            f"HTTP/1.1 {status} No\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self.writer.write(head.encode() + body)


Script = Callable[[Call], Awaitable[None]]


@dataclass
class Scripted:
    script: Script
    url: str = ""
    calls: list[Call] = field(default_factory=list)
    connections: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(head.lower().split("content-length:")[1].split()[0])
                call = Call(head, json.loads(await reader.readexactly(length)), writer)
                self.calls.append(call)
                await self.script(call)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client or the test has ended
        finally:
            writer.close()


@contextmanager
def serving(script: Script) -> Iterator[Scripted]:
    """The server on a free port until the end of the block."""
    server, started, stopping = Scripted(script), threading.Event(), threading.Event()

    async def main() -> None:
        async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
            server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
            started.set()
            await asyncio.to_thread(stopping.wait)

    thread = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield server
    finally:
        stopping.set()
        thread.join(10)


def text(piece: str, **more: Any) -> bytes:
    """A chunk of a completion."""
    choice = {"index": 0, "text": piece, "finish_reason": None} | more
    return event({"object": "text_completion", "choices": [choice]})


def delta(**fields: Any) -> bytes:
    """A chunk of a chat."""
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": None}]})


def usage(prompt: int, completion: int) -> bytes:
    return event(
        {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}
    )


def event(message: object) -> bytes:
    return b"data: " + json.dumps(message).encode() + b"\n\n"


async def answers(call: Call) -> None:
    """A whole answer of as many tokens as were asked for, one a chunk."""
    await call.begin()
    wanted = call.body["max_tokens"]
    await call.send(*[text("a")] * wanted, text("", finish_reason="length"))
    await call.send(usage(len(call.body["prompt"]), wanted), DONE)
    await call.end()


async def until(fact: Callable[[], bool]) -> None:
    for _ in range(6000):
        if fact():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came true")


def shape(**changes: Any) -> Shape:
    values: dict[str, Any] = {
        "endpoint": "completions",
        "prompt_tokens": Range(10, 20),
        "output_tokens": Range(3, 5),
        "vocabulary": Range(1000, 30_000),
        "alpha": 1.0,
        "shared_prefix": None,
        "extra": {},
    }
    return Shape(**values | changes)


def request(model: str = "m", *, tokens: int = 3, api_key: str = "") -> Request:
    body = json.dumps({"model": model, "prompt": [1, 2], "max_tokens": tokens}).encode()
    return Request(Target(model, api_key=api_key), body, prompt_tokens=2, output_tokens=tokens)
