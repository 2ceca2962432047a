"""Versions and aliases of an adapter over HTTP."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from litestar import delete, get, put
from litestar.params import JSONBody, PathParameter
from msgspec import UNSET, Struct, UnsetType
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.adapters import aliases, catalog, versions
from gateway.adapters.details import Details
from gateway.adapters.objects import (
    AliasList,
    AliasObject,
    DeletedAlias,
    DeletedVersion,
    NameOrId,
    VersionList,
    alias_object,
    alias_objects,
    version_object,
)
from gateway.adapters.store import AdapterStore
from gateway.adapters.tables import Adapter
from gateway.db import Database
from gateway.engine.client import Engine
from gateway.errors import InvalidRequest
from gateway.injection import Injected
from gateway.tenants.keys import Principal

VersionName = Annotated[
    str, PathParameter(description="Its number (`v3`), or 8 digits or more of its digest.")
]
AliasName = Annotated[str, PathParameter(description="The alias.")]


class AliasTarget(Struct, frozen=True, forbid_unknown_fields=True):
    """One of the two."""

    version: str | int | UnsetType = UNSET
    """The version that it shall mean: its number (`v3` or 3), 8 digits or more of its digest, or
    `latest` for what that is now."""
    split: dict[str, int] | UnsetType = UNSET
    """Two versions, and the percent of requests that each gets: `{"v1": 90, "v2": 10}`."""

    def shares(self) -> list[tuple[str, int]]:
        """Raises InvalidRequest."""
        if isinstance(self.split, UnsetType):
            if isinstance(self.version, UnsetType):
                raise InvalidRequest("Give a `version`, or a `split` of two.", param="version")
            return [(str(self.version), 100)]
        if not isinstance(self.version, UnsetType):
            raise InvalidRequest("Give a `version` or a `split`, not both.", param="split")
        if len(self.split) != 2:
            raise InvalidRequest("A split is between two different versions.", param="split")
        return list(self.split.items())


@get(
    "/v1/adapters/{name_or_id:str}/versions",
    operation_id="listVersions",
    summary="An adapter's versions, newest first",
    tags=["Adapters"],
)
async def list_versions(
    name_or_id: NameOrId, principal: Injected[Principal], details: Injected[Details]
) -> VersionList:
    principal.require("adapters:read")
    found = await details.of(principal.tenant_id, name_or_id, principal.allowed_adapters)
    return VersionList([version_object(version) for version in found.versions])


@delete(
    "/v1/adapters/{name_or_id:str}/versions/{version:str}",
    status_code=200,
    operation_id="deleteVersion",
    summary="Delete a version that no alias means",
    description="New requests no longer find it; those that run are finished, then it leaves the "
    "engine and the store.",
    tags=["Adapters"],
)
async def delete_version(
    name_or_id: NameOrId,
    version: VersionName,
    principal: Injected[Principal],
    database: Injected[Database],
    store: Injected[AdapterStore],
    engine: Injected[Engine],
) -> DeletedVersion:
    principal.require("adapters:write")
    async with _change(principal, database, store, name_or_id) as (session, adapter):
        removed = await versions.remove(session, adapter, version)
    await catalog.collect(database, store, engine, removed.version_digest)
    return DeletedVersion(removed.number)


@get(
    "/v1/adapters/{name_or_id:str}/aliases",
    operation_id="listAliases",
    summary="An adapter's aliases",
    tags=["Adapters"],
)
async def list_aliases(
    name_or_id: NameOrId, principal: Injected[Principal], database: Injected[Database]
) -> AliasList:
    principal.require("adapters:read")
    async with database.session() as session:
        adapter = await catalog.get(
            session, principal.tenant_id, name_or_id, principal.allowed_adapters
        )
        latest = await versions.number_of(session, adapter.id, adapter.version_digest)
        named = await aliases.list_of(session, adapter)
    return AliasList(alias_objects(adapter, named, latest))


@put(
    "/v1/adapters/{name_or_id:str}/aliases/{alias:str}",
    operation_id="putAlias",
    summary="Let an alias mean a version, or a split of two",
    description="In one step: each request gets what the alias means when it is admitted, and "
    "keeps it. In a split, requests with the same `user` get the same version; without `user`, "
    "those of the same key with the same beginning of the conversation. `default` is what the "
    "adapter's name alone means; without it that is `latest`.",
    tags=["Adapters"],
)
async def put_alias(
    name_or_id: NameOrId,
    alias: AliasName,
    data: JSONBody[AliasTarget],
    principal: Injected[Principal],
    database: Injected[Database],
    store: Injected[AdapterStore],
) -> AliasObject:
    principal.require("adapters:write")
    shares = data.shares()
    async with _change(principal, database, store, name_or_id) as (session, adapter):
        put = await aliases.put(session, adapter, alias, shares)
    return alias_object(adapter, put)


@delete(
    "/v1/adapters/{name_or_id:str}/aliases/{alias:str}",
    status_code=200,
    operation_id="deleteAlias",
    summary="Delete an alias",
    description="What it means stays.",
    tags=["Adapters"],
)
async def delete_alias(
    name_or_id: NameOrId,
    alias: AliasName,
    principal: Injected[Principal],
    database: Injected[Database],
    store: Injected[AdapterStore],
) -> DeletedAlias:
    principal.require("adapters:write")
    async with _change(principal, database, store, name_or_id) as (session, adapter):
        await aliases.remove(session, adapter, alias)
    return DeletedAlias(alias)


@asynccontextmanager
async def _change(
    principal: Principal, database: Database, store: AdapterStore, name_or_id: str
) -> AsyncIterator[tuple[AsyncSession, Adapter]]:
    """One transaction on one of the caller's adapters. Raises NotFound."""
    async with catalog.changing(database, store, principal.tenant_id) as session:
        adapter = await catalog.hold(
            session, principal.tenant_id, name_or_id, principal.allowed_adapters
        )
        yield session, adapter


handlers = [list_versions, delete_version, list_aliases, put_alias, delete_alias]
