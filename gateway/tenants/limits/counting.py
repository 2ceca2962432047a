"""What may begin, and how far it may go: reserved when a request is admitted, extended while it is
answered, and settled at its end.

Reserved are the prompt and the first tranche of the answer, rather than all of `max_tokens`, most
of which few answers use. More follows tranche by tranche, asked for before it is needed. Where no
more is left, the answer ends as if `max_tokens` had said so.
"""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

from gateway.background import in_background
from gateway.db import now as utc_now
from gateway.errors import ApiError, InsufficientQuota, LimiterUnavailable, RateLimited
from gateway.tenants.keys import Principal
from gateway.tenants.limits.bounds import Bound, Bounds, Pot, bounds_of
from gateway.tenants.limits.counters import LEASE_MS, Answer, Claim, Counters, Verdict
from gateway.tenants.limits.headers import rate_headers
from gateway.tenants.limits.limiter import Demand, Reservation, Unbounded, Used
from gateway.tenants.usage.rates import cost_nanos

logger = logging.getLogger(__name__)

TRANCHE = 64
AHEAD = TRANCHE // 2
"""With so many granted tokens left, more are asked for."""
GATHER_S = 0.02
"""How long such questions wait for each other, to go together."""
HEARTBEAT_S = LEASE_MS / 3000
TRIES = 6
"""Each budget may be unknown once, and there are few of them."""
BOUNDS_MAX = 10_000
"""Principals whose bounds are kept."""

Spent = Callable[[str, datetime], Awaitable[int]]
"""What the ledger says that an owner has spent since a moment, in nanos."""


