"""Who may use the gateway: plans, tenants, their API keys and limits."""

from datetime import datetime

from sqlalchemy import JSON, BigInteger, Double, ForeignKey, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from gateway.db import Base, new_id, now


class Tenant(Base):
    __tablename__ = "tenants"

    id: Mapped[str] = mapped_column(String(36), primary_key=True, default=new_id)
    slug: Mapped[str] = mapped_column(String(63), unique=True)
    name: Mapped[str] = mapped_column(String(200))
    plan: Mapped[str] = mapped_column(String(63), default="", server_default="")
    """Name of the plan whose limits hold where it has none of its own; empty: no plan."""
    status: Mapped[str] = mapped_column(String(16), default="active")
    """`active`, `suspended` (its keys are refused with 403) or `deleted` (they are unknown)."""
    weight: Mapped[float] = mapped_column(Double, default=1.0)
    """Share of the engine that it gets beside other tenants."""
    created_at: Mapped[datetime] = mapped_column(default=now)


class ApiKey(Base):
    """One key. The key itself is nowhere: `hash` is an HMAC of it under the pepper."""

    __tablename__ = "api_keys"
    __table_args__ = (Index(None, "tenant_id"),)

    id: Mapped[str] = mapped_column(String(36), primary_key=True, default=new_id)
    tenant_id: Mapped[str | None] = mapped_column(ForeignKey(Tenant.id, ondelete="CASCADE"))
    """None: an admin key, which is the operator's and no tenant's."""
    public_id: Mapped[str] = mapped_column(String(10), unique=True)
    """The part of the key by which it is looked up; no secret."""
    prefix: Mapped[str] = mapped_column(String(24), default="lg_sk_", server_default="lg_sk_")
    """What stands before it: names the environment and the kind."""
    hash: Mapped[bytes]
    name: Mapped[str] = mapped_column(String(200))
    scopes: Mapped[list[str]] = mapped_column(JSON)
    allowed_adapters: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    """Names of the adapters that it may call; None: all of its tenant, and the base model."""
    allowed_networks: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    """Networks that it may be used from, `10.0.0.0/8`; None: everywhere."""
    replaced_by_id: Mapped[str | None] = mapped_column(
        ForeignKey("api_keys.id", ondelete="SET NULL")
    )
    """The key that a rotation made in its place; it goes on until `expires_at`."""
    created_at: Mapped[datetime] = mapped_column(default=now)
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]
    last4: Mapped[str] = mapped_column(String(4))
    """For people to tell keys apart."""

    @property
    def redacted(self) -> str:
        return f"{self.prefix}{self.public_id}_…{self.last4}"


class LimitRow(Base):
    """What one plan, tenant or key may do at most; None: this row sets no limit."""

    __tablename__ = "limits"

    owner: Mapped[str] = mapped_column(String(80), primary_key=True)
    """`plan:<name>`, `tenant:<id>` or `key:<id>`."""
    requests_per_minute: Mapped[int | None] = mapped_column(BigInteger)
    tokens_per_minute: Mapped[int | None] = mapped_column(BigInteger)
    concurrent_requests: Mapped[int | None] = mapped_column(BigInteger)
    request_tokens_max: Mapped[int | None] = mapped_column(BigInteger)
    """Prompt and output of one request together."""
    adapters_max: Mapped[int | None] = mapped_column(BigInteger)
    adapter_bytes_max: Mapped[int | None] = mapped_column(BigInteger)
    """Of all stored adapters together. Keys have no limit on what is stored."""
