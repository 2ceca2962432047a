"""The shared counters while they answer, and what was chosen for the time that they don't.

    shared ──a call fails──> away: local counters at limit ÷ replicas, or 503 ──a probe succeeds──┐
       ^──────────────────────────────────────────────────────────────────────────────────────────┘

The first failure is enough: everyone after it is spared the wait. Only the probe asks Redis then.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

from msgspec import Struct
from redis.exceptions import RedisError

from gateway.background import in_background
from gateway.errors import LimiterUnavailable
from gateway.settings import Limits as LimitSettings
from gateway.tenants.limits.bounds import Pot
from gateway.tenants.limits.counters import Answer, Claim, Counters, CountersLost, Verdict
from gateway.tenants.limits.local import LocalCounters
from gateway.tenants.limits.shared import SharedCounters

T = TypeVar("T")

logger = logging.getLogger(__name__)

PROBE_S = 0.5


class Away(Struct):
    """Redis is."""

    since: float
    unsettled: int = 0
    """Requests whose rest could not be given back."""


class DegradingCounters:
    """Counters whose errors are ApiErrors, never CountersLost."""

    def __init__(
        self,
        shared: SharedCounters,
        settings: LimitSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shared = shared
        self._settings = settings
        self._clock = clock
        self._local = LocalCounters(settings.replicas)
        """One for all times without Redis: were each to begin with empty windows, a Redis that
        comes and goes would lift the limits."""
        self._behind: set[str] = set()
        """Counters in Redis of budgets of which something was spent without it."""
        self._learning: set[str] = set()
        """Those of which the ledger is being asked, and has not yet told."""
        self._away: Away | None = None
        self._lost = asyncio.Event()

    async def admit(self, claim: Claim) -> Verdict:
        if self._away is None and (self._behind or self._learning):
            for index, pot in enumerate(claim.bounds.pots):
                if pot.counter in self._behind or pot.counter in self._learning:
                    self._behind.discard(pot.counter)
                    self._learning.add(pot.counter)
                    return Verdict(Answer.UNKNOWN, index, 0, -1, [])
        return await self._ask(lambda counters: counters.admit(claim))

    async def extend(self, claim: Claim, total: int, tokens: int) -> int:
        return await self._ask(lambda counters: counters.extend(claim, total, tokens))

    async def raise_spent(self, pot: Pot, nanos: int) -> None:
        await self._ask(lambda counters: counters.raise_spent(pot, nanos))
        if self._away is None:  # else Redis has not been told
            self._learning.discard(pot.counter)

    async def beat(self, claim: Claim) -> None:
        if self._away is not None:
            await self._local.beat(claim)
            return
        try:
            await self._shared.beat(claim)
        except CountersLost as error:
            self._lose(error)

    async def settle(self, claim: Claim, tokens: int, cost_nanos: int, *, refused: bool) -> None:
        """Where the request was counted: it may have begun on the other side. Never raises: what
        is not given back lapses, and the ledger knows the cost."""
        away = self._away
        if away is None:
            try:
                await self._shared.settle(claim, tokens, cost_nanos, refused=refused)
                return
            except CountersLost as error:
                away = self._lose(error)
        away.unsettled += 1
        self._behind.update(pot.counter for pot in claim.bounds.pots)
        await self._local.settle(claim, tokens, cost_nanos, refused=refused)

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Look for Redis when it is away; at the start, too."""
        try:
            async with in_background(self._watch()):
                yield
        finally:
            await self._shared.close()

    async def _ask(self, ask: Callable[[Counters], Awaitable[T]]) -> T:
        if self._away is None:
            try:
                return await ask(self._shared)
            except CountersLost as error:
                self._lose(error)
        return await ask(self._in_place_of_redis())

    def _in_place_of_redis(self) -> LocalCounters:
        assert self._away is not None
        away_s = self._clock() - self._away.since
        if self._settings.without_redis == "closed" or away_s > self._settings.without_redis_s:
            raise LimiterUnavailable(
                "The store of limits is unavailable, so requests cannot be counted. "
                "Try again in a moment."
            )
        return self._local

    def _lose(self, error: CountersLost) -> Away:
        if self._away is None:
            self._away = Away(self._clock())
            self._local.forget_spent()  # the ledger knows better
            self._lost.set()
            logger.error(
                "Redis is away (%s): %s",
                error,
                f"limits are counted here, for {self._settings.without_redis_s:.0f} s at most"
                if self._settings.without_redis == "local"
                else "requests that have limits are refused",
            )
        return self._away

    async def _watch(self) -> None:
        await self._probe()
        while True:
            await self._lost.wait()
            await asyncio.sleep(PROBE_S)
            await self._probe()

    async def _probe(self) -> None:
        try:
            await self._shared.probe()
        except CountersLost as error:
            self._lose(error)
            return
        away, self._away = self._away, None
        self._lost.clear()
        if away is not None:
            logger.warning(
                "Redis is back after %.1f s; what %d requests had reserved there lapses by itself",
                self._clock() - away.since,
                away.unsettled,
            )
        with suppress(RedisError, OSError, TimeoutError):  # it was asked in passing
            await self._shared.warn_of_eviction()
