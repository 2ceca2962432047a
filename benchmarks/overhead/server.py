"""The stub as a plain OpenAI-compatible server: bare ASGI, the least that an HTTP answer costs.

python -m benchmarks.overhead.server PORT
"""

import asyncio
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import uvicorn

from benchmarks.overhead.script import WORD, Script, read


class Request(msgspec.Struct, frozen=True):
    max_tokens: int
    seed: int
    stream: bool | None = None
    model: str = ""


DECODER = msgspec.json.Decoder(Request)
ID = "chatcmpl-0123456789abcdef0123456789abcdef"


async def app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        return
    if scope["method"] == "GET":
        await _answer(send, b"{}")
        return
    request = DECODER.decode(await _body(receive))
    script = read(request.max_tokens, request.seed)
    await asyncio.sleep(script.first_s)
    if not request.stream:
        await _answer(send, _completion(script.tokens, request.model))
        return
    await _start(send, b"text/event-stream; charset=utf-8")
    await _stream(send, script, request.model)


async def _body(receive: Any) -> bytes:
    parts, more = [], True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


async def _start(send: Any, media: bytes, *more: tuple[bytes, bytes]) -> None:
    headers = [(b"content-type", media), *more]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _answer(send: Any, body: bytes) -> None:
    await _start(send, b"application/json", (b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.body", "body": body})


async def _stream(send: Any, script: Script, model: str) -> None:
    due = time.perf_counter()
    for frame in _frames(script.tokens, model):
        await send({"type": "http.response.body", "body": frame, "more_body": True})
        if script.pace_s:
            await asyncio.sleep(max(0.0, (due := due + script.pace_s) - time.perf_counter()))
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def _completion(tokens: int, model: str) -> bytes:
    message = {"role": "assistant", "content": WORD * tokens}
    return msgspec.json.encode(
        {
            "id": ID,
            "object": "chat.completion",
            "created": 1,
            "model": model,
            "choices": [{"index": 0, "message": message, "finish_reason": "length"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": 1 + tokens},
        }
    )


def _frames(tokens: int, model: str) -> Iterator[bytes]:
    head = {"id": ID, "object": "chat.completion.chunk", "created": 1, "model": model}
    for _ in range(tokens):
        choice = {"index": 0, "delta": {"role": "assistant", "content": WORD}}
        yield b"data: " + msgspec.json.encode(head | {"choices": [choice]}) + b"\n\n"
    choice = {"index": 0, "delta": {}, "finish_reason": "length"}
    yield b"data: " + msgspec.json.encode(head | {"choices": [choice]}) + b"\n\n"


def main() -> None:
    port = int(sys.argv[1])
    uvicorn.run(app, port=port, loop="uvloop", http="httptools", log_level="error", lifespan="off")


if __name__ == "__main__":
    main()
