"""Uploads that may be interrupted, and the parts that have arrived."""

from datetime import datetime

from sqlalchemy import BigInteger, ForeignKey, Index, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from gateway.db import Base, new_id, now


class AdapterUpload(Base):
    """An archive on its way, in parts."""

    __tablename__ = "adapter_uploads"
    __table_args__ = (UniqueConstraint("tenant_id", "idempotency_key"), Index(None, "expires_at"))

    id: Mapped[str] = mapped_column(String(36), primary_key=True, default=new_id)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    name: Mapped[str] = mapped_column(String(64))
    """The adapter's, once it is there."""
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(String(64))
    """Of the whole; empty: not given."""
    idempotency_key: Mapped[str | None] = mapped_column(String(255))
    """While it is open; None: not given, or no longer needed."""
    status: Mapped[str] = mapped_column(String(16), default="pending")
    failure: Mapped[str] = mapped_column(String(2000), default="")
    """Why the archive was refused."""
    version_digest: Mapped[str] = mapped_column(String(64), default="")
    """What came of it."""
    created_at: Mapped[datetime] = mapped_column(default=now)
    expires_at: Mapped[datetime]


class AdapterUploadPart(Base):
    """A part that is on disk for good."""

    __tablename__ = "adapter_upload_parts"

    upload_id: Mapped[str] = mapped_column(ForeignKey(AdapterUpload.id), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(String(64))
