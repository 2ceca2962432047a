"""A tenant's aliases: names for versions that move in one step.

A request finds out what an alias means when it is admitted, and keeps that version to its end.
"""

from collections.abc import Sequence

from msgspec import Struct
from sqlalchemy import ColumnElement, and_, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.adapters import references, versions
from gateway.adapters.references import LATEST
from gateway.adapters.room import no_room
from gateway.adapters.tables import Adapter, AdapterAlias, NamedVersion
from gateway.db import now
from gateway.errors import InvalidRequest, NotFound

ALIASES_MAX = 50
"""Of one name; each is listed as a model."""


class Alias(Struct, frozen=True):
    row: AdapterAlias
    shares: list[tuple[NamedVersion, int]]
    """Versions and the percent of requests that each gets, by number."""


async def list_of(session: AsyncSession, adapter: Adapter) -> list[Alias]:
    """By name; `latest`, which is no row, is not among them."""
    return [alias for _, alias in await _list(session, AdapterAlias.adapter_id == adapter.id)]


async def of_tenant(session: AsyncSession, tenant_id: str) -> dict[str, list[Alias]]:
    """Adapter id → its aliases, by name."""
    found: dict[str, list[Alias]] = {}
    for adapter_id, alias in await _list(session, Adapter.tenant_id == tenant_id):
        found.setdefault(adapter_id, []).append(alias)
    return found


async def _list(session: AsyncSession, which: ColumnElement[bool]) -> list[tuple[str, Alias]]:
    """With their adapters' ids. One statement, as an alias may move meanwhile."""
    query = (
        select(AdapterAlias, NamedVersion)
        .join(Adapter, Adapter.id == AdapterAlias.adapter_id)
        .join(
            NamedVersion,
            and_(
                NamedVersion.adapter_id == AdapterAlias.adapter_id,
                or_(
                    NamedVersion.number == AdapterAlias.number,
                    NamedVersion.number == AdapterAlias.newer_number,
                ),
            ),
        )
        .where(which)
        .order_by(AdapterAlias.adapter_id, AdapterAlias.name, NamedVersion.number)
    )
    found: dict[AdapterAlias, list[NamedVersion]] = {}
    for alias, version in await session.execute(query):
        found.setdefault(alias, []).append(version)
    return [(row.adapter_id, Alias(row, _shares(row, named))) for row, named in found.items()]


def _shares(row: AdapterAlias, named: Sequence[NamedVersion]) -> list[tuple[NamedVersion, int]]:
    if row.newer_number is None:
        return [(named[0], 100)]
    return [(named[0], 100 - row.newer_percent), (named[1], row.newer_percent)]


async def put(
    session: AsyncSession, adapter: Adapter, name: str, shares: Sequence[tuple[str, int]]
) -> Alias:
    """Let the alias mean these versions, each with its percent of the requests. The caller holds
    the adapter. Raises InvalidRequest, NotFound, RateLimited."""
    references.check_alias(name)
    found = [(await versions.find(session, adapter, label), percent) for label, percent in shares]
    _check_shares(found)
    found.sort(key=lambda share: share[0].number)
    row = await session.get(AdapterAlias, (adapter.id, name))
    if row is None:
        await _check_count(session, adapter)
        row = AdapterAlias(adapter_id=adapter.id, name=name)
        session.add(row)
    row.number = found[0][0].number
    row.newer_number, row.newer_percent = None, 0
    if len(found) == 2:
        row.newer_number, row.newer_percent = found[1][0].number, found[1][1]
    row.updated_at = now()
    await session.flush()
    return Alias(row, found)


def _check_shares(found: Sequence[tuple[NamedVersion, int]]) -> None:
    percents = [percent for _, percent in found]
    if len(found) == 1 and percents == [100]:
        return
    if len({row.number for row, _ in found}) != 2 or len(found) != 2:
        raise InvalidRequest("A split is between two different versions.", param="split")
    if min(percents) < 1 or sum(percents) != 100:
        raise InvalidRequest(
            "The shares of a split are whole percents, 1 to 99, and come to 100 together; these "
            f"are {percents[0]} and {percents[1]}.",
            param="split",
        )


async def _check_count(session: AsyncSession, adapter: Adapter) -> None:
    query = select(func.count()).where(AdapterAlias.adapter_id == adapter.id)
    if (await session.scalar(query) or 0) >= ALIASES_MAX:
        raise no_room(f"{ALIASES_MAX} aliases of {adapter.name!r}", f"{ALIASES_MAX}", "alias")


async def remove(session: AsyncSession, adapter: Adapter, name: str) -> None:
    """The caller holds the adapter. Raises InvalidRequest for `latest`, and NotFound."""
    row = await session.get(AdapterAlias, (adapter.id, name))
    if row is not None:
        await session.delete(row)
        return
    if name == LATEST:
        references.check_alias(name)
    raise NotFound(
        f"The adapter {adapter.name!r} has no alias {name[:100]!r}. "
        f"GET /v1/adapters/{adapter.name}/aliases lists them.",
        param="alias",
    )
