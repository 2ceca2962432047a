"""Adapters over HTTP."""

from dataclasses import dataclass
from typing import Any

from litestar import Request, Response, delete, get, post
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.spec import OpenAPIMediaType, Operation, RequestBody, Schema
from litestar.openapi.spec.enums import OpenAPIFormat, OpenAPIType
from msgspec import Struct

from gateway.adapters import catalog, versions
from gateway.adapters.allowance import Allowance
from gateway.adapters.details import Details
from gateway.adapters.objects import (
    AliasObject,
    NameOrId,
    VersionObject,
    alias_objects,
    version_object,
)
from gateway.adapters.peft_config import CONFIG_BYTES_MAX
from gateway.adapters.references import LATEST
from gateway.adapters.shards import INDEX_BYTES_MAX
from gateway.adapters.store import AdapterStore
from gateway.adapters.tables import Adapter
from gateway.adapters.upload import Upload, Uploaded
from gateway.connection import chunks
from gateway.db import Database
from gateway.engine.client import Engine
from gateway.engine.messages import Place
from gateway.injection import Injected
from gateway.settings import Settings
from gateway.tenants.keys import Principal

OTHER_BYTES_MAX = CONFIG_BYTES_MAX + INDEX_BYTES_MAX + 64 * 1024
"""All of an upload but the weights."""


