"""What a request needs to know of its key, in one question to the database."""

from datetime import datetime
from typing import Any

from msgspec import Struct
from sqlalchemy import Row, Select, and_, bindparam, literal, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import aliased

from gateway.tenants.keys import ADMIN, Principal
from gateway.tenants.limits.rows import KINDS, either
from gateway.tenants.limits.rules import BudgetRule, Limits
from gateway.tenants.tables import ApiKey, LimitRow, Tenant
from gateway.tenants.usage.tables import Budget


class KnownKey(Struct, frozen=True):
    """What the database said of a key, immutable: it is asked again rather than written back."""

    hash: bytes
    principal: Principal
    revoked: bool
    expires_at: datetime | None
    tenant_status: str
    allowed_networks: tuple[str, ...] | None


OWNERS = {"own": "tenant", "plan": "plan", "key": "key"}
"""Whose limits a row of the answer holds, by the prefix of its columns."""


def _question() -> Select[*tuple[Any, ...]]:
    limits = {name: aliased(LimitRow, name=f"{name}_limits") for name in OWNERS}
    named = {"own": Tenant.id, "plan": Tenant.plan, "key": ApiKey.id}
    question = (
        select(
            ApiKey.id.label("key_id"),
            ApiKey.public_id,
            ApiKey.hash,
            ApiKey.scopes,
            ApiKey.allowed_adapters,
            ApiKey.allowed_networks,
            ApiKey.revoked_at,
            ApiKey.expires_at,
            Tenant.id.label("tenant_id"),
            Tenant.slug,
            Tenant.weight,
            Tenant.status,
            *(
                getattr(table, kind).label(f"{name}_{kind}")
                for name, table in limits.items()
                for kind in KINDS
            ),
            Budget.id.label("budget_id"),
            Budget.owner.label("budget_owner"),
            Budget.period,
            Budget.amount_nanos,
            Budget.hard,
        )
        .outerjoin(Tenant, ApiKey.tenant_id == Tenant.id)
        .where(ApiKey.public_id == bindparam("public_id"))
        .order_by(Budget.id)
    )
    for name, table in limits.items():
        question = question.outerjoin(
            table, table.owner == literal(f"{OWNERS[name]}:") + named[name]
        )
    return question.outerjoin(
        Budget,
        and_(
            Budget.tenant_id == Tenant.id,
            or_(
                Budget.owner == literal("tenant:") + Tenant.id,
                Budget.owner == literal("key:") + ApiKey.id,
            ),
        ),
    )


_QUESTION = _question()
"""Built once, as it is asked for many requests. One row for each budget, and one where there is
none."""


async def known_key(connection: AsyncConnection, public_id: str) -> KnownKey | None:
    """For authentication, which doesn't know the tenant yet."""
    rows = (await connection.execute(_QUESTION, {"public_id": public_id})).all()
    if not rows:
        return None
    row = rows[0]
    networks = row.allowed_networks
    return KnownKey(
        hash=row.hash,
        principal=_principal(row, tuple(_budget(each) for each in rows if each.budget_id)),
        revoked=row.revoked_at is not None,
        expires_at=row.expires_at,
        tenant_status=row.status or "active",  # an admin key has no tenant
        allowed_networks=None if networks is None else tuple(networks),
    )


def _principal(row: Row[Any], budgets: tuple[BudgetRule, ...]) -> Principal:
    scopes = frozenset(row.scopes)
    adapters = row.allowed_adapters
    return Principal(
        tenant_id=row.tenant_id or "",
        tenant_slug=row.slug or "",
        key_id=row.key_id,
        # whatever the row says: the operator's keys do nothing else, and nobody else's do that
        scopes=scopes - {ADMIN} if row.tenant_id else scopes & {ADMIN},
        weight=1.0 if row.weight is None else row.weight,
        tenant_limits=either(_limits(row, "own"), _limits(row, "plan")),
        key_limits=_limits(row, "key"),
        budgets=budgets,
        allowed_adapters=None if adapters is None else frozenset(adapters),
        public_id=row.public_id,
    )


def _limits(row: Row[Any], name: str) -> Limits:
    return Limits(**{kind: getattr(row, f"{name}_{kind}") for kind in KINDS})


def _budget(row: Row[Any]) -> BudgetRule:
    return BudgetRule(
        id=row.budget_id,
        owner=row.budget_owner,
        period=row.period,
        amount_nanos=row.amount_nanos,
        hard=row.hard,
    )