class CountingLimiter:
    """Over counters that are shared, or in this process."""

    def __init__(
        self, counters: Counters, spent: Spent, now: Callable[[], datetime] = utc_now
    ) -> None:
        self._counters = counters
        self._spent = spent
        self._now = now
        self._bounds: dict[str, tuple[Principal, Bounds]] = {}
        self._running: dict[str, Counted] = {}
        self._wanting: list[Counted] = []
        self._learning: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def reserve(self, demand: Demand) -> Reservation:
        bounds = self._bounds_of(demand.principal)
        if not bounds:
            return Unbounded(demand.output_tokens_max)
        first = _first_tranche(demand, bounds)
        claim = Claim(
            request_id=demand.request_id,
            bounds=bounds,
            tokens=demand.prompt_tokens + first,
            hold_nanos=cost_nanos(demand.price, demand.prompt_tokens, 0, first),
            output_micros=demand.price.output_micros,
        )
        verdict = await self._admitted(claim)
        headers = rate_headers(bounds, verdict.fills)
        if verdict.answer is not Answer.ADMITTED:
            raise _refusal(verdict, bounds, headers)
        counted = Counted(self, claim, demand, first, headers)
        self._running[demand.request_id] = counted
        return counted

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Renews the leases of requests that run."""
        try:
            async with in_background(self._beat_forever()):
                yield
        finally:
            while self._tasks:
                await asyncio.wait(self._tasks)

    # --- for Counted ----------------------------------------------------------------------------

    def want(self, counted: "Counted") -> None:
        """Ask for its next tranche, together with others."""
        if not self._wanting:
            asyncio.get_running_loop().call_later(GATHER_S, self._extend_wanting)
        self._wanting.append(counted)

    async def extend(self, claim: Claim, total: int, tokens: int) -> int:
        for _ in range(TRIES):
            granted = await self._counters.extend(claim, total, tokens)
            if granted >= 0:
                return granted
            await self._learn(claim.bounds.pots[-1 - granted])
        raise _unknown()

    async def settle(self, claim: Claim, tokens: int, nanos: int, *, refused: bool) -> None:
        await self._counters.settle(claim, tokens, nanos, refused=refused)

    async def beat(self, claim: Claim) -> None:
        await self._counters.beat(claim)

    def forget(self, request_id: str) -> None:
        self._running.pop(request_id, None)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that is waited for before the limiter closes."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --------------------------------------------------------------------------------------------

    def _bounds_of(self, principal: Principal) -> Bounds:
        """Made once for each principal, as the authenticator hands out the same one for a while."""
        now = self._now()
        known, bounds = self._bounds.get(principal.key_id, (None, None))
        if bounds is None or known is not principal or now >= bounds.valid_until:
            bounds = bounds_of(principal, now)
            if len(self._bounds) >= BOUNDS_MAX:
                self._bounds.clear()
            self._bounds[principal.key_id] = principal, bounds
        return bounds

    async def _admitted(self, claim: Claim) -> Verdict:
        for _ in range(TRIES):
            verdict = await self._counters.admit(claim)
            if verdict.answer is not Answer.UNKNOWN:
                if verdict.stale >= 0:
                    self.spawn(self._compare(claim.bounds.pots[verdict.stale]))
                return verdict
            await self._learn(claim.bounds.pots[verdict.which])
        raise _unknown()

    async def _learn(self, pot: Pot) -> None:
        """Ask the ledger what was spent; one question serves all who wait."""
        task = self._learning.get(pot.counter)
        if task is None:
            task = self.spawn(self._ask_ledger(pot))
            self._learning[pot.counter] = task
            task.add_done_callback(lambda _: self._learning.pop(pot.counter, None))
        await asyncio.shield(task)

    async def _ask_ledger(self, pot: Pot) -> None:
        nanos = await self._spent(pot.owner, pot.start)
        await self._counters.raise_spent(pot, nanos)

    async def _compare(self, pot: Pot) -> None:
        try:
            await self._ask_ledger(pot)
        except ApiError as error:
            logger.warning("what was spent was not compared with the ledger: %s", error)

    def _extend_wanting(self) -> None:
        wanting, self._wanting = self._wanting, []
        for counted in wanting:
            counted.begin_to_ask()

    async def _beat_forever(self) -> None:
        while True:
            running = list(self._running.values())
            await asyncio.sleep(HEARTBEAT_S)
            # those that began since have a fresh lease
            beats = [one.beat() for one in running if one.claim.request_id in self._running]
            for answer in await asyncio.gather(*beats, return_exceptions=True):
                if isinstance(answer, Exception):
                    logger.warning("a lease was not renewed: %s", answer)


class Counted:
    """One request's reservation."""

    def __init__(
        self,
        limiter: CountingLimiter,
        claim: Claim,
        demand: Demand,
        granted: int,
        headers: dict[str, str],
    ) -> None:
        self.headers = headers
        self.claim = claim
        self._limiter = limiter
        self._demand = demand
        self._granted = granted
        self._asked: asyncio.Task[None] | None = None
        self._wants = False
        self._refused = False
        """The last time, so that it is asked once more only when nothing is left."""
        self._failure: ApiError | None = None
        self._settled = False

    async def grant(self, produced: int) -> int:
        left = self._granted - produced
        if left < 0:
            await self._ask_now()
            if self._failure is not None and self._granted < produced:
                raise self._failure
        elif (
            left < AHEAD
            and self._granted < self._demand.output_tokens_max
            and not (self._wants or self._refused)
        ):
            self._wants = True
            self._limiter.want(self)
        return self._granted

    async def settle(self, used: Used) -> None:
        if self._settled:
            return
        self._settled = True
        self._limiter.forget(self.claim.request_id)
        if self._asked is None or self._asked.done():
            await self._settle(used)
        else:  # a tranche that came after the end would stay
            await asyncio.shield(self._limiter.spawn(self._settle_after(self._asked, used)))

    def begin_to_ask(self) -> None:
        if not self._settled and (self._asked is None or self._asked.done()):
            self._asked = self._limiter.spawn(self._extend())

    async def beat(self) -> None:
        await self._limiter.beat(self.claim)

    async def _ask_now(self) -> None:
        """Returns when there is an answer that was asked for at a time when more was needed."""
        if self._asked is not None and not self._asked.done():
            before = self._granted
            await asyncio.shield(self._asked)
            if self._granted > before:
                return
        self.begin_to_ask()
        assert self._asked is not None
        await asyncio.shield(self._asked)

    async def _extend(self) -> None:
        demand, claim = self._demand, self.claim
        tokens = min(TRANCHE, demand.output_tokens_max - self._granted)
        if tokens < 1:
            return
        self._failure = None
        try:
            granted = await self._limiter.extend(
                claim, demand.prompt_tokens + self._granted, tokens
            )
        except ApiError as error:
            self._failure = error
            granted = 0
        self._granted += granted
        self._refused = granted == 0
        self._wants = False

    async def _settle_after(self, asked: asyncio.Task[None], used: Used) -> None:
        await asyncio.wait((asked,))
        await self._settle(used)

    async def _settle(self, used: Used) -> None:
        cost = cost_nanos(
            self._demand.price, used.prompt_tokens, used.cached_tokens, used.output_tokens
        )
        tokens = used.prompt_tokens + used.output_tokens
        await self._limiter.settle(self.claim, tokens, cost, refused=used.refused)


