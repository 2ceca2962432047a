"""The counters in this process: for one gateway alone, and for a while without Redis.

The same as `scripts.py`, step by step; both pass the same tests.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from gateway.tenants.limits.bounds import Bound, Pot
from gateway.tenants.limits.counters import (
    BUCKET_MS,
    BUCKETS,
    HOLD_WAIT_MS,
    LEASE_MS,
    RECHECK_MS,
    SLOT_WAIT_MS,
    WINDOW_MS,
    Answer,
    Claim,
    Fill,
    Verdict,
)

IDLE_MS = 3_600_000
"""After which a budget that nobody uses is forgotten."""


class Window:
    """Counts by bucket, oldest first."""

    __slots__ = ("_buckets", "used")

    def __init__(self) -> None:
        self._buckets: deque[list[int]] = deque()
        self.used = 0

    def slide(self, bucket: int) -> None:
        buckets = self._buckets
        while buckets and buckets[0][0] <= bucket - BUCKETS:
            self.used -= buckets.popleft()[1]

    def count(self, bucket: int, n: int) -> None:
        buckets = self._buckets
        if buckets and buckets[-1][0] == bucket:
            buckets[-1][1] += n
        else:
            buckets.append([bucket, n])
        self.used += n

    def give(self, bucket: int, n: int) -> None:
        for pair in reversed(self._buckets):
            if pair[0] == bucket:
                pair[1] -= n
                self.used -= n
                return

    def wait_ms(self, now: int, excess: int) -> int:
        """When enough buckets will have left for `excess` to be gone."""
        for bucket, n in self._buckets:
            excess -= n
            if excess <= 0:
                return _leaves_ms(bucket, now)
        return BUCKET_MS * BUCKETS

    def reset_ms(self, now: int) -> int:
        return _leaves_ms(self._buckets[-1][0], now) if self._buckets else 0


def _leaves_ms(bucket: int, now: int) -> int:
    return (bucket + BUCKETS) * BUCKET_MS - now


class Leases:
    """Request ids by the end of their leases."""

    __slots__ = ("ends",)

    def __init__(self) -> None:
        self.ends: dict[str, int] = {}

    def full(self, limit: int, now: int) -> bool:
        """Looks for lapsed ones only when it seems full."""
        if len(self.ends) >= limit:
            for request_id in [one for one, end in self.ends.items() if end <= now]:
                del self.ends[request_id]
        return len(self.ends) >= limit


@dataclass
class Purse:
    """What was spent of one budget, and what is held."""

    at_first: int
    spent: int
    checked: int
    held: int = 0
    holds: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Request id → nanos, end of the lease."""

    def hold(self, request_id: str, nanos: int, end: int) -> None:
        held, _ = self.holds.get(request_id, (0, 0))
        self.holds[request_id] = held + nanos, end
        self.held += nanos

    def release(self, request_id: str) -> None:
        nanos, _ = self.holds.pop(request_id, (0, 0))
        self.held -= nanos

    def left(self, amount: int, now: int, *, needed: int) -> int:
        """Looks for lapsed holds only when that decides."""
        if amount - self.spent - self.held < needed:
            for request_id in [one for one, (_, end) in self.holds.items() if end <= now]:
                self.release(request_id)
        return amount - self.spent - self.held


@dataclass(slots=True)
class Record:
    """What is reserved for one request."""

    end: int
    admitted: int
    total: int
    grants: list[list[int]]
    """[bucket, tokens] of each."""


