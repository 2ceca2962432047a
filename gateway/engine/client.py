"""How the HTTP side reaches an engine, whichever way it runs."""

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Literal, Protocol, Self, runtime_checkable

from gateway.engine.messages import (
    Cancel,
    Command,
    Event,
    Failed,
    FailureCode,
    Finished,
    GetPlaces,
    GetStats,
    ModelInfo,
    Place,
    Places,
    Ready,
    StartFailed,
    Stats,
    Submit,
    Tokens,
    Unload,
)

log = logging.getLogger(__name__)

ACKNOWLEDGE_S_MAX = 150.0
"""How long the end of a stream that was left is waited for. A worker that says nothing at all for
`process.SILENCE_S_MAX` counts as lost before that."""


class EngineFailure(Exception):
    """The engine gave up on a request. `code` is one of `messages.FailureCode`."""

    def __init__(self, code: FailureCode, detail: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail
        self.retry_after_s = retry_after_s


EndReason = Literal["stop", "length", "cancelled", "failed"]


class Account(Protocol):
    """Is told what the engine computes for one request as soon as the engine says it: whether
    anybody has read it yet, or the stream was left."""

    def begin(self, prompt_tokens: int, cached_tokens: int) -> None:
        """The prompt has been computed, and the first token comes. Not called for an answer that
        has none."""
        ...

    def produced(self, tokens: int) -> None: ...

    def finish(
        self, reason: EndReason, prompt_tokens: int, completion_tokens: int, cached_tokens: int
    ) -> None:
        """Called once, with all that was computed: by the engine's own count, or, where it failed
        or is lost, what it had told until then."""
        ...


class NoAccount:
    """For requests of the gateway's own."""

    def begin(self, prompt_tokens: int, cached_tokens: int) -> None:
        pass

    def produced(self, tokens: int) -> None:
        pass

    def finish(
        self, reason: EndReason, prompt_tokens: int, completion_tokens: int, cached_tokens: int
    ) -> None:
        pass


class TokenStream(Protocol):
    """The events of one request, up to and including `Finished`. Leaving it early cancels it; its
    account is told the rest.

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

    def submit(self, request: Submit, account: Account | None = None) -> TokenStream:
        """If entering the stream fails, the account is told nothing."""
        ...

    async def stats(self) -> Stats:
        """Raises EngineFailure("engine_lost") while there is no worker."""
        ...

    async def places(self, digests: Sequence[str]) -> Mapping[str, Place]:
        """Where these adapter versions are now. Raises EngineFailure("engine_lost") while there is
        no worker."""
        ...

    async def unload(self, digest: str) -> None: ...

    async def close(self) -> None: ...


class Mailbox:
    """Requests and queries in flight to one engine, and who waits for each. Used by the
    implementations of Engine, which differ only in how a command and an event travel."""

    def __init__(self) -> None:
        self.info: ModelInfo | None = None
        self._streams: dict[str, _InFlight] = {}
        self._queries: dict[str, asyncio.Future[Stats | Places]] = {}
        self._settled = asyncio.Event()
        self.start_error: str | None = None

    @property
    def in_flight(self) -> int:
        """Requests that the engine computes, or whose end nobody has read yet."""
        return len(self._streams)

    def open(self, request: Submit, account: Account) -> "_Events":
        """Where its events arrive."""
        name = request.request_id
        assert name not in self._streams, f"request id {name} is in flight already"
        opened = self._streams[name] = _InFlight(len(request.prompt), account)
        return opened.events

    def close(self, request_id: str) -> None:
        """Nothing of it is expected any more."""
        self._streams.pop(request_id, None)

    def leave(self, request_id: str) -> bool:
        """Nobody reads its events any more. True if the engine has not ended it: then it must be
        told, and the account gets the rest when it comes."""
        left = self._streams[request_id]
        if left.ended:
            del self._streams[request_id]
            return False
        left.patience = asyncio.get_running_loop().call_later(
            ACKNOWLEDGE_S_MAX, self._give_up, request_id
        )
        return True

    def _give_up(self, request_id: str) -> None:
        log.warning("the engine has not told the end of %s, which was cancelled", request_id)
        self._streams.pop(request_id).lost("cancelled")

    def ask(self) -> tuple[str, asyncio.Future[Stats | Places]]:
        """The id of a new query, and where its answer arrives."""
        query_id = uuid.uuid4().hex
        future = self._queries[query_id] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: self._queries.pop(query_id, None))
        return query_id, future

    def deliver(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Ready(info):
                    self.info = info
                    self._settled.set()
                case StartFailed(detail):
                    self.start_error = detail
                    self._settled.set()
                case Stats(query_id) | Places(query_id):
                    future = self._queries.get(query_id)
                    if future is not None and not future.done():
                        future.set_result(event)
                case _:
                    stream = self._streams.get(event.request_id)
                    if stream is not None:  # else nobody waits for its end any more
                        stream.put(event)
                        if stream.ended and stream.left:
                            del self._streams[event.request_id]

    def lose(self, detail: str) -> None:
        """The worker is gone, and with it everything in flight."""
        self.info = None
        if self.start_error is None:
            self._settled.clear()
        for request_id, stream in list(self._streams.items()):
            if not stream.ended:
                stream.put(Failed(request_id, "engine_lost", detail))
            if stream.left:
                del self._streams[request_id]
        for future in self._queries.values():
            if not future.done():
                future.set_exception(EngineFailure("engine_lost", detail))

    async def wait_ready(self) -> ModelInfo:
        while self.info is None:
            if self.start_error is not None:
                raise EngineFailure("engine_lost", self.start_error)
            await self._settled.wait()
        return self.info


class _Events:
    """A queue that one reader waits at: asyncio's own, which may have any number of both, and an
    end, took longer to make than the request waits in it."""

    __slots__ = ("_arrived", "_waiter")

    def __init__(self) -> None:
        self._arrived: deque[Tokens | Finished | Failed] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: Tokens | Finished | Failed) -> None:
        self._arrived.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Tokens | Finished | Failed:
        """If whoever awaits it is cancelled, nothing is lost."""
        assert self._waiter is None, "a stream has one reader"
        while not self._arrived:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._arrived.popleft()


class _InFlight:
    """One request: what the engine has told of it, and who reads that."""

    __slots__ = ("_cached", "_completion", "_prompt", "account", "ended", "events", "patience")

    def __init__(self, prompt_tokens: int, account: Account) -> None:
        self.account = account
        self.events = _Events()
        self.ended = False
        self.patience: asyncio.TimerHandle | None = None
        """Runs once the stream was left."""
        self._prompt = prompt_tokens
        self._cached = 0
        self._completion = 0

    @property
    def left(self) -> bool:
        return self.patience is not None

    def put(self, event: Tokens | Finished | Failed) -> None:
        assert not self.ended, "a request ends once"
        if isinstance(event, Tokens):
            if not self._completion:
                self._cached = event.cached_tokens
                self.account.begin(self._prompt, self._cached)
            self._completion += len(event.ids)
            self.account.produced(len(event.ids))
        elif isinstance(event, Finished):
            self._end()
            self.account.finish(
                event.reason, event.prompt_tokens, event.completion_tokens, event.cached_tokens
            )
        else:
            self.lost("failed")
        if not self.left:
            self.events.put(event)

    def lost(self, reason: EndReason) -> None:
        """The engine's own count will not come."""
        self._end()
        prompt = self._prompt if self._completion else 0
        self.account.finish(reason, prompt, self._completion, self._cached)

    def _end(self) -> None:
        self.ended = True
        if self.patience is not None:
            self.patience.cancel()


class EngineClient:
    """An Engine over a Mailbox; what remains for an implementation is to start, send and close."""

    def __init__(self) -> None:
        self._mailbox = Mailbox()

    @property
    def info(self) -> ModelInfo | None:
        return self._mailbox.info

    async def wait_ready(self) -> ModelInfo:
        return await self._mailbox.wait_ready()

    def submit(self, request: Submit, account: Account | None = None) -> TokenStream:
        return _Stream(self, self._mailbox, request, account or NoAccount())

    async def stats(self) -> Stats:
        self.require()
        query_id, answer = self._mailbox.ask()
        await self.send(GetStats(query_id))
        stats = await answer
        assert isinstance(stats, Stats), "an answer is of its query's kind"
        return stats

    async def places(self, digests: Sequence[str]) -> Mapping[str, Place]:
        self.require()
        query_id, answer = self._mailbox.ask()
        await self.send(GetPlaces(query_id, list(digests)))
        found = await answer
        assert isinstance(found, Places), "an answer is of its query's kind"
        return found.places

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
    def __init__(
        self, engine: EngineClient, mailbox: Mailbox, request: Submit, account: Account
    ) -> None:
        self._engine = engine
        self._mailbox = mailbox
        self._request = request
        self._account = account
        self._ended = False

    async def __aenter__(self) -> Self:
        self._engine.require()
        self._queue = self._mailbox.open(self._request, self._account)
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
        if self._mailbox.leave(self._request.request_id) and self._engine.info is not None:
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
