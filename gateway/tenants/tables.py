"""Who may use the gateway: tenants and their API keys."""

from datetime import datetime

from sqlalchemy import JSON, Double, ForeignKey, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from gateway.db import Base, new_id, now


class Tenant(Base):
    __tablename__ = "tenants"

    id: Mapped[str] = mapped_column(String(36), primary_key=True, default=new_id)
    slug: Mapped[str] = mapped_column(String(63), unique=True)
    name: Mapped[str] = mapped_column(String(200))
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
    tenant_id: Mapped[str] = mapped_column(ForeignKey(Tenant.id, ondelete="CASCADE"))
    public_id: Mapped[str] = mapped_column(String(10), unique=True)
    """The part of the key by which it is looked up; no secret."""
    hash: Mapped[bytes]
    name: Mapped[str] = mapped_column(String(200))
    scopes: Mapped[list[str]] = mapped_column(JSON)
    created_at: Mapped[datetime] = mapped_column(default=now)
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]
    last4: Mapped[str] = mapped_column(String(4))
    """For people to tell keys apart."""

    @property
    def redacted(self) -> str:
        return f"lg_sk_{self.public_id}_…{self.last4}"
