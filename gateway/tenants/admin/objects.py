"""The admin API's requests and answers."""

from datetime import datetime
from typing import Any, Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from gateway.tenants.admin.limits import TenantLimits
from gateway.tenants.audit.reading import told
from gateway.tenants.audit.tables import AuditEntry
from gateway.tenants.keys import IssuedKey
from gateway.tenants.limits.rules import Limits
from gateway.tenants.plans import Plan
from gateway.tenants.tables import ApiKey, Tenant

T = TypeVar("T")

LimitValue = int | None | UnsetType
Scope = Literal["inference", "adapters:read", "adapters:write", "policy:write", "usage:read"]

# --- requests -------------------------------------------------------------------------------------


class NewTenant(Struct, frozen=True, forbid_unknown_fields=True):
    slug: str
    """1 to 63 lower-case letters, digits and inner hyphens; it never changes."""
    name: str = ""
    """For people; empty: the slug."""
    plan: str = ""
    """Whose limits hold where the tenant has none of its own; empty: no plan."""
    weight: float = 1.0
    """Share of the engine beside other tenants, 0.01 to 1000."""


class TenantChanges(Struct, frozen=True, forbid_unknown_fields=True):
    """What is left out stays."""

    name: str | None = None
    plan: str | None = None
    """Empty: no plan."""
    weight: float | None = None


class NewKey(Struct, frozen=True, forbid_unknown_fields=True):
    name: str = ""
    scopes: list[Scope] | None = None
    """What it may do; null: all that a tenant's key can."""
    expires_at: int | None = None
    """Unix time; null: never."""
    allowed_adapters: list[str] | None = None
    """Names of the adapters that it may use; null: all of its tenant, and the base model."""
    allowed_networks: list[str] | None = None
    """Networks that it may be used from, `10.0.0.0/8`; null: everywhere."""


class Rotation(Struct, frozen=True, forbid_unknown_fields=True):
    overlap_hours: float = 24.0
    """How long the old key goes on beside the new one."""


class LimitChanges(Struct, frozen=True, forbid_unknown_fields=True):
    """What is left out stays; null: no limit of this kind."""

    requests_per_minute: LimitValue = UNSET
    tokens_per_minute: LimitValue = UNSET
    concurrent_requests: LimitValue = UNSET
    request_tokens_max: LimitValue = UNSET
    adapters_max: LimitValue = UNSET
    adapter_bytes_max: LimitValue = UNSET

    def given(self) -> dict[str, int | None]:
        values: dict[str, LimitValue] = msgspec.structs.asdict(self)
        return {kind: value for kind, value in values.items() if value is not UNSET}


# --- answers --------------------------------------------------------------------------------------


class Page(Struct, Generic[T], frozen=True):
    data: list[T]
    has_more: bool
    """Whether there are more after these: ask with `after`, the id of the last."""
    object: str = "list"


class TenantObject(Struct, frozen=True):
    id: str
    slug: str
    name: str
    plan: str
    status: str
    weight: float
    created_at: int
    """Unix time."""
    object: str = "tenant"


class KeyObject(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "api_key"
    name: str
    redacted_value: str
    scopes: list[str]
    allowed_adapters: list[str] | None
    allowed_networks: list[str] | None
    created_at: int
    """Unix time, as all moments."""
    last_used_at: int | None
    expires_at: int | None
    revoked_at: int | None
    replaced_by: str | None
    """The id of the key that a rotation made in its place."""


class IssuedKeyObject(KeyObject, frozen=True, kw_only=True):
    value: str
    """The key itself, shown this once."""


class LimitsObject(Struct, frozen=True):
    limits: Limits
    """Its own; null: none of this kind."""
    object: str = "limits"


class TenantLimitsObject(Struct, frozen=True):
    limits: Limits
    """The tenant's own; null: its plan's."""
    effective: Limits
    """What holds; null: no limit."""
    object: str = "limits"


class PlanObject(Struct, frozen=True):
    name: str
    limits: Limits
    object: str = "plan"


class DeletedObject(Struct, frozen=True):
    id: str
    object: str
    deleted: bool = True


class AuditObject(Struct, frozen=True):
    sequence: int
    at: str
    """When, in UTC."""
    actor: str
    """`shell:<user>` or `key:<public id>`."""
    action: str
    target: str
    tenant_id: str | None
    request_id: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    hash: str
    """SHA-256 over the entry before's hash and all that stands above."""
    object: str = "audit_entry"


def page(objects: list[T], limit: int) -> Page[T]:
    """Of one object more than fits, if there are more."""
    return Page(objects[:limit], has_more=len(objects) > limit)


def tenant_object(tenant: Tenant) -> TenantObject:
    return TenantObject(
        id=tenant.id,
        slug=tenant.slug,
        name=tenant.name,
        plan=tenant.plan,
        status=tenant.status,
        weight=tenant.weight,
        created_at=int(tenant.created_at.timestamp()),
    )


def key_object(key: ApiKey) -> KeyObject:
    return KeyObject(**_key_fields(key))


def issued_key_object(issued: IssuedKey) -> IssuedKeyObject:
    return IssuedKeyObject(**_key_fields(issued.row), value=issued.text.reveal())


def _key_fields(key: ApiKey) -> dict[str, Any]:
    return {
        "id": key.id,
        "name": key.name,
        "redacted_value": key.redacted,
        "scopes": key.scopes,
        "allowed_adapters": key.allowed_adapters,
        "allowed_networks": key.allowed_networks,
        "created_at": int(key.created_at.timestamp()),
        "last_used_at": _unix(key.last_used_at),
        "expires_at": _unix(key.expires_at),
        "revoked_at": _unix(key.revoked_at),
        "replaced_by": key.replaced_by_id,
    }


def tenant_limits_object(limits: TenantLimits) -> TenantLimitsObject:
    return TenantLimitsObject(limits.own, limits.effective)


def plan_object(plan: Plan) -> PlanObject:
    return PlanObject(plan.name, plan.limits)


def audit_object(entry: AuditEntry) -> AuditObject:
    return AuditObject(**told(entry))


def _unix(moment: datetime | None) -> int | None:
    return None if moment is None else int(moment.timestamp())
