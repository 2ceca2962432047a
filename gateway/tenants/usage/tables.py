"""What tokens cost, what was used, and what may be spent.

Money is whole numbers: prices in millionths of the operator's currency for a million tokens, costs
and budgets in its thousand-millionths (nanos), so that no sum depends on rounding along the way.
"""

from datetime import datetime

from sqlalchemy import JSON, BigInteger, Boolean, Double, ForeignKey, Index, String
from sqlalchemy import UniqueConstraint as Unique
from sqlalchemy.orm import Mapped, mapped_column

from gateway.db import Base, new_id, now
from gateway.tenants.tables import Tenant


class Price(Base):
    """Of one model from a moment on; the latest that has begun counts. Rows are never changed."""

    __tablename__ = "prices"
    __table_args__ = (Index(None, "model", "tenant_id", "valid_from"),)

    id: Mapped[str] = mapped_column(String(36), primary_key=True, default=new_id)
    tenant_id: Mapped[str | None] = mapped_column(ForeignKey(Tenant.id, ondelete="CASCADE"))
    """None: for every tenant that has no row of its own."""
    model: Mapped[str] = mapped_column(String(255))
    """The base model, an adapter's name, or `*` for all."""
    input_micros: Mapped[int] = mapped_column(BigInteger)
    cached_input_micros: Mapped[int] = mapped_column(BigInteger)
    """Of tokens of a prompt that were in the cache."""
    output_micros: Mapped[int] = mapped_column(BigInteger)
    valid_from: Mapped[datetime] = mapped_column(default=now)


class UsageEntry(Base):
    """One request. Written first while it runs, then as it grows; counts only ever rise."""

    __tablename__ = "usage_entries"
    __table_args__ = (
        Index(None, "tenant_id", "started_at"),
        Index(None, "key_id", "started_at"),
        Index(None, "tenant_id", "adapter_digest", "started_at"),
    )

    request_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    """Ours, never the client's: two requests are never one entry."""
    tenant_id: Mapped[str] = mapped_column(ForeignKey(Tenant.id))
    key_id: Mapped[str] = mapped_column(String(36))
    model: Mapped[str] = mapped_column(String(255))
    """The adapter's name, whatever the client called it, or the base model's."""
    adapter_digest: Mapped[str | None] = mapped_column(String(64))
    """The version that answered; None: the base model."""
    prompt_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    cached_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    """Of the prompt: those that the cache had."""
    completion_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    cost_nanos: Mapped[int] = mapped_column(BigInteger, default=0)
    started_at: Mapped[datetime] = mapped_column(default=now)
    first_token_ms: Mapped[float | None] = mapped_column(Double)
    duration_ms: Mapped[float | None] = mapped_column(Double)
    finish_reason: Mapped[str | None] = mapped_column(String(32))
    """`stop`, `length`, `cancelled`, `failed`; None: it runs, or its gateway died."""


class Budget(Base):
    """What a tenant, or one of its keys, may spend in a period."""

    __tablename__ = "budgets"
    __table_args__ = (Unique("tenant_id", "owner", "period"),)

    id: Mapped[str] = mapped_column(String(36), primary_key=True, default=new_id)
    tenant_id: Mapped[str] = mapped_column(ForeignKey(Tenant.id, ondelete="CASCADE"))
    owner: Mapped[str] = mapped_column(String(80))
    """`tenant:<id>` or `key:<id>`."""
    period: Mapped[str] = mapped_column(String(8))
    """`day` or `month`, in UTC."""
    amount_nanos: Mapped[int] = mapped_column(BigInteger)
    hard: Mapped[bool] = mapped_column(Boolean, default=True)
    """Whether requests are refused once it is spent; else it only alerts."""
    alert_percents: Mapped[list[int]] = mapped_column(JSON, default=list)
    webhook_url: Mapped[str] = mapped_column(String(2000), default="")
    """Where alerts are sent; empty: they are only logged."""
    created_at: Mapped[datetime] = mapped_column(default=now)


class BudgetAlert(Base):
    """One crossing of a threshold: noted once, sent until it has arrived."""

    __tablename__ = "budget_alerts"
    __table_args__ = (Unique("budget_id", "period_start", "percent"), Index(None, "next_try_at"))

    id: Mapped[str] = mapped_column(String(36), primary_key=True, default=new_id)
    budget_id: Mapped[str] = mapped_column(ForeignKey(Budget.id, ondelete="CASCADE"))
    period_start: Mapped[datetime]
    percent: Mapped[int]
    spent_nanos: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = mapped_column(default=now)
    tries: Mapped[int] = mapped_column(default=0)
    next_try_at: Mapped[datetime | None]
    """None: it has arrived, or nobody wants it, or it was tried often enough."""
    sent_at: Mapped[datetime | None]
