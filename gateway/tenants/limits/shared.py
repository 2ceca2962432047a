"""The counters in Redis, shared by all replicas: one script for each step of a request.

Calls that wait while others are under way go together, so that a slow Redis is asked less often
and not by more connections.
"""

import asyncio
import logging
from typing import Any

from msgspec import Struct
from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError

from gateway.tenants.limits.bounds import PREFIX, Pot
from gateway.tenants.limits.counters import (
    LEASE_MS,
    Answer,
    Claim,
    CountersLost,
    Fill,
    Verdict,
)
from gateway.tenants.limits.scripts import Scripts, scripts

logger = logging.getLogger(__name__)

PIPELINES_MAX = 8
"""Under way at a time, each on a connection of its own."""
CALLS_MAX = 256
"""In one of them."""
WAITING_MAX = 4096
"""Calls that wait for one. More would wait longer than any client."""

Argument = str | int
PROBE = f"{PREFIX}:{{probe}}:spent"


class Call(Struct, eq=False):
    script: str
    """Its digest."""
    arguments: list[Argument]
    """Number of keys, keys, arguments."""
    future: asyncio.Future[Any]
    admits: Claim | None = None
    """What to take back if nobody waits for the answer any more."""


class SharedCounters:
    def __init__(self, redis: Redis, texts: Scripts | None = None) -> None:
        self._redis = redis
        self._texts = texts or scripts()
        self._digests = Scripts(
            *(redis.register_script(text).sha for text in _texts_of(self._texts))
        )
        self._waiting: list[Call] = []
        self._starting = False
        self._under_way: set[asyncio.Task[None]] = set()

    async def admit(self, claim: Claim) -> Verdict:
        bounds, pots = claim.bounds, claim.bounds.pots
        keys = _keys(claim)
        call = self._call(
            self._digests.admit,
            [
                len(keys),
                *keys,
                claim.request_id,
                LEASE_MS,
                len(bounds.requests),
                len(bounds.tokens),
                len(bounds.running),
                len(pots),
                claim.tokens,
                claim.hold_nanos,
                *[bound.limit for bound in bounds.requests],
                *[bound.limit for bound in bounds.tokens],
                *[bound.limit for bound in bounds.running],
                *[part for pot in pots for part in (pot.amount_nanos, pot.end_ms)],
            ],
        )
        call.admits = claim
        self._send(call)
        try:
            told = await call.future
        except asyncio.CancelledError:
            if call.future.done() and not call.future.cancelled():
                self._take_back(claim)  # the answer came, and nobody will read it
            raise
        fills = [Fill(told[i], told[i + 1]) for i in range(4, len(told), 2)]
        return Verdict(Answer(told[0]), told[1], told[2], told[3], fills)

    async def extend(self, claim: Claim, total: int, tokens: int) -> int:
        bounds, pots = claim.bounds, claim.bounds.pots
        keys = _keys(claim, requests=False)
        arguments: list[Argument] = [
            len(keys),
            *keys,
            claim.request_id,
            LEASE_MS,
            len(bounds.tokens),
            len(bounds.running),
            len(pots),
            total,
            tokens,
            claim.output_micros,
            *[bound.limit for bound in bounds.tokens],
            *[part for pot in pots for part in (pot.amount_nanos, pot.end_ms)],
        ]
        granted: int = await self._answer(self._digests.extend, arguments)
        return granted

    async def beat(self, claim: Claim) -> None:
        bounds = claim.bounds
        leases = [bound.name for bound in bounds.running] + [pot.holds for pot in bounds.pots]
        arguments: list[Argument] = [1 + len(leases), bounds.record(claim.request_id), *leases]
        await self._answer(self._digests.beat, [*arguments, claim.request_id, LEASE_MS])

    async def settle(self, claim: Claim, tokens: int, cost_nanos: int, *, refused: bool) -> None:
        """Is sent even if whoever awaits it is cancelled: nothing is awaited before."""
        settling = _settling(claim, tokens, cost_nanos, refused=refused)
        await self._answer(self._digests.settle, settling)

    async def raise_spent(self, pot: Pot, nanos: int) -> None:
        await self._answer(self._digests.raise_spent, [1, pot.counter, nanos, pot.end_ms])

    async def probe(self) -> None:
        """Whether scripts can write. Raises CountersLost."""
        await self._answer(self._digests.raise_spent, [1, PROBE, 0, 0])

    async def warn_of_eviction(self) -> None:
        """Limits that Redis may throw away to make room are none. Raises RedisError, OSError."""
        memory = await self._redis.info("memory")
        policy = memory.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            logger.warning(
                "Redis has maxmemory-policy %s, so it may forget limits and budgets when its "
                "memory is full. Set it to noeviction, or give Loragate a Redis of its own.",
                policy,
            )

    async def close(self) -> None:
        """Wait for what was sent."""
        while self._under_way:
            await asyncio.wait(self._under_way)

    def _call(self, script: str, arguments: list[Argument]) -> Call:
        return Call(script, arguments, asyncio.get_running_loop().create_future())

    async def _answer(self, script: str, arguments: list[Argument]) -> Any:
        call = self._call(script, arguments)
        self._send(call)
        return await call.future

    def _send(self, call: Call) -> None:
        if len(self._waiting) >= WAITING_MAX:
            raise CountersLost(f"{WAITING_MAX} calls wait for Redis")
        self._waiting.append(call)
        if not self._starting and len(self._under_way) < PIPELINES_MAX:
            self._starting = True
            task = asyncio.create_task(self._send_waiting())
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    def _take_back(self, claim: Claim) -> None:
        settling = _settling(claim, 0, 0, refused=True)
        self._send(self._call(self._digests.settle, settling))

    async def _send_waiting(self) -> None:
        self._starting = False
        while self._waiting:
            calls, self._waiting = self._waiting[:CALLS_MAX], self._waiting[CALLS_MAX:]
            try:
                answers = await self._answers(calls)
            except (RedisError, OSError, TimeoutError) as error:
                calls += self._waiting  # rather than that each of them waits for it in turn
                self._waiting = []
                answers = [error] * len(calls)
            for call, answer in zip(calls, answers, strict=True):
                _deliver(call, answer)
                if call.admits and call.future.cancelled() and not isinstance(answer, Exception):
                    self._take_back(call.admits)

    async def _answers(self, calls: list[Call]) -> list[Any]:
        """Of each its answer or its error."""
        answers = await self._executed(calls)
        again = [i for i, one in enumerate(answers) if isinstance(one, NoScriptError)]
        if again:
            for text in _texts_of(self._texts):
                await self._redis.script_load(text)
            repeated = await self._executed([calls[i] for i in again])
            for i, answer in zip(again, repeated, strict=True):
                answers[i] = answer
        return answers

    async def _executed(self, calls: list[Call]) -> list[Any]:
        if len(calls) == 1:
            (call,) = calls
            try:
                return [await self._redis.execute_command("EVALSHA", call.script, *call.arguments)]  # type: ignore[no-untyped-call]  # redis has no types here
            except NoScriptError as error:
                return [error]
        async with self._redis.pipeline(transaction=False) as pipeline:
            for call in calls:
                pipeline.execute_command("EVALSHA", call.script, *call.arguments)
            return await pipeline.execute(raise_on_error=False)


def _deliver(call: Call, answer: Any) -> None:
    if call.future.done():
        return
    if isinstance(answer, Exception):
        call.future.set_exception(CountersLost(f"{type(answer).__name__}: {answer}"))
        call.future.exception()  # nobody may be there to hear it
    else:
        call.future.set_result(answer)


def _keys(claim: Claim, *, requests: bool = True) -> list[str]:
    bounds = claim.bounds
    return [
        bounds.record(claim.request_id),
        *[bound.name for bound in bounds.requests if requests],
        *[bound.name for bound in bounds.tokens],
        *[bound.name for bound in bounds.running],
        *[name for pot in bounds.pots for name in (pot.counter, pot.holds)],
    ]


def _settling(claim: Claim, tokens: int, cost_nanos: int, *, refused: bool) -> list[Argument]:
    bounds, keys = claim.bounds, _keys(claim)
    return [
        len(keys),
        *keys,
        claim.request_id,
        len(bounds.requests),
        len(bounds.tokens),
        len(bounds.running),
        len(bounds.pots),
        tokens,
        int(refused),
        cost_nanos,
    ]


def _texts_of(texts: Scripts) -> tuple[str, ...]:
    return (texts.admit, texts.extend, texts.beat, texts.settle, texts.raise_spent)
