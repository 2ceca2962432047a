"""What bounds one principal's requests, with the names under which the counters lie.

All of a tenant's names share the hash tag `{tenant id}`: in a Redis Cluster they are in one slot,
which a script over several of them needs.
"""

from datetime import UTC, datetime, timedelta
from typing import Literal

from msgspec import Struct

from gateway.tenants.keys import Principal
from gateway.tenants.limits.rules import BudgetRule

PREFIX = "loragate:limits"


class Bound(Struct, frozen=True):
    """A limit of the tenant's or the key's."""

    name: str
    """Of its window or its leases, in the store."""
    owner: Literal["tenant", "key"]
    limit: int


class Pot(Struct, frozen=True):
    """A hard budget in the period that runs now."""

    counter: str
    """Name of what was spent and is held."""
    holds: str
    """Name of the leases of what is held."""
    owner: str
    """`tenant:<id>` or `key:<id>`."""
    period: Literal["day", "month"]
    start: datetime
    end: datetime
    amount_nanos: int

    @property
    def end_ms(self) -> int:
        return int(self.end.timestamp() * 1000)


class Bounds(Struct, frozen=True):
    """Empty where there is nothing to count."""

    tenant_id: str
    requests: tuple[Bound, ...]
    """Per minute."""
    tokens: tuple[Bound, ...]
    """Per minute."""
    running: tuple[Bound, ...]
    """At the same time."""
    pots: tuple[Pot, ...]
    valid_until: datetime
    """When a budget's next period begins."""

    def __bool__(self) -> bool:
        return bool(self.requests or self.tokens or self.running or self.pots)

    def record(self, request_id: str) -> str:
        """Name of what is reserved for one request."""
        return f"{PREFIX}:{{{self.tenant_id}}}:request:{request_id}"


def bounds_of(principal: Principal, now: datetime) -> Bounds:
    prefix = f"{PREFIX}:{{{principal.tenant_id}}}"
    owners: tuple[tuple[Literal["tenant", "key"], str], ...] = (
        ("tenant", "tenant"),
        ("key", f"key:{principal.key_id}"),
    )
    limits = {"tenant": principal.tenant_limits, "key": principal.key_limits}

    def bounds(kind: str) -> tuple[Bound, ...]:
        return tuple(
            Bound(f"{prefix}:{label}:{kind}", owner, limit)
            for owner, label in owners
            if (limit := getattr(limits[owner], kind)) is not None
        )

    return Bounds(
        tenant_id=principal.tenant_id,
        requests=bounds("requests_per_minute"),
        tokens=bounds("tokens_per_minute"),
        running=bounds("concurrent_requests"),
        pots=tuple(_pot(rule, prefix, now) for rule in principal.budgets if rule.hard),
        valid_until=_day(now) + timedelta(days=1),
    )


def request_tokens_max(principal: Principal) -> int | None:
    """Prompt and output of one request together; None: no limit."""
    limits = (principal.tenant_limits, principal.key_limits)
    return min(
        (limit.request_tokens_max for limit in limits if limit.request_tokens_max is not None),
        default=None,
    )


def _pot(rule: BudgetRule, prefix: str, now: datetime) -> Pot:
    start, end = period_of(rule.period, now)
    name = f"{prefix}:{rule.owner}:{rule.period}:{start:%Y-%m-%d}"
    return Pot(
        counter=f"{name}:spent",
        holds=f"{name}:holds",
        owner=rule.owner,
        period=rule.period,
        start=start,
        end=end,
        amount_nanos=rule.amount_nanos,
    )


def period_of(period: Literal["day", "month"], now: datetime) -> tuple[datetime, datetime]:
    """Its first moment and the next one's, in UTC."""
    day = _day(now)
    if period == "day":
        return day, day + timedelta(days=1)
    first = day.replace(day=1)
    return first, (first + timedelta(days=31)).replace(day=1)


def _day(now: datetime) -> datetime:
    return now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
