"""Tells every gateway what has changed, so that none believes what is no longer so.

    a door ── commit ── Announcer.tell ─┬─► this process forgets
                                        └─► Redis channel ─► each replica's Announcer ─► it forgets

A message may be lost, so nothing depends on one alone: what a gateway has read is believed for
`HEARD_S` while it hears the channel, and for `ALONE_S` where it doesn't or there is no Redis. It
asks the channel for a sign of life all the time, as a dead connection looks like a quiet one.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
from msgspec import Struct
from redis.asyncio import Redis
from redis.asyncio.client import PubSub
from redis.exceptions import RedisError

from gateway.background import in_background

log = logging.getLogger(__name__)

CHANNEL = "loragate:changed"
HEARD_S = 10.0
"""How long what was read is believed while changes are heard of at once. Only a change by someone
whom Redis doesn't reach takes that long, and it is announced as soon as it does."""
ALONE_S = 1.0
"""The same where changes are not heard of."""
PING_S = 0.25
SILENCE_S = 0.75
"""Without a sign of life for so long, the channel counts as dead."""
RECONNECT_S = 0.25
TELL_S = 1.0
UNTOLD_MAX = 100
"""Announcements kept for when Redis is back; past that, one that says "everything"."""


class Changed(Struct, frozen=True):
    """What no gateway should believe its cache about."""

    keys: tuple[str, ...] = ()
    """Public ids."""
    tenants: tuple[str, ...] = ()
    """Ids; all keys of these."""
    everything: bool = False

    def __bool__(self) -> bool:
        return bool(self.keys or self.tenants or self.everything)


class Announcer:
    def __init__(self, redis: Redis | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._redis = redis
        self._clock = clock
        self._listeners: list[Callable[[Changed], None]] = []
        self._heard_at = -SILENCE_S
        self._untold: list[Changed] = []

    def on_change(self, forget: Callable[[Changed], None]) -> None:
        """Call `forget` with each change that is told here or heard of."""
        self._listeners.append(forget)

    @property
    def believed_s(self) -> float:
        """How long what was read may be believed now."""
        return HEARD_S if self._clock() - self._heard_at < SILENCE_S else ALONE_S

    async def tell(self, changed: Changed) -> bool:
        """Call it once the change is committed. False: Redis is away, and is told when it is back
        if this process still runs."""
        if not changed:
            return True
        self._forget(changed)
        if self._redis is None:
            return True
        try:
            await self._publish(changed)
        except (RedisError, OSError, TimeoutError) as error:
            log.warning(
                "Redis is away (%s): other gateways learn of a change within %.0f s",
                type(error).__name__,
                HEARD_S,
            )
            self._keep(changed)
            return False
        return True

    async def _publish(self, changed: Changed) -> None:
        assert self._redis is not None
        async with asyncio.timeout(TELL_S):
            await self._redis.publish(CHANNEL, msgspec.json.encode(changed))

    def _keep(self, changed: Changed) -> None:
        self._untold.append(changed)
        if len(self._untold) > UNTOLD_MAX:
            self._untold = [Changed(everything=True)]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Listen, if there is Redis."""
        if self._redis is None:
            yield
            return
        async with in_background(self._listen_forever(self._redis)):
            yield

    async def _listen_forever(self, redis: Redis) -> None:
        away = False
        while True:
            try:
                async with redis.pubsub() as channel:
                    await channel.subscribe(CHANNEL)
                    await self._listen(channel)
            except (RedisError, OSError, TimeoutError) as error:
                if not away:
                    log.warning(
                        "not hearing of changes from Redis (%s): what was read of a key is "
                        "believed for %.0f s only",
                        type(error).__name__,
                        ALONE_S,
                    )
                away = True
            else:
                away = False
            await asyncio.sleep(RECONNECT_S)

    async def _listen(self, channel: PubSub) -> None:
        """Until the channel goes silent. Raises what the connection raises."""
        pinged_at = heard_at = self._clock()
        while self._clock() - heard_at < SILENCE_S:
            if self._clock() - pinged_at >= PING_S:
                pinged_at = self._clock()
                await channel.ping()
            message = await channel.get_message(timeout=PING_S)
            if message is None:
                continue
            heard_at = self._clock()
            if message["type"] == "message":
                self._hear(message["data"])
            elif message["type"] == "subscribe":
                self._forget(Changed(everything=True))  # what was said before, nobody knows
            self._heard_at = heard_at
            await self._tell_untold()

    async def _tell_untold(self) -> None:
        while self._untold:
            await self._publish(self._untold[0])
            del self._untold[0]

    def _forget(self, changed: Changed) -> None:
        for forget in self._listeners:
            forget(changed)

    def _hear(self, message: bytes) -> None:
        try:
            changed = msgspec.json.decode(message, type=Changed)
        except msgspec.DecodeError:  # of a newer version, perhaps
            changed = Changed(everything=True)
        self._forget(changed)
