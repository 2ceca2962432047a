"""API keys: create, list, rotate, revoke; and what a verified one may do."""

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta

from msgspec import Struct
from sqlalchemy import ColumnElement, select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.db import now
from gateway.errors import Conflict, InvalidRequest, NotFound, PermissionDenied
from gateway.settings import Secret
from gateway.tenants import key_form
from gateway.tenants.limits.rows import copy_limits, key_owner
from gateway.tenants.limits.rules import BudgetRule, Limits
from gateway.tenants.names import can_be_model, checked_name
from gateway.tenants.networks import checked_networks
from gateway.tenants.pepper import KeyHash
from gateway.tenants.tables import ApiKey
from gateway.tenants.usage.budget_rows import copy_budgets

TENANT_SCOPES = ("inference", "adapters:read", "adapters:write", "policy:write", "usage:read")
ADMIN = "admin"
SCOPES = (*TENANT_SCOPES, ADMIN)
ADAPTERS_MAX = 100
"""Adapters that one key can be limited to."""
OVERLAP_MAX = timedelta(days=90)
CALENDAR_END = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
PUBLIC_ID = re.compile(rf"[0-9A-Za-z]{{{key_form.PUBLIC_CHARACTERS}}}")
ID = re.compile(r"[0-9a-f-]{36}")


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
    public_id: str = ""
    """Of its key: how logs and the audit trail call it."""

    def may_use(self, model: str) -> bool:
        """Whether the key is for this adapter, by its name, or for the base model."""
        return self.allowed_adapters is None or model in self.allowed_adapters

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
    tenant_id: str | None,
    name: str = "",
    scopes: Iterable[str] = TENANT_SCOPES,
    expires_at: datetime | None = None,
    *,
    allowed_adapters: Sequence[str] | None = None,
    allowed_networks: Sequence[str] | None = None,
    environment: str = "",
) -> IssuedKey:
    """Without a tenant, an admin key. Raises InvalidRequest."""
    if expires_at is not None and expires_at <= now():
        raise InvalidRequest("The expiry lies in the past.", param="expires_at")
    made = key_form.make("admin" if tenant_id is None else "sk", environment)
    row = ApiKey(
        tenant_id=tenant_id,
        public_id=made.public_id,
        prefix=made.prefix,
        hash=key_hash.of(made.text.reveal()),
        name=checked_name(name, "A key"),
        scopes=[ADMIN] if tenant_id is None else _checked_scopes(scopes),
        allowed_adapters=None if allowed_adapters is None else _checked_models(allowed_adapters),
        allowed_networks=None if allowed_networks is None else checked_networks(allowed_networks),
        expires_at=expires_at,
        last4=made.last4,
    )
    session.add(row)
    await session.flush()
    return IssuedKey(row=row, text=made.text)


def _checked_scopes(scopes: Iterable[str]) -> list[str]:
    """Of a tenant's key."""
    wanted = set(scopes)
    if unknown := wanted - set(SCOPES):
        raise InvalidRequest(
            f"Unknown scope {sorted(unknown)[0][:50]!r}. There are {', '.join(SCOPES)}.",
            param="scopes",
        )
    if not wanted:
        raise InvalidRequest("A key needs at least one scope.", param="scopes")
    if ADMIN in wanted:
        # a key that does both would let an administrator's work escape the tenant's limits
        raise InvalidRequest(
            "Admin keys are the operator's and no tenant's, and cannot call models: "
            "`loragate keys create --admin` makes one.",
            param="scopes",
        )
    return [scope for scope in SCOPES if scope in wanted]


def _checked_models(names: Sequence[str]) -> list[str]:
    if not 1 <= len(names) <= ADAPTERS_MAX:
        raise InvalidRequest(
            f"Name 1 to {ADAPTERS_MAX} adapters, or leave them out: then the key is for all of its "
            "tenant and the base model.",
            param="allowed_adapters",
        )
    for name in names:
        if not can_be_model(name):
            raise InvalidRequest(
                f"{name[:100]!r} cannot be an adapter's name.", param="allowed_adapters"
            )
    return sorted(set(names))


async def list_keys(
    session: AsyncSession, tenant_id: str | None, *, after: str = "", limit: int | None = None
) -> Sequence[ApiKey]:
    """In the order in which they were made, those after the id `after`; None: the admin keys."""
    query = select(ApiKey).where(_owned(tenant_id), ApiKey.id > after).order_by(ApiKey.id)
    return (await session.scalars(query.limit(limit))).all()


async def find_key(
    session: AsyncSession, tenant_id: str | None, key: str, *, change: bool = False
) -> ApiKey:
    """By id or public id; to change it, nobody else does until the transaction ends.

    Raises NotFound.
    """
    column = ApiKey.public_id if PUBLIC_ID.fullmatch(key) else ApiKey.id
    query = select(ApiKey).where(_owned(tenant_id), column == key)
    row = None
    if PUBLIC_ID.fullmatch(key) or ID.fullmatch(key):
        row = await session.scalar(query.with_for_update(key_share=True) if change else query)
    if row is None:
        raise NotFound("There is no such key here. See `loragate keys list`.")
    return row


async def revoke_key(session: AsyncSession, tenant_id: str | None, key: str) -> ApiKey:
    """Revoke by id or public id; a second time changes nothing. Raises NotFound."""
    row = await find_key(session, tenant_id, key, change=True)
    if row.revoked_at is None:
        row.revoked_at = now()
    return row


async def rotate_key(
    session: AsyncSession,
    key_hash: KeyHash,
    old: ApiKey,
    overlap: timedelta,
    environment: str = "",
) -> IssuedKey:
    """A new key that may do what the old one may, under the same limits and budgets; the old one
    goes on for `overlap`. One that was made for 90 days is followed by one for 90 days.

    `old` must have been found to be changed. Raises InvalidRequest and, where there is nothing to
    replace, Conflict.
    """
    if not timedelta() <= overlap <= OVERLAP_MAX:
        raise InvalidRequest(
            f"The overlap is 0 to {OVERLAP_MAX.days * 24} hours.", param="overlap_hours"
        )
    moment = now()
    if old.revoked_at is not None or (old.expires_at is not None and old.expires_at <= moment):
        raise Conflict("This key is no longer in force. Create a new one.")
    if old.replaced_by_id is not None:
        raise Conflict("This key was rotated before. Rotate the one that replaced it.")
    issued = await create_key(
        session,
        key_hash,
        old.tenant_id,
        old.name,
        old.scopes,
        None if old.expires_at is None else _renewed(old.expires_at, old.created_at, moment),
        allowed_adapters=old.allowed_adapters,
        allowed_networks=old.allowed_networks,
        environment=environment,
    )
    await copy_limits(session, key_owner(old.id), key_owner(issued.row.id))
    await copy_budgets(session, key_owner(old.id), key_owner(issued.row.id))
    old.replaced_by_id = issued.row.id
    old.expires_at = min(filter(None, (old.expires_at, moment + overlap)))
    await session.flush()
    return issued


def _renewed(expires_at: datetime, created_at: datetime, moment: datetime) -> datetime:
    """As long from `moment` on as it was from `created_at`; the calendar has an end."""
    return moment + min(expires_at - created_at, CALENDAR_END - moment)


def _owned(tenant_id: str | None) -> ColumnElement[bool]:
    return ApiKey.tenant_id.is_(None) if tenant_id is None else ApiKey.tenant_id == tenant_id
