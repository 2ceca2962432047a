"""API keys: create, list, revoke; and what a verified one may do."""

from collections.abc import Iterable, Sequence
from datetime import datetime

from msgspec import Struct
from sqlalchemy import bindparam, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from gateway.db import now
from gateway.errors import InvalidRequest, NotFound, PermissionDenied
from gateway.settings import Secret
from gateway.tenants import key_form
from gateway.tenants.limits.rules import BudgetRule, Limits
from gateway.tenants.pepper import KeyHash
from gateway.tenants.tables import ApiKey, Tenant

TENANT_SCOPES = ("inference", "adapters:read", "adapters:write", "policy:write", "usage:read")
ADMIN = "admin"
SCOPES = (*TENANT_SCOPES, ADMIN)
NAME_CHARACTERS_MAX = 200


class Principal(Struct, frozen=True):
    """Whom a request comes from, and what it may do."""

    tenant_id: str
    tenant_slug: str
    key_id: str
    scopes: frozenset[str]
    weight: float = 1.0
    tenant_limits: Limits = Limits()
    """The tenant's own, and its plan's where it has none."""
    key_limits: Limits = Limits()
    """Those of the key, which hold as well."""
    budgets: tuple[BudgetRule, ...] = ()
    """The tenant's and the key's."""
    allowed_adapters: frozenset[str] | None = None
    """Names of adapters; None: all of the tenant, and the base model."""

    def require(self, scope: str) -> None:
        """Raises PermissionDenied."""
        if scope not in self.scopes:
            raise PermissionDenied(
                f"This API key lacks the scope `{scope}`. Use a key that was created with it."
            )


class IssuedKey(Struct, frozen=True):
    """A stored key and, this once, its text."""

    row: ApiKey
    text: Secret


async def create_key(
    session: AsyncSession,
    key_hash: KeyHash,
    tenant_id: str,
    name: str = "",
    scopes: Iterable[str] = TENANT_SCOPES,
    expires_at: datetime | None = None,
) -> IssuedKey:
    """Raises InvalidRequest."""
    wanted = _checked_scopes(scopes)
    if len(name) > NAME_CHARACTERS_MAX:
        raise InvalidRequest(
            f"A key's name has at most {NAME_CHARACTERS_MAX} characters.", param="name"
        )
    if expires_at is not None and expires_at <= now():
        raise InvalidRequest("The expiry lies in the past.", param="expires_at")
    made = key_form.make()
    row = ApiKey(
        tenant_id=tenant_id,
        public_id=made.public_id,
        hash=key_hash.of(made.text.reveal()),
        name=name,
        scopes=wanted,
        expires_at=expires_at,
        last4=made.last4,
    )
    session.add(row)
    await session.flush()
    return IssuedKey(row=row, text=made.text)


def _checked_scopes(scopes: Iterable[str]) -> list[str]:
    wanted = set(scopes)
    if unknown := wanted - set(SCOPES):
        raise InvalidRequest(
            f"Unknown scope {sorted(unknown)[0][:50]!r}. There are {', '.join(SCOPES)}.",
            param="scopes",
        )
    if not wanted:
        raise InvalidRequest("A key needs at least one scope.", param="scopes")
    if ADMIN in wanted and len(wanted) > 1:
        # a key that does both would let an administrator's work escape the tenant's limits
        raise InvalidRequest("`admin` stands alone: admin keys cannot call models.", param="scopes")
    return [scope for scope in SCOPES if scope in wanted]


async def list_keys(session: AsyncSession, tenant_id: str) -> Sequence[ApiKey]:
    return (
        await session.scalars(
            select(ApiKey).where(ApiKey.tenant_id == tenant_id).order_by(ApiKey.created_at)
        )
    ).all()


async def revoke_key(session: AsyncSession, tenant_id: str, key: str) -> ApiKey:
    """Revoke by id or public id; a second time changes nothing. Raises NotFound.

    Gateways learn of it within `auth.CACHE_S`.
    """
    row = await session.scalar(
        select(ApiKey).where(
            ApiKey.tenant_id == tenant_id, (ApiKey.id == key) | (ApiKey.public_id == key)
        )
    )
    if row is None:
        raise NotFound("This tenant has no such key. See `loragate keys list`.")
    if row.revoked_at is None:
        row.revoked_at = now()
    return row


class KnownKey(Struct, frozen=True):
    """What the database said of a key, immutable: it is asked again rather than written back."""

    hash: bytes
    principal: Principal
    revoked: bool
    expires_at: datetime | None
    tenant_status: str


_KNOWN_KEY = (
    select(
        ApiKey.id.label("key_id"),
        ApiKey.hash,
        ApiKey.scopes,
        ApiKey.revoked_at,
        ApiKey.expires_at,
        Tenant.id.label("tenant_id"),
        Tenant.slug,
        Tenant.weight,
        Tenant.status,
    )
    .join(Tenant)
    .where(ApiKey.public_id == bindparam("public_id"))
)
"""Built once, as it is asked for many requests."""


async def known_key(connection: AsyncConnection, public_id: str) -> KnownKey | None:
    """For authentication, which doesn't know the tenant yet."""
    row = (await connection.execute(_KNOWN_KEY, {"public_id": public_id})).one_or_none()
    if row is None:
        return None
    return KnownKey(
        hash=row.hash,
        principal=Principal(
            tenant_id=row.tenant_id,
            tenant_slug=row.slug,
            key_id=row.key_id,
            scopes=frozenset(row.scopes),
            weight=row.weight,
        ),
        revoked=row.revoked_at is not None,
        expires_at=row.expires_at,
        tenant_status=row.status,
    )
