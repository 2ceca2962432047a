"""What a name in a request means, asked of the database: `adapter`, `adapter@alias`,
`adapter@version`. One statement each, so that an answer is of one moment."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Row, Select, and_, bindparam, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import InstrumentedAttribute, aliased

from gateway.adapters import references
from gateway.adapters.names import Meaning, Version
from gateway.adapters.references import DEFAULT, LATEST
from gateway.adapters.tables import Adapter, AdapterAlias, AdapterVersion, NamedVersion

Column = InstrumentedAttribute[str]
Query = Select[*tuple[Any, ...]]

_Latest = aliased(AdapterVersion)

_BY_ALIAS = (
    select(
        Adapter.id,
        Adapter.name,
        _Latest.digest,
        _Latest.base_digest,
        _Latest.base_model,
        AdapterAlias.newer_percent,
        AdapterVersion.digest.label("aliased_digest"),
        AdapterVersion.base_digest.label("aliased_base_digest"),
        AdapterVersion.base_model.label("aliased_base_model"),
    )
    .select_from(Adapter)
    .join(_Latest, _Latest.digest == Adapter.version_digest)
    .outerjoin(
        AdapterAlias,
        and_(AdapterAlias.adapter_id == Adapter.id, AdapterAlias.name == bindparam("alias")),
    )
    .outerjoin(
        NamedVersion,
        and_(
            NamedVersion.adapter_id == Adapter.id,
            or_(
                NamedVersion.number == AdapterAlias.number,
                NamedVersion.number == AdapterAlias.newer_number,
            ),
        ),
    )
    .outerjoin(AdapterVersion, AdapterVersion.digest == NamedVersion.version_digest)
    .order_by(NamedVersion.number)
)
"""The latest version, and beside it those of the alias, if there is one."""

_VERSIONS = (
    select(
        Adapter.name, AdapterVersion.digest, AdapterVersion.base_digest, AdapterVersion.base_model
    )
    .select_from(NamedVersion)
    .join(Adapter, Adapter.id == NamedVersion.adapter_id)
    .join(AdapterVersion, AdapterVersion.digest == NamedVersion.version_digest)
)


def _of_adapter(
    query: Select[*tuple[Any, ...]], *conditions: ColumnElement[bool]
) -> dict[Column, Select[*tuple[Any, ...]]]:
    """Built once for each way to name an adapter, as they are asked for many requests."""
    return {
        column: query.where(
            Adapter.tenant_id == bindparam("tenant_id"),
            column == bindparam("name_or_id"),
            *conditions,
        )
        for column in (Adapter.id, Adapter.name)
    }


_ALIASED = _of_adapter(_BY_ALIAS)
_NUMBERED = _of_adapter(_VERSIONS, NamedVersion.number == bindparam("number"))
_PREFIXED = _of_adapter(_VERSIONS, NamedVersion.version_digest.startswith(bindparam("prefix")))


def column_of(name_or_id: str) -> Column | None:
    """Which of the two it is; None for what can be neither."""
    if references.ID.fullmatch(name_or_id):
        return Adapter.id
    return Adapter.name if references.NAME.fullmatch(name_or_id) else None


async def meaning_of(connection: AsyncConnection, tenant_id: str, model: str) -> Meaning | None:
    """None if the tenant has nothing of this name."""
    reference = references.parse(model)
    column = None if reference is None else column_of(reference.name_or_id)
    if reference is None or column is None:
        return None
    named = {"tenant_id": tenant_id, "name_or_id": reference.name_or_id}
    label = reference.label
    if (number := references.number_in(label)) is not None:
        found = await connection.execute(_NUMBERED[column], named | {"number": number})
    elif references.is_version(label):
        found = await connection.execute(_PREFIXED[column], named | {"prefix": label})
    else:
        found = await connection.execute(_ALIASED[column], named | {"alias": label or DEFAULT})
        return _aliased_meaning(found.all(), label)
    versions = [_version(row) for row in found]
    return Meaning(versions[0]) if len(versions) == 1 else None


def _aliased_meaning(rows: Sequence[Row[Any]], label: str) -> Meaning | None:
    """One row for each version of the alias; where there is no such alias, one without."""
    if not rows:
        return None
    first = rows[0]
    if first.aliased_digest is None:
        return Meaning(_version(first)) if label in ("", LATEST) else None
    versions = [
        Version(row.name, row.aliased_digest, row.aliased_base_digest, row.aliased_base_model)
        for row in rows
    ]
    salt = f"{first.id}@{label or DEFAULT}"
    newer = versions[1] if len(versions) > 1 else None
    return Meaning(versions[0], newer, first.newer_percent, salt)


def _version(row: Row[Any]) -> Version:
    return Version(row.name, row.digest, row.base_digest, row.base_model)
