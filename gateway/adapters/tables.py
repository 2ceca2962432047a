"""Which adapters there are: a tenant's names, and the immutable versions behind them."""

from datetime import datetime

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column, relationship

from gateway.db import Base, new_id, now


class AdapterVersion(Base):
    """Bytes that never change, known by their digest. Stored once, whoever uploaded them."""

    __tablename__ = "adapter_versions"

    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    rank_max: Mapped[int]
    targets: Mapped[list[str]] = mapped_column(JSON)
    base_digest: Mapped[str] = mapped_column(String(64))
    """The base model it was checked and tested with."""
    base_model: Mapped[str] = mapped_column(String(255))
    created_at: Mapped[datetime] = mapped_column(default=now)


class Adapter(Base):
    """A tenant's name for a version; the name may move to another version."""

    __tablename__ = "adapters"
    __table_args__ = (
        UniqueConstraint("tenant_id", "name"),
        Index(None, "version_digest"),
    )

    id: Mapped[str] = mapped_column(String(36), primary_key=True, default=new_id)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str] = mapped_column(String(64))
    version_digest: Mapped[str] = mapped_column(ForeignKey(AdapterVersion.digest))
    status: Mapped[str] = mapped_column(String(16), default="ready")
    created_at: Mapped[datetime] = mapped_column(default=now)

    version: Mapped[AdapterVersion] = relationship(lazy="joined", innerjoin=True)
