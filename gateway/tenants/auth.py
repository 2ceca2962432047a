"""Who asks: from the Authorization header to a Principal.

Text that can't be a key never gets to the database, and keys that it told of lately don't either
(`key_cache.py`). When it is away, nobody is told that their key is wrong: that is a 503.
"""

import time
from collections.abc import Callable
from typing import Any, NoReturn

from litestar import Request
from litestar.types import HTTPScope

from gateway.db import now
from gateway.errors import InvalidKey, PermissionDenied
from gateway.settings import Settings, SettingsError
from gateway.tenants import key_form
from gateway.tenants.failures import Failures
from gateway.tenants.key_cache import KeyCache
from gateway.tenants.keys import ADMIN, Principal
from gateway.tenants.known_keys import KnownKey
from gateway.tenants.last_used import LastUsed
from gateway.tenants.networks import Sources, within
from gateway.tenants.pepper import KeyHash

WRONG_KEY = "Incorrect API key. Check that it is complete and belongs to this server."


def bootstrap_key(settings: Settings, key_hash: KeyHash) -> KnownKey | None:
    """The admin key of the settings. Raises SettingsError."""
    text = settings.keys.admin.reveal()
    if not text:
        return None
    public_id = key_form.public_id(text)
    if public_id is None or not key_form.is_admin(text):
        raise SettingsError("keys.admin is no admin key; `loragate keys generate` makes one.")
    return KnownKey(
        hash=key_hash.of(text),
        principal=Principal("", "", "", frozenset({ADMIN}), public_id=public_id),
        revoked=False,
        expires_at=None,
        tenant_status="active",
        allowed_networks=None,
    )


class Authenticator:
    def __init__(
        self,
        cache: KeyCache,
        key_hash: KeyHash,
        last_used: LastUsed,
        sources: Sources,
        bootstrap: KnownKey | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._key_hash = key_hash
        self._last_used = last_used
        self._sources = sources
        self._bootstrap = bootstrap
        self._failures = Failures(clock)

    async def __call__(self, request: Request[Any, Any, Any]) -> Principal:
        """The Litestar dependency `principal`."""
        principal = await self.authenticate(_authorization(request.scope), request.scope)
        request.scope["state"]["tenant"] = principal.tenant_slug  # for the access log
        return principal

    async def authenticate(self, header: str | None, scope: HTTPScope) -> Principal:
        """Raises InvalidKey, PermissionDenied for a suspended tenant or a network that the key is
        not for, RateLimited after many wrong keys, DatabaseUnavailable."""
        key = _bearer(header)
        public_id = key_form.public_id(key)
        if public_id is None:
            self._refuse_wrong(
                scope,
                "This is no API key of this server: it is mistyped, cut short or another "
                "service's. Keys look like lg_sk_…; `loragate keys create` makes one.",
            )
        known = await self._find(public_id, key, scope)
        self._check_in_force(known, scope)
        if known is not self._bootstrap:
            self._last_used.note(known.principal.key_id)
        return known.principal

    async def _find(self, public_id: str, key: str, scope: HTTPScope) -> KnownKey:
        """A key that was right before is never held up by what others try from the same address."""
        held = self._held(public_id)
        right = held is not None and self._key_hash.matches(key, held.hash)
        if not right:
            self._failures.check(self._sources.address(scope))
        known = held if self._is_bootstrap(public_id) else await self._cache.find(public_id)
        if known is not held:
            right = known is not None and self._key_hash.matches(key, known.hash)
        if known is None or not right:
            self._refuse_wrong(scope, WRONG_KEY)
        return known

    def _held(self, public_id: str) -> KnownKey | None:
        return self._bootstrap if self._is_bootstrap(public_id) else self._cache.held(public_id)

    def _is_bootstrap(self, public_id: str) -> bool:
        return self._bootstrap is not None and self._bootstrap.principal.public_id == public_id

    def _refuse_wrong(self, scope: HTTPScope, message: str) -> NoReturn:
        address = self._sources.address(scope)
        self._failures.check(address)
        self._failures.note(address)
        raise InvalidKey(message)

    def _check_in_force(self, known: KnownKey, scope: HTTPScope) -> None:
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
        if known.allowed_networks is not None:
            address = self._sources.address(scope)
            if not within(address, known.allowed_networks):
                raise PermissionDenied(
                    f"This API key cannot be used from the address that this request comes from, "
                    f"{address or 'unknown'}. Use it from a network that it was created for.",
                    code="network_not_allowed",
                )


def _authorization(scope: HTTPScope) -> str | None:
    """Not by way of `request.headers`, which would read all of them."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            return value.decode("latin-1")
    return None


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
