"""How the HTTP side reaches an engine, whichever way it runs."""

import asyncio
import uuid
from contextlib import suppress
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from gateway.engine.messages import (
    Cancel,
    Command,
    Event,
    Failed,
    FailureCode,
    Finished,
    GetStats,
    ModelInfo,
    Ready,
    StartFailed,
    Stats,
    Submit,
    Tokens,
    Unload,
)


class EngineFailure(Exception):
    """The engine gave up on a request. `code` is one of `messages.FailureCode`."""

    def __init__(self, code: FailureCode, detail: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail
        self.retry_after_s = retry_after_s


class TokenStream(Protocol):
    """The events of one request, up to and including `Finished`. Leaving it early cancels it.

    Iterating raises EngineFailure.
    """

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
    def __aiter__(self) -> Self: ...
    async def __anext__(self) -> Tokens | Finished: ...


@runtime_checkable  # the HTTP framework checks what it injects
class Engine(Protocol):
    async def start(self) -> None:
        """Begin to load. Returns at once; `wait_ready` waits for the end of it."""
        ...

    async def wait_ready(self) -> ModelInfo:
        """Wait until the model is loaded. Raises EngineFailure if it cannot be."""
        ...

    @property
    def info(self) -> ModelInfo | None:
        """The loaded model; None while the engine is not there."""
        ...

    def submit(self, request: Submit) -> TokenStream: ...

    async def stats(self) -> Stats:
        """Raises EngineFailure("engine_lost") while there is no worker."""
        ...

    async def unload(self, digest: str) -> None: ...

    async def close(self) -> None: ...


class Mailbox:
    """Requests and queries in flight to one engine, and who waits for each. Used by the
    implementations of Engine, which differ only in how a command and an event travel."""

    def __init__(self) -> None:
        self.info: ModelInfo | None = None
        self._streams: dict[str, asyncio.Queue[Tokens | Finished | Failed]] = {}
        self._queries: dict[str, asyncio.Future[Stats]] = {}
        self._settled = asyncio.Event()
        self.start_error: str | None = None

    def open(self, request_id: str) -> asyncio.Queue[Tokens | Finished | Failed]:
        assert request_id not in self._streams, f"request id {request_id} is in flight already"
        return self._streams.setdefault(request_id, asyncio.Queue())

    def close(self, request_id: str) -> None:
        self._streams.pop(request_id, None)

    def ask(self) -> tuple[GetStats, asyncio.Future[Stats]]:
        query = GetStats(uuid.uuid4().hex)
        future = self._queries[query.query_id] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: self._queries.pop(query.query_id, None))
        return query, future

    def deliver(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Ready(info):
                    self.info = info
                    self._settled.set()
                case StartFailed(detail):
                    self.start_error = detail
                    self._settled.set()
                case Stats(query_id):
                    future = self._queries.get(query_id)
                    if future is not None and not future.done():
                        future.set_result(event)
                case _:
                    stream = self._streams.get(event.request_id)
                    if stream is not None:  # else it was cancelled while the event travelled
                        stream.put_nowait(event)

    def lose(self, detail: str) -> None:
        """The worker is gone, and with it everything in flight."""
        self.info = None
        if self.start_error is None:
            self._settled.clear()
        for request_id, stream in self._streams.items():
            stream.put_nowait(Failed(request_id, "engine_lost", detail))
        for future in self._queries.values():
            if not future.done():
                future.set_exception(EngineFailure("engine_lost", detail))

    async def wait_ready(self) -> ModelInfo:
        while self.info is None:
            if self.start_error is not None:
                raise EngineFailure("engine_lost", self.start_error)
            await self._settled.wait()
        return self.info


class EngineClient:
    """An Engine over a Mailbox; what remains for an implementation is to start, send and close."""

    def __init__(self) -> None:
        self._mailbox = Mailbox()

    @property
    def info(self) -> ModelInfo | None:
        return self._mailbox.info

    async def wait_ready(self) -> ModelInfo:
        return await self._mailbox.wait_ready()

    def submit(self, request: Submit) -> TokenStream:
        return _Stream(self, self._mailbox, request)

    async def stats(self) -> Stats:
        self.require()
        query, future = self._mailbox.ask()
        await self.send(query)
        return await future

    async def unload(self, digest: str) -> None:
        """A worker that is not there has nothing loaded."""
        if self.info is not None:
            with suppress(EngineFailure):
                await self.send(Unload(digest))

    def require(self) -> ModelInfo:
        """The loaded model. Raises EngineFailure if there is none now."""
        if self.info is None:
            detail = self._mailbox.start_error or "the engine is loading its model"
            raise EngineFailure("engine_lost", detail)
        return self.info

    async def send(self, command: Command) -> None:
        raise NotImplementedError


class _Stream:
    def __init__(self, engine: EngineClient, mailbox: Mailbox, request: Submit) -> None:
        self._engine = engine
        self._mailbox = mailbox
        self._request = request
        self._ended = False

    async def __aenter__(self) -> Self:
        self._engine.require()
        self._queue = self._mailbox.open(self._request.request_id)
        try:
            await self._engine.send(self._request)
        except BaseException:
            self._mailbox.close(self._request.request_id)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._mailbox.close(self._request.request_id)
        if not self._ended and self._engine.info is not None:
            with suppress(EngineFailure):  # a worker that is gone computes nothing
                await self._engine.send(Cancel(self._request.request_id))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Tokens | Finished:
        if self._ended:
            raise StopAsyncIteration
        event = await self._queue.get()
        if isinstance(event, Tokens):
            return event
        self._ended = True
        if isinstance(event, Failed):
            raise EngineFailure(event.code, event.detail, event.retry_after_s)
        return event
