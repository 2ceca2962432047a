"""What the database said of each key, believed for a moment: it is off the hot path.

How long depends on whether changes are heard of (`announcements.py`). Records are immutable, and a
request writes nothing back: what is forgotten stays so until the database is asked again.

When the database is away, a key that was good is good for `STALE_S` more. Only what it can't tell
of at all is a 503; nobody is told that their key is wrong.
"""

import asyncio
import math
import time
from collections.abc import Callable

from msgspec import Struct

from gateway.db import Database
from gateway.errors import DatabaseUnavailable
from gateway.tenants.announcements import Announcer, Changed
from gateway.tenants.known_keys import KnownKey, known_key

KEYS_MAX = 10_000
"""Of known keys, and of ids that nobody has, each: whoever invents keys can neither fill the memory
nor push out those that are good."""
STALE_S = 60.0
LONG_AGO = -math.inf
RETRY_S = 1.0
"""A database that was away is asked about known keys again after this time; meanwhile nobody waits
for it."""


class Belief(Struct, frozen=True):
    known: KnownKey | None
    """None: there is no such key."""
    asked_at: float


class KeyCache:
    def __init__(
        self,
        database: Database,
        announcer: Announcer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._announcer = announcer
        self._clock = clock
        self._good: dict[str, Belief] = {}
        self._absent: dict[str, Belief] = {}
        self._asking: dict[str, asyncio.Task[KnownKey | None]] = {}
        self._forgotten = 0
        self._retry_at = 0.0
        announcer.on_change(self.forget)

    def held(self, public_id: str) -> KnownKey | None:
        """What was once said of it, however long ago. Good for no decision about access."""
        belief = self._good.get(public_id)
        return None if belief is None else belief.known

    async def find(self, public_id: str) -> KnownKey | None:
        """None: there is no such key. Raises DatabaseUnavailable."""
        belief = self._good.get(public_id) or self._absent.get(public_id)
        if belief is not None and self._age(belief) < self._announcer.believed_s:
            return belief.known
        if belief is None or self._clock() >= self._retry_at:
            try:
                return await self._asked(public_id)
            except DatabaseUnavailable:
                self._retry_at = self._clock() + RETRY_S
        belief = self._good.get(public_id)  # unless it was forgotten meanwhile
        if belief is not None and self._age(belief) < STALE_S:
            return belief.known
        return await self._asked(public_id)

    def forget(self, changed: Changed) -> None:
        self._forgotten += 1
        self._asking.clear()  # who asks from now on must not get an older answer
        if changed.everything:
            self._absent.clear()
        for public_id in changed.keys:
            self._absent.pop(public_id, None)
        for public_id, belief in self._good.items():
            assert belief.known is not None
            if (
                changed.everything
                or public_id in changed.keys
                or belief.known.principal.tenant_id in changed.tenants
            ):
                self._good[public_id] = Belief(belief.known, LONG_AGO)

    def _age(self, belief: Belief) -> float:
        return self._clock() - belief.asked_at

    async def _asked(self, public_id: str) -> KnownKey | None:
        task = self._asking.get(public_id)
        if task is None:  # else somebody asks already, and one question serves all
            task = asyncio.create_task(self._ask(public_id))
            self._asking[public_id] = task
            task.add_done_callback(lambda done: self._answered(public_id, done))
        return await asyncio.shield(task)

    def _answered(self, public_id: str, task: asyncio.Task[KnownKey | None]) -> None:
        if self._asking.get(public_id) is task:
            del self._asking[public_id]
        if not task.cancelled():
            task.exception()  # looked at, even if everyone who waited has gone

    async def _ask(self, public_id: str) -> KnownKey | None:
        asked_at, forgotten = self._clock(), self._forgotten  # the answer may be that old
        async with self._database.reading() as connection:
            known = await known_key(connection, public_id)
        if self._forgotten == forgotten:  # else it may tell of before the change
            self._keep(public_id, Belief(known, asked_at))
        return known

    def _keep(self, public_id: str, belief: Belief) -> None:
        self._good.pop(public_id, None)
        self._absent.pop(public_id, None)
        kept = self._absent if belief.known is None else self._good
        kept[public_id] = belief
        if len(kept) > KEYS_MAX:
            del kept[next(iter(kept))]
