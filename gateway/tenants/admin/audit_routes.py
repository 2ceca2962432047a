"""The audit trail over HTTP, for the operator."""

from typing import Annotated

from litestar import Router, get
from litestar.params import QueryParameter
from litestar.response import Stream

from gateway.db import Database
from gateway.injection import Injected
from gateway.openapi_exports import MEDIA_TYPES, ExportOperation, Format
from gateway.tenants import directory
from gateway.tenants.admin.access import Limit
from gateway.tenants.admin.access import actor as actor_dependency
from gateway.tenants.admin.desk import Desk
from gateway.tenants.admin.objects import AuditObject, Page, audit_object, page
from gateway.tenants.audit import reading
from gateway.tenants.audit.trail import Actor

TenantSlug = Annotated[
    str | None, QueryParameter(description="Only what concerns this tenant, by its slug.")
]


@get(
    "/",
    operation_id="listAudit",
    summary="Who changed what, the latest first",
)
async def list_audit(
    actor: Injected[Actor],
    desk: Injected[Desk],
    tenant: TenantSlug = None,
    limit: Limit = 20,
    after: Annotated[
        int | None,
        QueryParameter(
            description="The sequence number of the last entry of the page before.",
            ge=1,
            le=2**63 - 1,
        ),
    ] = None,
) -> Page[AuditObject]:
    async with desk.look() as session:
        tenant_id = tenant and (await directory.tenant_by_slug(session, tenant)).id
        found = await reading.newest(session, limit + 1, before=after, tenant_id=tenant_id)
    return page([audit_object(entry) for entry in found], limit)


@get(
    "/export",
    operation_id="exportAudit",
    summary="The whole trail, the oldest entry first",
    description="As JSON Lines or CSV, sent as it is read.",
    operation_class=ExportOperation,
)
async def export_audit(
    actor: Injected[Actor],
    desk: Injected[Desk],
    database: Injected[Database],
    tenant: TenantSlug = None,
    form: Annotated[Format, QueryParameter(name="format", description="How.")] = "jsonl",
) -> Stream:
    async with desk.look() as session:
        tenant_id = tenant and (await directory.tenant_by_slug(session, tenant)).id
    return Stream(
        reading.export(database, form, tenant_id),
        media_type=MEDIA_TYPES[form],
        headers={"content-disposition": f'attachment; filename="audit.{form}"'},
    )


router = Router(
    "/v1/admin/audit",
    route_handlers=[list_audit, export_audit],
    dependencies=actor_dependency,
    tags=["Admin: audit"],
)