def _first_tranche(demand: Demand, bounds: Bounds) -> int:
    """Less than a tranche where the limit is hardly more than the prompt.

    Raises RateLimited for a prompt that never will fit.
    """
    first = min(demand.output_tokens_max, TRANCHE)
    for bound in bounds.tokens:
        room = bound.limit - demand.prompt_tokens
        if bound.limit == 0:
            raise RateLimited(_closed(bound), limits=rate_headers(bounds, ()))
        if room < 1:
            raise RateLimited(
                f"Request too large: its prompt has {demand.prompt_tokens} tokens, and the "
                f"{bound.owner}'s limit is {bound.limit} tokens per minute, prompt and answer "
                "together. Make the prompt shorter.",
                limits=rate_headers(bounds, ()),
            )
        first = min(first, room)
    return first


def _refusal(verdict: Verdict, bounds: Bounds, headers: dict[str, str]) -> RateLimited:
    wait_s: float | None = math.ceil(verdict.wait_ms / 1000)
    match verdict.answer:
        case Answer.WINDOW_FULL:
            bound = (bounds.requests + bounds.tokens)[verdict.which]
            kind = "requests" if verdict.which < len(bounds.requests) else "tokens"
            message = (
                f"Rate limit reached: the {bound.owner}'s limit is {bound.limit} {kind} per "
                f"minute. Try again in {wait_s} s."
            )
            if bound.limit == 0:
                message, wait_s = _closed(bound), None
        case Answer.NO_PLACE:
            bound = bounds.running[verdict.which]
            message = (
                f"Rate limit reached: the {bound.owner}'s limit is {bound.limit} requests at the "
                "same time. Wait until one has ended."
            )
            if bound.limit == 0:
                message, wait_s = _closed(bound), None
        case Answer.HELD:
            pot = bounds.pots[verdict.which]
            message = (
                f"What is left of the {_owner(pot)}'s budget of this {pot.period} is held by "
                "requests that run. Wait until one has ended."
            )
        case _:
            pot = bounds.pots[verdict.which]
            return InsufficientQuota(
                f"The {_owner(pot)}'s budget of this {pot.period} is spent, or what is left of it "
                f"does not pay for this request. Raise it, or wait for the next {pot.period} "
                "(UTC).",
                limits=headers,
            )
    return RateLimited(message, retry_after_s=wait_s, limits=headers)


def _closed(bound: Bound) -> str:
    """Waiting does not help: whoever set the limit must act."""
    return f"The {bound.owner}'s limit is 0, so none of its requests is served. Raise it."


def _owner(pot: Pot) -> str:
    return pot.owner.partition(":")[0]


def _unknown() -> LimiterUnavailable:
    return LimiterUnavailable(
        "What was spent of a budget cannot be told at the moment. Try again in a moment."
    )