class LocalCounters:
    """`share`: how many processes the limits are for, each of which gets its part, at least 1."""

    def __init__(self, share: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._share = share
        self._clock = clock
        self._windows: dict[str, Window] = {}
        self._leases: dict[str, Leases] = {}
        self._purses: dict[str, Purse] = {}
        self._records: dict[str, Record] = {}
        self._sweep_at = 0

    async def admit(self, claim: Claim) -> Verdict:
        now = self._now()
        bucket = now // BUCKET_MS
        bounds = claim.bounds
        windows = [(self._window(bound), 1, bound) for bound in bounds.requests]
        windows += [(self._window(bound), claim.tokens, bound) for bound in bounds.tokens]
        answer, which, wait = Answer.ADMITTED, 0, 0
        for index, (window, amount, bound) in enumerate(windows):
            window.slide(bucket)
            excess = window.used + amount - self._limit(bound)
            if excess > 0 and (ms := window.wait_ms(now, excess)) > wait:
                answer, which, wait = Answer.WINDOW_FULL, index, ms
        for index, bound in enumerate(bounds.running):
            if not answer and self._running(bound).full(self._limit(bound), now):
                answer, which, wait = Answer.NO_PLACE, index, SLOT_WAIT_MS
        stale = -1
        for index, pot in enumerate(bounds.pots):
            purse = self._purses.get(pot.counter)
            if purse is None:
                if answer is not Answer.UNKNOWN:
                    answer, which, wait = Answer.UNKNOWN, index, 0
                continue
            if answer is not Answer.UNKNOWN and answer is not Answer.SPENT:
                amount = self._amount(pot, purse)
                if purse.spent >= amount or purse.spent + claim.hold_nanos > amount:
                    answer, which, wait = Answer.SPENT, index, 0
                elif not answer and (
                    purse.left(amount, now, needed=claim.hold_nanos) < claim.hold_nanos
                ):
                    answer, which, wait = Answer.HELD, index, HOLD_WAIT_MS
            if now - purse.checked >= RECHECK_MS:
                purse.checked, stale = now, index
        if self._record(claim, now) is not None:
            answer, which, wait = Answer.ADMITTED, 0, 0
        elif not answer:
            for window, amount, _ in windows:
                window.count(bucket, amount)
            self._lease(claim, now)
            for pot in bounds.pots:
                self._purses[pot.counter].hold(claim.request_id, claim.hold_nanos, now + LEASE_MS)
            self._records[claim.request_id] = Record(
                now + LEASE_MS, bucket, claim.tokens, [[bucket, claim.tokens]]
            )
        self._sweep(now)
        fills = [Fill(window.used, window.reset_ms(now)) for window, _, _ in windows]
        return Verdict(answer, which, wait, stale, fills)

    async def extend(self, claim: Claim, total: int, tokens: int) -> int:
        now = self._now()
        bucket = now // BUCKET_MS
        record = self._record(claim, now)
        if record is not None and record.total > total:
            return record.total - total
        windows = [self._window(bound) for bound in claim.bounds.tokens]
        granted, micros = tokens, claim.output_micros
        for window, bound in zip(windows, claim.bounds.tokens, strict=True):
            window.slide(bucket)
            granted = min(granted, self._limit(bound) - window.used)
        for index, pot in enumerate(claim.bounds.pots):
            purse = self._purses.get(pot.counter)
            if purse is None:
                return -1 - index
            if micros:
                needed = _nanos(tokens, micros)
                left = purse.left(self._amount(pot, purse), now, needed=needed)
                granted = min(granted, left * 1000 // micros)
        if granted < 1:
            return 0
        for window in windows:
            window.count(bucket, granted)
        for pot in claim.bounds.pots:
            purse = self._purses[pot.counter]
            purse.hold(claim.request_id, _nanos(granted, micros), now + LEASE_MS)
        if record is None:
            record = self._records[claim.request_id] = Record(now + LEASE_MS, 0, total, [])
            self._lease(claim, now)
        record.end = now + LEASE_MS
        record.total += granted
        if record.grants and record.grants[-1][0] == bucket:
            record.grants[-1][1] += granted
        else:
            record.grants.append([bucket, granted])
        return granted

    async def beat(self, claim: Claim) -> None:
        now = self._now()
        record = self._record(claim, now)
        if record is None:
            return
        request_id, end = claim.request_id, now + LEASE_MS
        record.end = end
        for bound in claim.bounds.running:
            if request_id in (leases := self._running(bound).ends):
                leases[request_id] = end
        for purse in self._known(claim.bounds.pots):
            if request_id in purse.holds:
                purse.holds[request_id] = purse.holds[request_id][0], end

    async def settle(self, claim: Claim, tokens: int, cost_nanos: int, *, refused: bool) -> None:
        now = self._now()
        request_id, bounds = claim.request_id, claim.bounds
        record = self._record(claim, now)
        for bound in bounds.running:
            self._running(bound).ends.pop(request_id, None)
        for purse in self._known(bounds.pots):
            purse.release(request_id)
            if record is not None:
                purse.spent += cost_nanos
        if record is None:
            return
        if refused:
            for bound in bounds.requests:
                self._window(bound).give(record.admitted, 1)
        unused = record.total - tokens
        for bucket, granted in reversed(record.grants):
            if (n := min(granted, unused)) > 0:
                for bound in bounds.tokens:
                    self._window(bound).give(bucket, n)
                unused -= n
        if unused < 0:
            for bound in bounds.tokens:
                self._window(bound).count(now // BUCKET_MS, -unused)
        del self._records[request_id]

    async def raise_spent(self, pot: Pot, nanos: int) -> None:
        now = self._now()
        purse = self._purses.get(pot.counter)
        if purse is None:
            self._purses[pot.counter] = Purse(nanos, nanos, now)
        else:
            purse.spent, purse.checked = max(purse.spent, nanos), now

    def forget_spent(self) -> None:
        """Of every budget."""
        self._purses.clear()

    def _now(self) -> int:
        return int(self._clock() * 1000)

    def _limit(self, bound: Bound) -> int:
        share = self._share
        return bound.limit if share == 1 else max(min(1, bound.limit), bound.limit // share)

    def _amount(self, pot: Pot, purse: Purse) -> int:
        """Of a budget, the share of what was left of it when it was first seen here."""
        if self._share == 1:
            return pot.amount_nanos
        return purse.at_first + (pot.amount_nanos - purse.at_first) // self._share

    def _window(self, bound: Bound) -> Window:
        window = self._windows.get(bound.name)
        if window is None:
            window = self._windows[bound.name] = Window()
        return window

    def _running(self, bound: Bound) -> Leases:
        leases = self._leases.get(bound.name)
        if leases is None:
            leases = self._leases[bound.name] = Leases()
        return leases

    def _known(self, pots: Iterable[Pot]) -> list[Purse]:
        found = (self._purses.get(pot.counter) for pot in pots)
        return [purse for purse in found if purse is not None]

    def _lease(self, claim: Claim, now: int) -> None:
        for bound in claim.bounds.running:
            self._running(bound).ends[claim.request_id] = now + LEASE_MS

    def _record(self, claim: Claim, now: int) -> Record | None:
        """None where it has lapsed, too."""
        record = self._records.get(claim.request_id)
        return None if record is None or record.end <= now else record

    def _sweep(self, now: int) -> None:
        """Once a minute, forget what no longer counts: names and requests have no end of values."""
        if now < self._sweep_at:
            return
        self._sweep_at = now + WINDOW_MS
        for window in self._windows.values():
            window.slide(now // BUCKET_MS)
        self._windows = {name: one for name, one in self._windows.items() if one.reset_ms(now)}
        for leases in self._leases.values():
            leases.full(0, now)
        self._leases = {name: one for name, one in self._leases.items() if one.ends}
        self._purses = {  # the ledger still knows what was spent of the others
            name: one
            for name, one in self._purses.items()
            if one.holds or now - one.checked < IDLE_MS
        }
        self._records = {one: record for one, record in self._records.items() if record.end > now}


def _nanos(tokens: int, micros: int) -> int:
    """Rounded up."""
    return -(-tokens * micros // 1000)
