"""Versions and aliases as the API shows them."""

from collections.abc import Sequence
from typing import Annotated

from litestar.params import PathParameter
from msgspec import Struct

from gateway.adapters.aliases import Alias
from gateway.adapters.details import VersionDetails
from gateway.adapters.references import DEFAULT, LATEST
from gateway.adapters.tables import Adapter
from gateway.engine.messages import Place

NameOrId = Annotated[str, PathParameter(description="The adapter's name or id.")]


class VersionObject(Struct, frozen=True, kw_only=True):
    object: str = "adapter.version"
    version: int
    """Its number: requests call it `name@v3`."""
    digest: str
    """Identity of the content; the first 8 digits name it, too."""
    size_bytes: int
    rank: int
    """The largest of its ranks."""
    targets: list[str]
    base_model: str
    created_at: int
    """When it was uploaded under this name, Unix time."""
    aliases: list[str]
    """That mean it, or share requests with it; `latest` too."""
    where: Place | None
    """The nearest place it is in: the page `pool`, `host` memory or the `store`. Null while the
    engine does not say."""
    last_used_at: int | None
    """When the last of the tenant's requests with it began; null: never."""
    requests_30d: int
    """The tenant's requests with it in the last 30 days."""


class VersionList(Struct, frozen=True):
    data: list[VersionObject]
    object: str = "list"


class DeletedVersion(Struct, frozen=True):
    version: int
    object: str = "adapter.version"
    deleted: bool = True


class ShareObject(Struct, frozen=True):
    version: int
    digest: str
    percent: int
    """Of the requests."""


class AliasObject(Struct, frozen=True, kw_only=True):
    object: str = "adapter.alias"
    alias: str
    model: str
    """What requests call it."""
    versions: list[ShareObject]
    """One, or the two of a split."""
    updated_at: int | None
    """Unix time; null for `latest`, which uploads move."""


class AliasList(Struct, frozen=True):
    data: list[AliasObject]
    object: str = "list"


class DeletedAlias(Struct, frozen=True):
    alias: str
    object: str = "adapter.alias"
    deleted: bool = True


def version_object(details: VersionDetails) -> VersionObject:
    row = details.listed.row
    version = row.version
    return VersionObject(
        version=row.number,
        digest=version.digest,
        size_bytes=version.size_bytes,
        rank=version.rank_max,
        targets=version.targets,
        base_model=version.base_model,
        created_at=int(row.created_at.timestamp()),
        aliases=details.listed.aliases,
        where=details.where,
        last_used_at=None if details.last_used is None else int(details.last_used.timestamp()),
        requests_30d=details.requests,
    )


def alias_object(adapter: Adapter, alias: Alias) -> AliasObject:
    name = alias.row.name
    return AliasObject(
        alias=name,
        model=adapter.name if name == DEFAULT else f"{adapter.name}@{name}",
        versions=[
            ShareObject(row.number, row.version_digest, percent) for row, percent in alias.shares
        ],
        updated_at=int(alias.row.updated_at.timestamp()),
    )


def alias_objects(
    adapter: Adapter, aliases: Sequence[Alias], latest: int | None = None
) -> list[AliasObject]:
    """Those that the tenant has set, and `latest`, whose number is given."""
    shown = [alias_object(adapter, alias) for alias in aliases]
    if latest is None:
        return shown
    return [
        AliasObject(
            alias=LATEST,
            model=f"{adapter.name}@{LATEST}",
            versions=[ShareObject(latest, adapter.version_digest, 100)],
            updated_at=None,
        ),
        *shown,
    ]
