"""The tenants: create, list, find."""

import re
from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.errors import Conflict, InvalidRequest, NotFound
from gateway.tenants.tables import Tenant

SLUG = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
NAME_CHARACTERS_MAX = 200


async def create_tenant(session: AsyncSession, slug: str, name: str = "") -> Tenant:
    """Raises InvalidRequest or, where the slug is taken, Conflict; the session is then spent."""
    if not SLUG.fullmatch(slug):
        raise InvalidRequest(
            "A tenant's slug is 1 to 63 lower-case letters, digits and inner hyphens, "
            "like `acme` or `acme-eu`.",
            param="slug",
        )
    if len(name) > NAME_CHARACTERS_MAX:
        raise InvalidRequest(
            f"A tenant's name has at most {NAME_CHARACTERS_MAX} characters.", param="name"
        )
    tenant = Tenant(slug=slug, name=name or slug)
    session.add(tenant)
    try:
        await session.flush()
    except IntegrityError:
        raise Conflict(f"There is already a tenant {slug!r}.", param="slug") from None
    return tenant


async def list_tenants(session: AsyncSession) -> Sequence[Tenant]:
    return (await session.scalars(select(Tenant).order_by(Tenant.slug))).all()


async def tenant_by_slug(session: AsyncSession, slug: str) -> Tenant:
    """Raises NotFound."""
    tenant = await session.scalar(select(Tenant).where(Tenant.slug == slug))
    if tenant is None:
        raise NotFound(f"There is no tenant {slug[:100]!r}. See `loragate tenants list`.")
    return tenant
