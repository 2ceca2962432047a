"""Random sequences of steps on both kinds of counters, beside a model that keeps every event.

The model knows no buckets that slide and no sums that are kept: it looks at the list of all that
ever happened.
"""

import asyncio
from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import Struct

from gateway.tenants.keys import Principal
from gateway.tenants.limits.counters import (
    BUCKET_MS,
    LEASE_MS,
    WINDOW_MS,
    Answer,
    Claim,
)
from gateway.tenants.limits.rules import Limits
from tests.tenants.limits.stores import Kind, budget, claim_of, principal, store

MICROS = 1_500  # 1.5 nanos a token


class Bounded(Struct, frozen=True):
    """Some tight and some loose, so that each comes to decide."""

    requests: int
    tokens: int
    key_tokens: int
    running: int
    amount: int

    def principal(self, key: str) -> Principal:
        return principal(
            Limits(
                requests_per_minute=self.requests,
                tokens_per_minute=self.tokens,
                concurrent_requests=self.running,
            ),
            Limits(tokens_per_minute=self.key_tokens),
            (budget(self.amount),),
            key_id=key,
        )


bounded = st.builds(
    Bounded,
    requests=st.sampled_from([4, 1000]),
    tokens=st.sampled_from([300, 10_000]),
    key_tokens=st.sampled_from([200, 10_000]),
    running=st.sampled_from([3, 1000]),
    amount=st.sampled_from([300, 900, 100_000]),
)

Step = tuple[str, int, int]

steps = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.integers(0, 1), st.integers(1, 120)),
        st.tuples(st.just("extend"), st.integers(0, 9), st.integers(1, 64)),
        st.tuples(st.just("settle"), st.integers(0, 9), st.integers(0, 100)),
        st.tuples(st.just("refuse"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("beat"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("crash"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("pass"), st.integers(0, 45_000), st.just(0)),
        st.tuples(st.just("pass"), st.integers(0, 3_000), st.just(0)),
    ),
    min_size=25,
    max_size=90,
)


@dataclass
class Event:
    at: int
    key: str
    request: str
    tokens: int = 0
    requests: int = 0


@dataclass
class Request:
    claim: Claim
    key: str
    total: int
    ends: int
    """Of its lease: of what is reserved, and of what is held."""
    place_ends: int
    held: int
    live: bool = True
    """Neither settled nor crashed."""


@dataclass
class Model:
    bounds: Bounded
    now: int
    events: list[Event] = field(default_factory=list)
    requests: dict[str, Request] = field(default_factory=dict)
    settled: set[str] = field(default_factory=set)
    spent: int = 0

    def window(self, what: str, key: str | None = None) -> int:
        """In the minute that ends now, begun bucket by bucket."""
        first = (self.now - WINDOW_MS) // BUCKET_MS * BUCKET_MS
        return sum(
            getattr(event, what)
            for event in self.events
            if event.at >= first and key in (None, event.key)
        )

    def in_minute_before(self, moment: int) -> tuple[int, int]:
        events = [event for event in self.events if moment - WINDOW_MS <= event.at <= moment]
        return sum(one.requests for one in events), sum(one.tokens for one in events)

    def running(self) -> int:
        others = (one for name, one in self.requests.items() if name not in self.settled)
        return sum(one.place_ends > self.now for one in others)

    def held(self) -> int:
        others = (one for name, one in self.requests.items() if name not in self.settled)
        return sum(one.held for one in others if one.ends > self.now)

    def admits(self, key: str, tokens: int, nanos: int) -> Answer:
        if self.spent >= self.bounds.amount or self.spent + nanos > self.bounds.amount:
            return Answer.SPENT
        if (
            self.window("requests") + 1 > self.bounds.requests
            or self.window("tokens") + tokens > self.bounds.tokens
            or self.window("tokens", key) + tokens > self.bounds.key_tokens
        ):
            return Answer.WINDOW_FULL
        if self.running() >= self.bounds.running:
            return Answer.NO_PLACE
        if self.spent + self.held() + nanos > self.bounds.amount:
            return Answer.HELD
        return Answer.ADMITTED

    def extends(self, key: str, tokens: int) -> int:
        left = self.bounds.amount - self.spent - self.held()
        granted = min(
            tokens,
            self.bounds.tokens - self.window("tokens"),
            self.bounds.key_tokens - self.window("tokens", key),
            left * 1000 // MICROS,
        )
        return max(0, granted)


async def play(kind: Kind, url: str, bounds: Bounded, script: list[Step]) -> None:
    async with store(kind, url) as (counters, clock):
        model = Model(bounds, clock.ms)
        keys = [bounds.principal("k1"), bounds.principal("k2")]
        (pot,) = claim_of(keys[0], "").bounds.pots
        await counters.raise_spent(pot, 0)
        moments = [model.now]
        for number, (step, which, amount) in enumerate(script):
            live = [name for name, one in model.requests.items() if one.live]
            if step == "pass":
                clock.pass_(which)
                model.now = clock.ms
                moments.append(model.now)
            elif step == "admit":
                name, who = f"r{number}", keys[which]
                claim = claim_of(who, name, amount, amount, MICROS)
                expected = model.admits(who.key_id, amount, amount)
                verdict = await counters.admit(claim)
                assert verdict.answer is expected
                if expected is Answer.ADMITTED:
                    model.events.append(Event(model.now, who.key_id, name, amount, 1))
                    ends = model.now + LEASE_MS
                    model.requests[name] = Request(claim, who.key_id, amount, ends, ends, amount)
                assert [fill.used for fill in verdict.fills] == [
                    model.window("requests"),
                    model.window("tokens"),
                    model.window("tokens", who.key_id),
                ]
            elif live:
                name = live[which % len(live)]
                request = model.requests[name]
                await play_on(model, counters, step, name, request, amount)
        for moment in moments:
            requests, tokens = model.in_minute_before(moment)
            assert requests <= bounds.requests
            assert tokens <= bounds.tokens


async def play_on(model, counters, step: str, name: str, request: Request, amount: int) -> None:
    known = request.ends > model.now
    if step == "extend":
        expected = model.extends(request.key, amount)
        assert await counters.extend(request.claim, request.total, amount) == expected
        if expected:
            nanos = -(-expected * MICROS // 1000)
            request.held = nanos + (request.held if known else 0)
            request.ends = model.now + LEASE_MS
            if not known:
                request.place_ends = request.ends
                for event in model.events:  # what was reserved before can't be given back
                    if event.request == name:
                        event.request = ""
            request.total += expected
            model.events.append(Event(model.now, request.key, name, expected))
    elif step == "beat":
        await counters.beat(request.claim)
        if known:
            if request.place_ends > model.now:
                request.place_ends = model.now + LEASE_MS
            request.ends = model.now + LEASE_MS
    elif step == "crash":
        request.live = False
    else:
        request.live = False
        model.settled.add(name)
        refused = step == "refuse"
        used = min(amount, request.total)
        await counters.settle(request.claim, used, used, refused=refused)
        if known:
            model.spent += used
            unused = request.total - used
            for event in reversed(model.events):
                if event.request == name:
                    back = min(event.tokens, unused)
                    event.tokens -= back
                    unused -= back
                    if refused:
                        event.requests = 0


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(bounds=bounded, script=steps)
def test_counters_do_what_the_model_does(
    kind: Kind, store_url: str, bounds: Bounded, script: list[Step]
) -> None:
    asyncio.run(play(kind, store_url, bounds, script))
