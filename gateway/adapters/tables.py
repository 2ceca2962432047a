"""Which adapters there are: a tenant's names, and the immutable versions behind them.

Adapter ─┬─ NamedVersion 1, 2, … ─► AdapterVersion      (bytes, shared by all who uploaded them)
         └─ AdapterAlias `prod` ─► one NamedVersion, or two of them with a share each
"""

from datetime import datetime

from sqlalchemy import (
    JSON,
    BigInteger,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    String,
    UniqueConstraint,
)
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
    """A tenant's name for versions."""

    __tablename__ = "adapters"
    __table_args__ = (
        UniqueConstraint("tenant_id", "name"),
        Index(None, "version_digest"),
    )

    id: Mapped[str] = mapped_column(String(36), primary_key=True, default=new_id)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str] = mapped_column(String(64))
    version_digest: Mapped[str] = mapped_column(ForeignKey(AdapterVersion.digest))
    """What `latest` means: the version that was uploaded last."""
    last_number: Mapped[int] = mapped_column(default=0, server_default="0")
    """Of its versions; none is given twice."""
    status: Mapped[str] = mapped_column(String(16), default="ready")
    created_at: Mapped[datetime] = mapped_column(default=now)

    version: Mapped[AdapterVersion] = relationship(lazy="joined", innerjoin=True)


class NamedVersion(Base):
    """One of the versions that a tenant's name has, under its number."""

    __tablename__ = "named_versions"
    __table_args__ = (
        UniqueConstraint("adapter_id", "version_digest"),
        Index(None, "version_digest"),
    )

    adapter_id: Mapped[str] = mapped_column(
        ForeignKey(Adapter.id, ondelete="CASCADE"), primary_key=True
    )
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    version_digest: Mapped[str] = mapped_column(ForeignKey(AdapterVersion.digest))
    created_at: Mapped[datetime] = mapped_column(default=now)

    version: Mapped[AdapterVersion] = relationship(lazy="joined", innerjoin=True)


class AdapterAlias(Base):
    """A movable name for a version, or for two, which share its requests."""

    __tablename__ = "adapter_aliases"
    __table_args__ = (
        ForeignKeyConstraint(
            ["adapter_id", "number"],
            [NamedVersion.adapter_id, NamedVersion.number],
            name="fk_adapter_aliases_number_named_versions",
            ondelete="CASCADE",
        ),
        ForeignKeyConstraint(
            ["adapter_id", "newer_number"],
            [NamedVersion.adapter_id, NamedVersion.number],
            name="fk_adapter_aliases_newer_number_named_versions",
            ondelete="CASCADE",
        ),
    )

    adapter_id: Mapped[str] = mapped_column(
        ForeignKey(Adapter.id, ondelete="CASCADE"), primary_key=True
    )
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    number: Mapped[int]
    newer_number: Mapped[int | None]
    """The other version of a split, whose number is the higher one."""
    newer_percent: Mapped[int] = mapped_column(default=0)
    """Of its requests that get the newer version."""
    updated_at: Mapped[datetime] = mapped_column(default=now)
