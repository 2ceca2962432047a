"""Who changed what: rows that are only ever added, each holding the hash of the one before."""

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from gateway.db import Base


class AuditEntry(Base):
    __tablename__ = "audit_entries"
    __table_args__ = (Index(None, "tenant_id", "sequence"),)

    sequence: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    """1, 2, 3 …, without a gap."""
    at: Mapped[datetime]
    actor: Mapped[str] = mapped_column(String(200))
    """`shell:<user>` or `key:<public id>`."""
    action: Mapped[str] = mapped_column(String(63))
    """`tenant.create`, `key.revoke`, `limits.set` …"""
    target: Mapped[str] = mapped_column(String(200))
    """`tenant:<id>`, `key:<id>` …"""
    tenant_id: Mapped[str | None] = mapped_column(String(36))
    """Whom it concerns; no foreign key, as an entry outlives everything."""
    request_id: Mapped[str] = mapped_column(String(128), default="")
    before: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    after: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    hash: Mapped[str] = mapped_column(String(64))
    """SHA-256 over the entry before's hash and all that stands above."""


class AuditHead(Base):
    """One row: the newest entry. Whoever appends changes it first, and so waits for its turn."""

    __tablename__ = "audit_head"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    sequence: Mapped[int] = mapped_column(BigInteger)
    hash: Mapped[str] = mapped_column(String(64))
