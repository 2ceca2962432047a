"""Reading one streamed answer of the OpenAI API into a timeline."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct

from gateway.bench.timeline import Failure, Timeline

LINE_BYTES_MAX = 2**20
"""A chunk has some hundred bytes; what never ends a line is no stream of events."""
BODY_BYTES_MAX = 2**16
"""Read of an answer that is an error."""
DETAIL_CHARACTERS = 200
LINGER_S = 0.5
"""After [DONE] the response should end, and its connection be free; longer is not waited for it."""
REFUSED = (429, 503)
"""A server that is busy says one of these."""


class Delta(Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(Struct, frozen=True):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        if self.delta is None:
            return bool(self.text)
        return bool(self.delta.content or self.delta.reasoning_content or self.delta.reasoning)


class Usage(Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Chunk(Struct, frozen=True):
    """What is read of one; servers put much more into it."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Any = None
    object: str | None = None
    message: Any = None


DECODER = msgspec.json.Decoder(Chunk)


class AnswerReader:
    """A connection's Receiver. `done` is resolved once the timeline has its end and the connection
    can serve another request, if it ever will."""

    def __init__(self, timeline: Timeline, redact: Callable[[str], str]) -> None:
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[None] = self._loop.create_future()
        self._timeline, self._redact = timeline, redact
        self._status = 0
        self._events = False
        self._rest = b""
        """Of a line that is not complete, or of a body that is not a stream."""

    def head(self, status: int, content_type: str, now: float) -> None:
        self._status = status
        self._events = status == 200 and content_type.startswith("text/event-stream")

    def body(self, data: bytes, now: float) -> None:
        if self._ended:
            return
        if not self._events:
            self._rest = (self._rest + data)[:BODY_BYTES_MAX]
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._line(line, now)
        if len(self._rest) > LINE_BYTES_MAX:
            self.fail("not_a_stream", f"a line of more than {LINE_BYTES_MAX} bytes", now)

    def end(self, now: float) -> None:
        if self._events:
            self._line(self._rest, now)  # its last line may lack its end
            self.fail("cut", "the stream ended without [DONE]", now)
        elif self._status == 200:
            self.fail("not_a_stream", f"200 without events: {_message(self._rest)}", now)
        else:
            kind = "refused" if self._status in REFUSED else f"http_{self._status}"
            self.fail(kind, f"{self._status}: {_message(self._rest)}", now)
        self._resolve()

    def lost(self, reason: str, now: float) -> None:
        self.fail("cut" if self._status else "connection", reason, now)
        self._resolve()

    def fail(self, kind: str, detail: str, now: float) -> None:
        """The first end counts."""
        self._end(Failure(kind, self._redact(detail)[:DETAIL_CHARACTERS]), now)

    @property
    def _ended(self) -> bool:
        return self._timeline.ended_s is not None

    def _line(self, line: bytes, now: float) -> None:
        """OpenAI's events are one line each, with nothing but data."""
        if self._ended:
            return
        name, _, value = line.rstrip(b"\r").partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data" and value == b"[DONE]":
            self._end(None, now)
        elif name == b"data":
            self._chunk(value, now)
        elif name == b"error":  # llama.cpp's, of some versions
            self.fail("error_event", _message(value), now)

    def _chunk(self, data: bytes, now: float) -> None:
        try:
            chunk = DECODER.decode(data)
        except msgspec.MsgspecError as error:
            self.fail("not_a_stream", f"an event that cannot be read ({error})", now)
            return
        if chunk.error is not None or chunk.object == "error":
            self.fail("error_event", _message(data), now)
            return
        timeline = self._timeline
        if chunk.choices:
            choice = chunk.choices[0]
            if choice.has_text:
                timeline.text_s.append(now)
            if choice.finish_reason is not None:
                timeline.finished_s = now
        if chunk.usage is not None:
            timeline.counted_tokens = chunk.usage.completion_tokens
            timeline.prompt_tokens = chunk.usage.prompt_tokens or timeline.prompt_tokens

    def _end(self, failure: Failure | None, now: float) -> None:
        if self._ended:
            return
        self._timeline.failure = failure
        self._timeline.ended_s = now
        if failure is None:
            self._loop.call_later(LINGER_S, self._resolve)
        else:
            self._resolve()

    def _resolve(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


def _message(body: bytes) -> str:
    """What an error says, in the shapes that servers use; else the text as it is."""
    try:
        found = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        found = None
    while isinstance(found, dict):
        found = found.get("error") or found.get("message") or found.get("detail")
    return " ".join((found if isinstance(found, str) else body.decode(errors="replace")).split())
