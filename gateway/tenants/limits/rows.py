"""The limits of plans, tenants and keys as they are stored: read, changed, copied."""

from collections.abc import Mapping

import msgspec
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.errors import InvalidRequest
from gateway.tenants.limits.rules import Limits
from gateway.tenants.tables import LimitRow

KINDS = Limits.__struct_fields__
LIMIT_MAX = 10**15
"""A petabyte, or tokens for a day of the largest cluster: more is a slip of the keyboard."""
STORAGE = ("adapters_max", "adapter_bytes_max")
"""Limits on what is stored, which is the tenant's and no key's."""


def plan_owner(name: str) -> str:
    return f"plan:{name}"


def tenant_owner(tenant_id: str) -> str:
    return f"tenant:{tenant_id}"


def key_owner(key_id: str) -> str:
    return f"key:{key_id}"


async def limits_of(session: AsyncSession, owner: str) -> Limits:
    """The owner's own; none where it has no row."""
    row = await session.get(LimitRow, owner)
    return Limits() if row is None else as_limits(row)


async def change_limits(
    session: AsyncSession, owner: str, changes: Mapping[str, int | None]
) -> tuple[Limits, Limits]:
    """Change those named, None: no limit of this kind. Returns what held before and what holds now.

    Raises InvalidRequest.
    """
    _check(owner, changes)
    row = await _row(session, owner)
    before = as_limits(row)
    for kind, value in changes.items():
        setattr(row, kind, value)
    await session.flush()
    return before, as_limits(row)


async def _row(session: AsyncSession, owner: str) -> LimitRow:
    """Made if it isn't there, and nobody else's until the transaction ends."""
    row = await session.get(LimitRow, owner, with_for_update=True)
    if row is not None:
        return row
    try:
        async with session.begin_nested():
            session.add(row := LimitRow(owner=owner))
        return row
    except IntegrityError:  # made by somebody else, for whom this insert has waited
        return await session.get_one(LimitRow, owner, with_for_update=True)


async def copy_limits(session: AsyncSession, owner: str, to: str) -> None:
    own = await limits_of(session, owner)
    if own != Limits():
        session.add(LimitRow(owner=to, **msgspec.structs.asdict(own)))


def either(own: Limits, fallback: Limits) -> Limits:
    """Each limit its own, else the fallback's."""
    found = {}
    for kind in KINDS:
        value = getattr(own, kind)
        found[kind] = getattr(fallback, kind) if value is None else value
    return Limits(**found)


def as_limits(row: LimitRow) -> Limits:
    return Limits(**{kind: getattr(row, kind) for kind in KINDS})


def _check(owner: str, changes: Mapping[str, int | None]) -> None:
    for kind, value in changes.items():
        if kind not in KINDS:
            raise InvalidRequest(
                f"There is no limit {kind[:50]!r}. There are {', '.join(KINDS)}.", param=kind[:50]
            )
        if owner.startswith("key:") and kind in STORAGE:
            raise InvalidRequest(
                f"`{kind}` is a limit of tenants and plans: what is stored is the tenant's.",
                param=kind,
            )
        if value is not None and not 0 <= value <= LIMIT_MAX:
            raise InvalidRequest(f"`{kind}` is a whole number from 0 to {LIMIT_MAX}.", param=kind)
