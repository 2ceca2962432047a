"""The counters in Redis, shared by all replicas: one script for each step of a request."""

import asyncio
import hashlib
import logging
from contextlib import suppress
from typing import Any

import msgspec
from redis.asyncio import Redis

from gateway.tenants.limits.bounds import PREFIX, Pot
from gateway.tenants.limits.counters import (
    LEASE_MS,
    Answer,
    Claim,
    CountersLost,
    Fill,
    Verdict,
)
from gateway.tenants.limits.pipelines import Call, Pipelines, call
from gateway.tenants.limits.scripts import Scripts, scripts

logger = logging.getLogger(__name__)

PROBE = f"{PREFIX}:{{probe}}:spent"


class SharedCounters:
    def __init__(self, redis: Redis, texts: Scripts | None = None) -> None:
        texts = texts or scripts()
        self._redis = redis
        self._pipelines = Pipelines(redis, msgspec.structs.astuple(texts))
        self._digests = Scripts(*map(_digest, msgspec.structs.astuple(texts)))

    async def admit(self, claim: Claim) -> Verdict:
        bounds, pots = claim.bounds, claim.bounds.pots
        admission = call(
            self._digests.admit,
            _keys(claim),
            [
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
            undo=lambda: self._settling(claim, 0, 0, refused=True),
        )
        self._pipelines.send(admission)
        try:
            told = await admission.answer
        except asyncio.CancelledError:
            if not admission.answer.cancelled():  # it came, and nobody will read it
                with suppress(CountersLost):
                    self._pipelines.send(self._settling(claim, 0, 0, refused=True))
            raise
        fills = [Fill(told[i], told[i + 1]) for i in range(4, len(told), 2)]
        return Verdict(Answer(told[0]), told[1], told[2], told[3], fills)

    async def extend(self, claim: Claim, total: int, tokens: int) -> int:
        bounds, pots = claim.bounds, claim.bounds.pots
        granted: int = await self._answer(
            self._digests.extend,
            _keys(claim, requests=False),
            [
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
            ],
        )
        return granted

    async def beat(self, claim: Claim) -> None:
        bounds = claim.bounds
        leases = [bound.name for bound in bounds.running] + [pot.holds for pot in bounds.pots]
        keys = [bounds.record(claim.request_id), *leases]
        await self._answer(self._digests.beat, keys, [claim.request_id, LEASE_MS])

    async def settle(self, claim: Claim, tokens: int, cost_nanos: int, *, refused: bool) -> None:
        """Is sent even if whoever awaits it is cancelled: nothing is awaited before."""
        settling = self._settling(claim, tokens, cost_nanos, refused=refused)
        self._pipelines.send(settling)
        await settling.answer

    async def raise_spent(self, pot: Pot, nanos: int) -> None:
        await self._answer(self._digests.raise_spent, [pot.counter], [nanos, pot.end_ms])

    async def probe(self) -> None:
        """Whether scripts can write. Raises CountersLost."""
        await self._answer(self._digests.raise_spent, [PROBE], [0, 0])

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
        await self._pipelines.close()

    def _settling(self, claim: Claim, tokens: int, cost_nanos: int, *, refused: bool) -> Call:
        bounds = claim.bounds
        return call(
            self._digests.settle,
            _keys(claim),
            [
                claim.request_id,
                len(bounds.requests),
                len(bounds.tokens),
                len(bounds.running),
                len(bounds.pots),
                tokens,
                refused,
                cost_nanos,
            ],
        )

    async def _answer(self, digest: str, keys: list[str], values: list[object]) -> Any:
        sent = call(digest, keys, values)
        self._pipelines.send(sent)
        return await sent.answer


def _keys(claim: Claim, *, requests: bool = True) -> list[str]:
    bounds = claim.bounds
    return [
        bounds.record(claim.request_id),
        *[bound.name for bound in bounds.requests if requests],
        *[bound.name for bound in bounds.tokens],
        *[bound.name for bound in bounds.running],
        *[name for pot in bounds.pots for name in (pot.counter, pot.holds)],
    ]


def _digest(script: str) -> str:
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
