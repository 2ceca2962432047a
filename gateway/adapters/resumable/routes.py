"""Resumable uploads over HTTP, in the shape of OpenAI's Uploads API."""

from dataclasses import dataclass
from typing import Annotated, Any

from litestar import Request, Response, get, post, put
from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.spec import OpenAPIMediaType, Operation, RequestBody, Schema
from litestar.openapi.spec.enums import OpenAPIFormat, OpenAPIType
from litestar.params import HeaderParameter, JSONBody, PathParameter
from msgspec import Meta, Struct

from gateway.adapters.resumable.rows import PARTS_MAX, NewUpload, Progress, not_found
from gateway.adapters.resumable.spool import Part
from gateway.adapters.resumable.uploads import PART_BYTES_MAX, Uploads
from gateway.adapters.routes import UploadedAdapter, allowance_of, uploaded_adapter
from gateway.adapters.store import AdapterStore
from gateway.adapters.upload import Upload
from gateway.connection import chunks
from gateway.db import Database
from gateway.engine.client import Engine
from gateway.injection import Injected
from gateway.settings import Settings
from gateway.tenants.keys import Principal

SCOPE = "adapters:write"

UploadId = Annotated[str, PathParameter(description="The upload's id.")]
PartNumber = Annotated[
    int, PathParameter(description="Where the part belongs, from 1.", ge=1, le=PARTS_MAX)
]
PartSha256 = Annotated[
    str,
    HeaderParameter(
        name="x-content-sha256",
        description="SHA-256 of the part, in hexadecimal.",
        pattern="^[0-9a-f]{64}$",
    ),
]
IdempotencyKey = Annotated[
    str | None,
    HeaderParameter(
        name="idempotency-key",
        description="While an upload is open, the same key and body answer with it.",
        min_length=1,
        max_length=255,
    ),
]
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class UploadBody(Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    """What the adapter will be called."""
    bytes: Annotated[int, Meta(ge=1, le=2**53)]
    """Of the archive."""
    sha256: Sha256 | None = None
    """Of the archive."""


class Completion(Struct, frozen=True, forbid_unknown_fields=True):
    sha256: Sha256 | None = None
    """Of the archive, if it was not known when the upload began."""


class PartObject(Struct, frozen=True, kw_only=True):
    object: str = "upload.part"
    number: int
    bytes: int
    sha256: str


class UploadObject(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "upload"
    name: str
    bytes: int
    received_bytes: int
    status: str
    """pending, completed, failed or cancelled."""
    failure: str | None
    """Why the archive was refused."""
    parts: list[PartObject]
    created_at: int
    """Unix time."""
    expires_at: int
    """Then it is gone, whatever has become of it."""


@dataclass
class PartOperation(Operation):
    """The body in the OpenAPI page; the handler reads it as a stream."""

    def __post_init__(self) -> None:
        content = Schema(type=OpenAPIType.STRING, format=OpenAPIFormat.BINARY)
        self.request_body = RequestBody(
            required=True, content={"application/octet-stream": OpenAPIMediaType(schema=content)}
        )


@post(
    "/v1/uploads",
    operation_id="createUpload",
    summary="Begin a resumable upload",
    description="Of an archive of a PEFT folder, as POST /v1/adapters takes it. Its parts follow "
    "with PUT. 200 if the Idempotency-Key belongs to an open upload of the same body.",
    tags=["Uploads"],
    responses={200: ResponseSpec(UploadObject, description="Already there.")},
)
async def create_upload(
    data: JSONBody[UploadBody],
    principal: Injected[Principal],
    settings: Injected[Settings],
    uploads: Injected[Uploads],
    engine: Injected[Engine],
    key: IdempotencyKey = None,
) -> Response[UploadObject]:
    principal.require(SCOPE)
    progress, is_new = await uploads.create(
        principal.tenant_id,
        allowance_of(principal, settings),
        NewUpload(data.name, data.bytes, data.sha256 or ""),
        key,
        None if engine.info is None else engine.info.name,
    )
    return Response(_object(progress), status_code=201 if is_new else 200)


@get(
    "/v1/uploads/{upload_id:str}",
    operation_id="getUpload",
    summary="How far an upload is",
    tags=["Uploads"],
)
async def get_upload(
    upload_id: UploadId, principal: Injected[Principal], uploads: Injected[Uploads]
) -> UploadObject:
    principal.require(SCOPE)
    return _object(await _own(uploads, principal, upload_id))


@put(
    "/v1/uploads/{upload_id:str}/parts/{number:int}",
    operation_id="putUploadPart",
    summary="Send a part",
    description="Parts may come in any order, several at once, in any size up to 64 MiB. Sending "
    "a part again that is there is fine.",
    tags=["Uploads"],
    operation_class=PartOperation,
    request_max_body_size=None,  # a part has its own limit
)
async def put_part(
    upload_id: UploadId,
    number: PartNumber,
    sha256: PartSha256,
    request: Request[Any, Any, Any],
    principal: Injected[Principal],
    settings: Injected[Settings],
    uploads: Injected[Uploads],
) -> PartObject:
    principal.require(SCOPE)
    await _own(uploads, principal, upload_id)
    part = await uploads.put(
        principal.tenant_id,
        allowance_of(principal, settings),
        upload_id,
        number,
        sha256,
        chunks(request, PART_BYTES_MAX),
    )
    return _part(part)


@post(
    "/v1/uploads/{upload_id:str}/complete",
    operation_id="completeUpload",
    summary="Make the adapter of an upload",
    description="Answers as POST /v1/adapters does. Where that was lost, it can be asked again.",
    tags=["Uploads"],
    responses={200: ResponseSpec(UploadedAdapter, description="Already there.")},
)
async def complete_upload(
    upload_id: UploadId,
    principal: Injected[Principal],
    settings: Injected[Settings],
    database: Injected[Database],
    store: Injected[AdapterStore],
    engine: Injected[Engine],
    uploads: Injected[Uploads],
    data: JSONBody[Completion | None] = None,
) -> Response[UploadedAdapter]:
    principal.require(SCOPE)
    await _own(uploads, principal, upload_id)
    uploaded = await uploads.complete(
        principal.tenant_id,
        allowance_of(principal, settings),
        upload_id,
        (data and data.sha256) or "",
        Upload(settings, database, store, engine),
    )
    return uploaded_adapter(uploaded)


@post(
    "/v1/uploads/{upload_id:str}/cancel",
    status_code=200,
    operation_id="cancelUpload",
    summary="Give an upload up",
    tags=["Uploads"],
)
async def cancel_upload(
    upload_id: UploadId, principal: Injected[Principal], uploads: Injected[Uploads]
) -> UploadObject:
    principal.require(SCOPE)
    await _own(uploads, principal, upload_id)
    return _object(await uploads.cancel(principal.tenant_id, upload_id))


async def _own(uploads: Uploads, principal: Principal, upload_id: str) -> Progress:
    """The tenant's upload, if the key is for its adapter. Raises NotFound."""
    progress = await uploads.look(principal.tenant_id, upload_id)
    if not principal.may_use(progress.upload.name):
        raise not_found(upload_id)
    return progress


def _object(progress: Progress) -> UploadObject:
    upload = progress.upload
    return UploadObject(
        id=upload.id,
        name=upload.name,
        bytes=upload.size_bytes,
        received_bytes=progress.received_bytes,
        status=upload.status,
        failure=upload.failure or None,
        parts=[_part(part) for part in progress.parts],
        created_at=int(upload.created_at.timestamp()),
        expires_at=int(upload.expires_at.timestamp()),
    )


def _part(part: Part) -> PartObject:
    return PartObject(number=part.number, bytes=part.size_bytes, sha256=part.sha256)


handlers = [create_upload, get_upload, put_part, complete_upload, cancel_upload]
