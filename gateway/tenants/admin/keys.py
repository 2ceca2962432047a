"""The operator's verbs for keys, each with its entry in the audit trail.

`owner` is a tenant's slug, or None for admin keys, which are the operator's own.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from gateway.tenants import directory, keys
from gateway.tenants.admin.desk import Change, Desk
from gateway.tenants.announcements import Changed
from gateway.tenants.keys import IssuedKey
from gateway.tenants.tables import ApiKey


async def create(
    desk: Desk,
    change: Change,
    owner: str | None,
    name: str = "",
    scopes: Sequence[str] = keys.TENANT_SCOPES,
    expires_at: datetime | None = None,
    allowed_adapters: Sequence[str] | None = None,
    allowed_networks: Sequence[str] | None = None,
) -> IssuedKey:
    """Raises NotFound, Conflict, InvalidRequest."""
    tenant_id = await owner_id(change.session, owner, change=True)
    issued = await keys.create_key(
        change.session,
        desk.key_hash,
        tenant_id,
        name,
        scopes,
        expires_at,
        allowed_adapters=allowed_adapters,
        allowed_networks=allowed_networks,
        environment=desk.environment,
    )
    await change.record(
        "key.create", _target(issued.row), tenant_id=tenant_id, after=audited(issued.row)
    )
    return issued


async def rotate(
    desk: Desk, change: Change, owner: str | None, key: str, overlap: timedelta
) -> IssuedKey:
    """Raises NotFound, Conflict, InvalidRequest."""
    tenant_id = await owner_id(change.session, owner, change=True)
    old = await keys.find_key(change.session, tenant_id, key, change=True)
    before = audited(old)
    issued = await keys.rotate_key(change.session, desk.key_hash, old, overlap, desk.environment)
    await change.record(
        "key.rotate",
        _target(old),
        tenant_id=tenant_id,
        before={"old": before},
        after={"old": audited(old), "new": audited(issued.row) | {"id": issued.row.id}},
        told=_told(old),
    )
    return issued


async def revoke(change: Change, owner: str | None, key: str) -> ApiKey:
    """A second time changes nothing. Raises NotFound, Conflict."""
    tenant_id = await owner_id(change.session, owner, change=True)
    row = await keys.find_key(change.session, tenant_id, key, change=True)
    if row.revoked_at is None:
        before = audited(row)
        await keys.revoke_key(change.session, tenant_id, row.id)
        await change.record(
            "key.revoke",
            _target(row),
            tenant_id=tenant_id,
            before=before,
            after=audited(row),
            told=_told(row),
        )
    return row


async def owner_id(session: AsyncSession, owner: str | None, *, change: bool = False) -> str | None:
    """Raises NotFound and, for a change to a deleted tenant, Conflict."""
    if owner is None:
        return None
    return (await directory.tenant_by_slug(session, owner, change=change)).id


def audited(key: ApiKey) -> dict[str, Any]:
    return {
        "key": key.redacted,
        "name": key.name,
        "scopes": key.scopes,
        "allowed_adapters": key.allowed_adapters,
        "allowed_networks": key.allowed_networks,
        "expires_at": _moment(key.expires_at),
        "revoked_at": _moment(key.revoked_at),
        "replaced_by": key.replaced_by_id,
    }


def _moment(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat(timespec="seconds")


def _target(key: ApiKey) -> str:
    return f"key:{key.id}"


def _told(key: ApiKey) -> Changed:
    return Changed(keys=(key.public_id,))
