"""Scripts called on a few connections that are kept: getting one from the pool for each call costs
as much again as the call.

Calls that wait while all connections are busy go together, so that a slow Redis is asked less
often and not by more connections.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ResponseError

from gateway.tenants.limits.counters import CountersLost

CONNECTIONS_MAX = 8
CALLS_MAX = 256
"""That go together."""
WAITING_MAX = 4096
"""Calls that wait for a connection. More would wait longer than any client."""
EXCHANGE_S = 2.0
"""For a new connection and all answers. Past it, Redis counts as away."""

ENCODER = msgspec.msgpack.Encoder()


class Call(Struct, eq=False):
    command: tuple[str | int | bytes, ...]
    answer: asyncio.Future[Any]
    """Or CountersLost."""
    undo: "Callable[[], Call] | None" = None
    """Makes what to call if nobody waits for the answer any more when it comes."""


def call(
    digest: str, keys: list[str], values: list[object], undo: Callable[[], Call] | None = None
) -> Call:
    """Of a script."""
    made = _command("EVALSHA", digest, len(keys), *keys, ENCODER.encode(values))
    made.undo = undo
    return made


def _command(*parts: str | int | bytes) -> Call:
    return Call(parts, asyncio.get_running_loop().create_future())


class Pipelines:
    def __init__(self, redis: Redis, scripts: tuple[str, ...]) -> None:
        """`scripts`: those that are called, for a Redis that doesn't know them."""
        self._redis = redis
        self._scripts = scripts
        self._idle: list[AbstractConnection] = []
        self._waiting: list[Call] = []
        self._starting = False
        self._under_way: list[list[Call]] = []
        self._running: set[asyncio.Task[None]] = set()

    def send(self, call: Call) -> None:
        """What is sent is called, even if whoever awaits its answer is cancelled."""
        if len(self._waiting) >= WAITING_MAX:
            raise CountersLost(f"{WAITING_MAX} calls wait for Redis")
        self._waiting.append(call)
        self._start()

    async def close(self) -> None:
        """Wait for what was sent."""
        while self._running:
            await asyncio.wait(self._running)
        while self._idle:
            await self._redis.connection_pool.release(self._idle.pop())

    def _start(self) -> None:
        """One more, unless one is about to begin."""
        if self._waiting and not self._starting and len(self._running) < CONNECTIONS_MAX:
            self._starting = True
            task = asyncio.create_task(self._run())
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _run(self) -> None:
        self._starting = False
        while self._waiting:
            calls, self._waiting = self._waiting[:CALLS_MAX], self._waiting[CALLS_MAX:]
            self._start()
            self._under_way.append(calls)
            try:
                async with asyncio.timeout(EXCHANGE_S):
                    answers = await self._answers(calls)
            except Exception as error:  # whatever it is, they must hear of it
                self._fail(error)
            else:
                for call, answer in zip(calls, answers, strict=True):
                    self._deliver(call, answer)
            finally:
                self._under_way.remove(calls)

    def _fail(self, error: Exception) -> None:
        """Of everyone, rather than that each waits in vain for as long in turn. Where an answer
        comes after all, what it admitted is undone."""
        waiting, self._waiting = self._waiting, []
        for calls in (waiting, *self._under_way):
            for call in calls:
                self._deliver(call, error)

    def _deliver(self, call: Call, answer: Any) -> None:
        if isinstance(answer, Exception):
            if not call.answer.done():
                call.answer.set_exception(CountersLost(f"{type(answer).__name__}: {answer}"))
                call.answer.exception()  # it may be that nobody hears it
        elif not call.answer.done():
            call.answer.set_result(answer)
        elif call.undo is not None:
            self._waiting.append(call.undo())

    async def _answers(self, calls: list[Call]) -> list[Any]:
        """Of each call its answer or the error that Redis answered."""
        answers = await self._exchange(calls)
        unknown = [i for i, answer in enumerate(answers) if isinstance(answer, NoScriptError)]
        if unknown:
            loads = [_command("SCRIPT", "LOAD", script) for script in self._scripts]
            again = await self._exchange(loads + [calls[i] for i in unknown])
            for i, answer in zip(unknown, again[len(loads) :], strict=True):
                answers[i] = answer
        return answers

    async def _exchange(self, calls: list[Call]) -> list[Any]:
        kept = self._idle.pop() if self._idle else None
        connection = kept or await self._connection()
        try:
            try:
                return await _exchange(connection, calls)
            except RedisConnectionError:
                if kept is None:
                    raise
                return await _exchange(connection, calls)  # it was cut while idle, by a restart
        except BaseException:
            await connection.disconnect(nowait=True)  # what is still to come is nobody's answer
            raise
        finally:
            self._idle.append(connection)

    async def _connection(self) -> AbstractConnection:
        return await self._redis.connection_pool.get_connection()  # type: ignore[no-any-return, no-untyped-call]  # redis says nothing of its type


async def _exchange(connection: AbstractConnection, calls: list[Call]) -> list[Any]:
    packed = [part for call in calls for part in connection.pack_command(*call.command)]
    await connection.send_packed_command(packed, check_health=False)
    answers: list[Any] = []
    for _ in calls:
        try:
            answers.append(await connection.read_response())
        except ResponseError as error:
            answers.append(error)
    return answers
