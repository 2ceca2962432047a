"""Usage summed up: by day, key, model and adapter, or request by request; a page at a time.

Pages go on after the last row's own values, not after a count of rows: no session has to stay open
between two pages, and a page deep in costs no more than the first.
"""

import base64
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from msgspec import Struct
from sqlalchemy import ColumnElement, Row, Select, func, literal_column, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.db import now
from gateway.errors import InvalidRequest
from gateway.tenants.tables import Tenant
from gateway.tenants.usage.tables import UsageEntry

DAY = {
    "postgresql": "to_char(usage_entries.started_at AT TIME ZONE 'UTC', 'YYYY-MM-DD')",
    "sqlite": "substr(usage_entries.started_at, 1, 10)",
}
GROUPS = ("tenant", "day", "key", "model", "adapter")
REQUEST = "request"
"""No group: a row for each request."""
PAGE_MAX = 1000


class UsageRow(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The sums of one group. Of what names it, only what was grouped by is there."""

    object: str = msgspec.field(default_factory=lambda: "usage")
    tenant: str | None = None
    day: str | None = None
    """In UTC, 2026-01-31."""
    key_id: str | None = None
    model: str | None = None
    adapter_digest: str | None = None
    """The version that answered; not there: the base model."""
    request_id: str | None = None
    started_at: str | None = None
    first_token_ms: float | None = None
    duration_ms: float | None = None
    finish_reason: str | None = None
    requests: int
    prompt_tokens: int
    cached_tokens: int
    """Of the tokens of the prompts."""
    completion_tokens: int
    cost_nanos: int


Query = Select[*tuple[Any, ...]]

COUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanos")
OF_A_REQUEST = (
    "started_at", "request_id", "key_id", "model", "adapter_digest", "first_token_ms",
    "duration_ms", "finish_reason",
)  # fmt: skip
COLUMNS = {
    "tenant": "tenant",
    "day": "day",
    "key": "key_id",
    "model": "model",
    "adapter": "adapter_digest",
}


class Question(Struct, frozen=True):
    groups: tuple[str, ...]
    """Of GROUPS, or REQUEST alone; empty: one sum over all."""
    end: datetime
    """Excluded. Fixed from the first page on, so that paging ends."""
    start: datetime | None = None
    tenant_id: str | None = None
    """None: all tenants."""

    @property
    def names(self) -> tuple[str, ...]:
        """The fields of a row, in order."""
        if REQUEST in self.groups:
            tenant = ("tenant",) if "tenant" in self.groups else ()
            return (*tenant, *OF_A_REQUEST, *COUNTS)
        return (*(COLUMNS[group] for group in self.groups), "requests", *COUNTS)


class Page(Struct, frozen=True):
    rows: list[UsageRow]
    after: str | None
    """Where the next page begins; None: this was the last."""


def question(
    group_by: str,
    start: str | None = None,
    end: str | None = None,
    *,
    tenant_id: str | None,
    groups: Sequence[str] = GROUPS,
) -> Question:
    """From what a client asks for. `groups`: those that it may use. Raises InvalidRequest."""
    wanted = tuple(dict.fromkeys(part.strip() for part in group_by.split(",") if part.strip()))
    for name in wanted:
        if name not in (*groups, REQUEST):
            raise InvalidRequest(
                f"Usage cannot be grouped by {name[:40]!r}; it can by {', '.join(groups)}, or it "
                f"is listed by {REQUEST}.",
                param="group_by",
            )
    if REQUEST in wanted and set(wanted) - {REQUEST, "tenant"}:
        raise InvalidRequest(f"`{REQUEST}` is no group: name it alone.", param="group_by")
    return Question(
        groups=wanted,
        start=_moment(start, "start"),
        end=_moment(end, "end") or now(),
        tenant_id=tenant_id,
    )


async def page(
    connection: AsyncConnection, asked: Question, limit: int, after: str | None = None
) -> Page:
    """Raises InvalidRequest for an `after` that is none of ours."""
    if REQUEST in asked.groups:
        query, keys = _requests(asked)
    else:
        query, keys = _sums(asked, connection.dialect.name)
    if keys:
        query = query.order_by(*keys)
    if after is not None:
        query = query.where(_beyond(keys, _read_cursor(after, asked, len(keys))))
    rows = (await connection.execute(query.limit(limit + 1))).all()
    more = len(rows) > limit
    rows = rows[:limit]
    return Page(
        rows=[_row(row) for row in rows],
        after=_cursor(rows[-1], asked) if more and rows else None,
    )


def _conditions(query: Query, asked: Question) -> Query:
    query = query.where(UsageEntry.started_at < asked.end)
    if asked.start is not None:
        query = query.where(UsageEntry.started_at >= asked.start)
    if asked.tenant_id is not None:
        query = query.where(UsageEntry.tenant_id == asked.tenant_id)
    if "tenant" in asked.groups:
        query = query.join(Tenant, Tenant.id == UsageEntry.tenant_id)
    return query


def _requests(asked: Question) -> tuple[Query, list[ColumnElement[Any]]]:
    tenant = [Tenant.slug.label("tenant")] if "tenant" in asked.groups else []
    table = UsageEntry.__table__.c
    columns = [table[name] for name in (*OF_A_REQUEST, *COUNTS)]
    query = select(*tenant, *columns, literal_column("1").label("requests")).select_from(UsageEntry)
    return _conditions(query, asked), [table.started_at, table.request_id]


def _sums(asked: Question, dialect: str) -> tuple[Query, list[ColumnElement[Any]]]:
    expressions: dict[str, ColumnElement[Any]] = {
        "tenant": Tenant.__table__.c.slug,
        "day": literal_column(DAY[dialect]),
        "key": UsageEntry.__table__.c.key_id,
        "model": UsageEntry.__table__.c.model,
        "adapter": literal_column("coalesce(usage_entries.adapter_digest, '')"),
    }
    keys = [expressions[group] for group in asked.groups]
    named = [key.label(COLUMNS[group]) for key, group in zip(keys, asked.groups, strict=True)]
    table = UsageEntry.__table__.c
    sums = [func.coalesce(func.sum(table[name]), 0).label(name) for name in COUNTS]
    query = select(*named, func.count().label("requests"), *sums).select_from(UsageEntry)
    return _conditions(query, asked).group_by(*keys), keys


def _row(row: Row[Any]) -> UsageRow:
    told: dict[str, Any] = dict(row._mapping)
    for name in ("requests", *COUNTS):
        told[name] = int(told[name])  # a sum of large integers is a decimal in PostgreSQL
    if isinstance(moment := told.get("started_at"), datetime):
        told["started_at"] = moment.isoformat()
    told["adapter_digest"] = told.get("adapter_digest") or None
    return UsageRow(**told)


# --- from one page to the next --------------------------------------------------------------------


Aware = Annotated[datetime, msgspec.Meta(tz=True)]


class _Cursor(Struct, frozen=True):
    """A client may have written it: nothing in it is sure but the types."""

    groups: tuple[str, ...]
    start: Aware | None
    end: Aware
    last: tuple[str, ...]


def _cursor(row: Row[Any], asked: Question) -> str:
    told = row._mapping
    if REQUEST in asked.groups:
        last = (told["started_at"].isoformat(), told["request_id"])
    else:
        last = tuple(told[COLUMNS[group]] for group in asked.groups)
    body = msgspec.json.encode(_Cursor(asked.groups, asked.start, asked.end, last))
    return base64.urlsafe_b64encode(body).decode()


def resumed(asked: Question, after: str) -> Question:
    """The question that `after` belongs to: its end is that of the first page. Raises
    InvalidRequest."""
    cursor = _decoded(after)
    if cursor.groups != asked.groups:
        raise _strange()
    start = None if cursor.start is None else _utc(cursor.start)
    return msgspec.structs.replace(asked, start=start, end=_utc(cursor.end))


def _read_cursor(after: str, asked: Question, count: int) -> tuple[Any, ...]:
    cursor = _decoded(after)
    if cursor.groups != asked.groups or len(cursor.last) != count or count == 0:
        raise _strange()
    if REQUEST not in asked.groups:
        return cursor.last
    try:
        moment = datetime.fromisoformat(cursor.last[0])
    except ValueError:
        raise _strange() from None
    return (_utc(moment), cursor.last[1])


def _utc(moment: datetime) -> datetime:
    """Raises InvalidRequest for one before or after all that UTC has."""
    try:
        return _aware(moment).astimezone(UTC)
    except OverflowError:
        raise _strange() from None


def _decoded(after: str) -> _Cursor:
    try:
        cursor = msgspec.json.decode(base64.urlsafe_b64decode(after), type=_Cursor)
    except (ValueError, msgspec.DecodeError):
        raise _strange() from None
    if "\0" in "".join(cursor.last):
        raise _strange()
    return cursor


def _strange() -> InvalidRequest:
    return InvalidRequest(
        "`after` is not what an answer to this question gave. Take it from `next` of the page "
        "before, and leave the other parameters as they were.",
        param="after",
    )


def _beyond(keys: list[ColumnElement[Any]], last: tuple[Any, ...]) -> ColumnElement[bool]:
    bound: ColumnElement[bool] = tuple_(*keys) > tuple_(*last, types=[key.type for key in keys])
    return bound


def _moment(given: str | None, param: str) -> datetime | None:
    """From Unix seconds or ISO 8601, in UTC where it says nothing else."""
    if not given:
        return None
    try:
        if given.isascii() and given.isdigit():
            return datetime.fromtimestamp(int(given[:12]), UTC)
        return _aware(datetime.fromisoformat(given)).astimezone(UTC)
    except (ValueError, OverflowError, OSError):
        raise InvalidRequest(
            f"`{param}` is Unix seconds, or a moment like 2026-01-31 or 2026-01-31T12:00:00Z.",
            param=param,
        ) from None


def _aware(moment: datetime) -> datetime:
    return moment.replace(tzinfo=moment.tzinfo or UTC)