class AdapterObject(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "adapter"
    name: str
    version: int
    """Number of the latest version, which the fields below are of."""
    digest: str
    """Identity of the content: config and weights."""
    size_bytes: int
    rank: int
    """The largest of its ranks."""
    targets: list[str]
    """The projections it changes."""
    base_model: str
    status: str
    created_at: int
    """Unix time."""


class UploadedAdapter(AdapterObject, frozen=True, kw_only=True):
    warnings: list[str]
    """What is legal, but perhaps not what was meant."""


class AdapterDetails(AdapterObject, frozen=True, kw_only=True):
    ranks: dict[str, list[int]]
    """Of the latest version: projection → its ranks, over the layers."""
    where: Place | None
    """Of the latest version, as in `versions`."""
    last_used_at: int | None
    requests_30d: int
    versions: list[VersionObject]
    aliases: list[AliasObject]


class AdapterList(Struct, frozen=True):
    data: list[AdapterObject]
    object: str = "list"


class DeletedAdapter(Struct, frozen=True):
    id: str
    object: str = "adapter"
    deleted: bool = True


@dataclass
class UploadOperation(Operation):
    """The body in the OpenAPI page; the handler reads it as a stream."""

    def __post_init__(self) -> None:
        file = Schema(type=OpenAPIType.STRING, format=OpenAPIFormat.BINARY)
        self.request_body = RequestBody(
            required=True,
            content={
                "multipart/form-data": OpenAPIMediaType(
                    schema=Schema(
                        type=OpenAPIType.OBJECT,
                        required=["name"],
                        properties={
                            "name": Schema(
                                type=OpenAPIType.STRING,
                                description="The model id under which requests call the adapter.",
                            ),
                            "config": file,
                            "weights": file,
                            "archive": file,
                            "index": file,
                        },
                    )
                )
            },
        )


@post(
    "/v1/adapters",
    operation_id="createAdapter",
    summary="Upload a PEFT LoRA adapter",
    description="Parts: `name`, `config` (adapter_config.json), `weights` "
    "(adapter_model.safetensors). Or `name` and `archive`: a .zip, .tar, .tar.gz or .tar.zst of "
    "the folder that save_pretrained wrote. Weights in several files: `index` "
    "(adapter_model.safetensors.index.json), and each shard under its own name. 201 when the name "
    "is new or now means other content, 200 when it meant this content already.",
    tags=["Adapters"],
    operation_class=UploadOperation,
    request_max_body_size=None,  # the upload has its own limit
    responses={200: ResponseSpec(UploadedAdapter, description="Already there.")},
)
async def create_adapter(
    request: Request[Any, Any, Any],
    principal: Injected[Principal],
    settings: Injected[Settings],
    database: Injected[Database],
    store: Injected[AdapterStore],
    engine: Injected[Engine],
) -> Response[UploadedAdapter]:
    principal.require("adapters:write")
    body = chunks(request, settings.adapters.upload_bytes_max + OTHER_BYTES_MAX)
    uploaded = await Upload(settings, database, store, engine).run(
        principal.tenant_id,
        allowance_of(principal, settings),
        body,
        request.headers.get("content-type", ""),
    )
    return uploaded_adapter(uploaded)


@get(
    "/v1/adapters", operation_id="listAdapters", summary="The tenant's adapters", tags=["Adapters"]
)
async def list_adapters(
    principal: Injected[Principal], database: Injected[Database]
) -> AdapterList:
    principal.require("adapters:read")
    async with database.session() as session:
        adapters = await catalog.list_of(session, principal.tenant_id)
        numbers = await versions.latest_numbers(session, principal.tenant_id)
    return AdapterList(
        [
            AdapterObject(**_fields(each, numbers.get(each.id, 0)))
            for each in adapters
            if principal.may_use(each.name)
        ]
    )


@get(
    "/v1/adapters/{name_or_id:str}",
    operation_id="getAdapter",
    summary="One adapter: its versions and aliases, where they are, and how much they are used",
    tags=["Adapters"],
)
async def get_adapter(
    name_or_id: NameOrId, principal: Injected[Principal], details: Injected[Details]
) -> AdapterDetails:
    principal.require("adapters:read")
    found = await details.of(principal.tenant_id, name_or_id, principal.allowed_adapters)
    shown = [version_object(version) for version in found.versions]
    latest = next((version for version in shown if LATEST in version.aliases), None)
    return AdapterDetails(
        **_fields(found.adapter, latest.version if latest else 0),
        ranks=found.ranks,
        where=latest.where if latest else None,
        last_used_at=latest.last_used_at if latest else None,
        requests_30d=latest.requests_30d if latest else 0,
        versions=shown,
        aliases=alias_objects(found.adapter, found.aliases, latest.version if latest else None),
    )


@delete(
    "/v1/adapters/{name_or_id:str}",
    status_code=200,
    operation_id="deleteAdapter",
    summary="Delete an adapter",
    description="With its versions and aliases. New requests no longer find it; those that run are "
    "finished.",
    tags=["Adapters"],
)
async def delete_adapter(
    name_or_id: NameOrId,
    principal: Injected[Principal],
    database: Injected[Database],
    store: Injected[AdapterStore],
    engine: Injected[Engine],
) -> DeletedAdapter:
    principal.require("adapters:write")
    async with catalog.changing(database, store, principal.tenant_id) as session:
        removed = await catalog.remove(
            session, principal.tenant_id, name_or_id, principal.allowed_adapters
        )
    for digest in removed.version_digests:
        await catalog.collect(database, store, engine, digest)
    return DeletedAdapter(removed.adapter_id)


def uploaded_adapter(uploaded: Uploaded) -> Response[UploadedAdapter]:
    placed = uploaded.placed
    return Response(
        UploadedAdapter(**_fields(placed.adapter, placed.number), warnings=uploaded.warnings),
        status_code=201 if placed.changed else 200,
    )


def allowance_of(principal: Principal, settings: Settings) -> Allowance:
    limits, most = principal.tenant_limits, settings.adapters.tenant_adapters_max
    return Allowance(
        adapters_max=most if limits.adapters_max is None else min(most, limits.adapters_max),
        bytes_max=limits.adapter_bytes_max,
        names=principal.allowed_adapters,
    )


def _fields(adapter: Adapter, number: int) -> dict[str, Any]:
    version = adapter.version
    return {
        "id": adapter.id,
        "name": adapter.name,
        "version": number,
        "digest": version.digest,
        "size_bytes": version.size_bytes,
        "rank": version.rank_max,
        "targets": version.targets,
        "base_model": version.base_model,
        "status": adapter.status,
        "created_at": int(adapter.created_at.timestamp()),
    }


handlers = [create_adapter, list_adapters, get_adapter, delete_adapter]
