"""What a limiter needs of the place where the counters lie: Redis, or this process.

Windows slide in steps of `BUCKET_MS`: what was counted in a bucket counts until all of the bucket
is older than `WINDOW_MS`. So no stretch of a minute, wherever it begins, has more than the limit.

     │ b-12 │ … │ b-1 │  b  │        13 buckets are counted, of which the current one is begun
     └──────── ≥ 60 s ────▲ now
"""

from enum import IntEnum
from typing import Protocol

from msgspec import Struct

from gateway.tenants.limits.bounds import Bounds, Pot

BUCKET_MS = 5_000
WINDOW_MS = 60_000
BUCKETS = WINDOW_MS // BUCKET_MS + 1
LEASE_MS = 60_000
"""How long what a crashed process has reserved stays reserved."""
RECHECK_MS = 60_000
"""How often what was spent is compared with the ledger, which knows of crashed requests too."""
SLOT_WAIT_MS = 1_000
"""When to try again for a place among the running requests: nobody can know when one ends."""
HOLD_WAIT_MS = 5_000
"""The same for a budget that is all held by requests that run."""


class CountersLost(Exception):
    """The store does not answer, or not what it should."""


class Claim(Struct, frozen=True):
    """What one request wants reserved at once: one request, one place, and tokens."""

    request_id: str
    bounds: Bounds
    tokens: int
    """The prompt's and the first tranche's."""
    hold_nanos: int
    """What these cost."""
    output_micros: int
    """What a million more tokens cost."""


class Answer(IntEnum):
    ADMITTED = 0
    WINDOW_FULL = 1
    NO_PLACE = 2
    SPENT = 3
    """Of a budget; nothing that runs will change it."""
    HELD = 4
    """What is left of a budget is held by requests that run."""
    UNKNOWN = 5
    """What was spent of a budget: see `raise_spent`, and ask again."""


class Fill(Struct, frozen=True):
    """Of one window, after the answer."""

    used: int
    reset_ms: int
    """From now until nothing in it counts any more."""


class Verdict(Struct, frozen=True):
    answer: Answer
    which: int
    """Index of the bound or pot that decided: in `requests + tokens`, `running` or `pots`."""
    wait_ms: int
    """0 where waiting does not help."""
    stale: int
    """Index of a pot to compare with the ledger, -1 for none; each is told to one asker only."""
    fills: list[Fill]
    """Of the bounds `requests + tokens`."""


class Counters(Protocol):
    """All methods raise CountersLost. Each may be sent twice by a client that lost the answer, and
    counts once."""

    async def admit(self, claim: Claim) -> Verdict:
        """All that was claimed, or nothing; the windows' state either way."""
        ...

    async def extend(self, claim: Claim, total: int, tokens: int) -> int:
        """As many of `tokens` more as fit; -1 - index of a pot of which nothing is known.

        `total` tokens were granted before. What the store has forgotten of the request is begun
        anew with this.
        """
        ...

    async def beat(self, claim: Claim) -> None:
        """Renew the leases of a request that runs. Forgotten ones stay forgotten."""
        ...

    async def settle(self, claim: Claim, tokens: int, cost_nanos: int, *, refused: bool) -> None:
        """End the leases, give unused tokens back to where they came from, and note the cost.

        `tokens` were used, and count even if they are more than were granted; if `refused`, the
        request itself does not count either. Of a request that is not known here, or no more,
        nothing is noted.
        """
        ...

    async def raise_spent(self, pot: Pot, nanos: int) -> None:
        """What the ledger knows was spent at least. Makes the counter where there is none."""
        ...
