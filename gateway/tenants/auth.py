"""Who asks: from the Authorization header to a Principal.

The database is off the hot path. What it said of a key is believed for a moment, so a revocation
reaches every replica within `CACHE_S`; text that can't be a key never gets that far. When the
database is away, nobody is told that their key is wrong: that is a 503.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from litestar import Request

from gateway.db import Database, now
from gateway.errors import InvalidKey, PermissionDenied
from gateway.tenants import key_form
from gateway.tenants.keys import KnownKey, Principal, known_key
from gateway.tenants.last_used import LastUsed
from gateway.tenants.pepper import KeyHash

CACHE_S = 3.0
CACHE_KEYS_MAX = 10_000
"""Also bounds what someone can fill it with who invents keys; the oldest go first."""

WRONG_KEY = "Incorrect API key. Check that it is complete and belongs to this server."


class Authenticator:
    def __init__(
        self,
        database: Database,
        key_hash: KeyHash,
        last_used: LastUsed,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database = database
        self._key_hash = key_hash
        self._last_used = last_used
        self._clock = clock
        # public id → what is known, believed until; None: there is no such key
        self._known: dict[str, tuple[KnownKey | None, float]] = {}
        self._asking: dict[str, asyncio.Task[KnownKey | None]] = {}

    async def __call__(self, request: Request[Any, Any, Any]) -> Principal:
        """The Litestar dependency `principal`."""
        principal = await self.authenticate(request.headers.get("authorization"))
        request.scope["state"]["tenant"] = principal.tenant_slug  # for the access log
        return principal

    async def authenticate(self, header: str | None) -> Principal:
        """Raises InvalidKey, PermissionDenied for a suspended tenant, DatabaseUnavailable."""
        key = _bearer(header)
        public_id = key_form.public_id(key)
        if public_id is None:
            raise InvalidKey(
                "This is no API key of this server: it is mistyped, cut short or another "
                "service's. Keys look like lg_sk_…; `loragate keys create` makes one."
            )
        known = await self._look_up(public_id)
        if known is None or not self._key_hash.matches(key, known.hash):
            raise InvalidKey(WRONG_KEY)
        _check_in_force(known)
        self._last_used.note(known.principal.key_id)
        return known.principal

    async def _look_up(self, public_id: str) -> KnownKey | None:
        known, until = self._known.get(public_id, (None, 0.0))
        if self._clock() < until:
            return known
        task = self._asking.get(public_id)
        if task is None:  # else somebody asks already, and one question serves all
            task = asyncio.create_task(self._ask(public_id))
            self._asking[public_id] = task
            task.add_done_callback(lambda _: self._asking.pop(public_id, None))
        return await asyncio.shield(task)

    async def _ask(self, public_id: str) -> KnownKey | None:
        asked_at = self._clock()  # before the question: the answer may be that old
        async with self._database.reading() as connection:
            known = await known_key(connection, public_id)
        self._known.pop(public_id, None)
        self._known[public_id] = (known, asked_at + CACHE_S)
        if len(self._known) > CACHE_KEYS_MAX:
            del self._known[next(iter(self._known))]
        return known


def _bearer(header: str | None) -> str:
    if not header:
        raise InvalidKey(
            "No API key was sent. Send it as a header, `Authorization: Bearer lg_sk_…`; "
            "`loragate keys create` makes one."
        )
    scheme, _, key = header.partition(" ")
    if scheme.lower() != "bearer":
        raise InvalidKey(
            "The Authorization header has another scheme than Bearer. "
            "Send `Authorization: Bearer lg_sk_…`."
        )
    return key.strip()


def _check_in_force(known: KnownKey) -> None:
    """Only whoever holds the right key gets to read why it doesn't work."""
    if known.tenant_status == "deleted":
        raise InvalidKey(WRONG_KEY)
    if known.revoked:
        raise InvalidKey("This API key has been revoked. Use another one.")
    if known.expires_at is not None and known.expires_at <= now():
        raise InvalidKey("This API key has expired. Ask for a new one.")
    if known.tenant_status != "active":
        raise PermissionDenied(
            "This account is suspended. Ask the operator of this server about it.",
            code="tenant_suspended",
        )
