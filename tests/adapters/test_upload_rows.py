"""The rows of resumable uploads, on both databases."""

import asyncio
from datetime import timedelta

import pytest
from sqlalchemy import func, select

from gateway.adapters.resumable import rows
from gateway.adapters.resumable.rows import NewUpload
from gateway.adapters.resumable.spool import Part
from gateway.adapters.resumable.tables import AdapterUpload, AdapterUploadPart
from gateway.db import Database, now
from gateway.errors import NotFound
from gateway.tenants import directory

NEW = NewUpload("pirate", 20, "")
PARTS = [Part(number, 10, str(number) * 64) for number in (1, 2)]


async def tenant(database: Database) -> str:
    async with database.session() as session:
        return (await directory.create_tenant(session, "acme")).id


async def create(database: Database, tenant_id: str) -> tuple[str, bool]:
    async with database.writing() as session:
        upload, is_new = await rows.create(session, tenant_id, NEW, "key")
        return upload.id, is_new


async def test_of_many_at_once_with_one_key_one_begins_the_upload(database: Database) -> None:
    tenant_id = await tenant(database)
    made = await asyncio.gather(*(create(database, tenant_id) for _ in range(6)))
    assert len({upload_id for upload_id, _ in made}) == 1
    assert [is_new for _, is_new in made].count(True) == 1


async def test_a_part_that_comes_several_times_at_once_is_there_once(database: Database) -> None:
    tenant_id = await tenant(database)
    upload_id, _ = await create(database, tenant_id)

    async def add(part: Part) -> None:
        async with database.writing() as session:
            await rows.add_part(session, tenant_id, upload_id, part)

    await asyncio.gather(*(add(part) for part in PARTS * 3))
    async with database.session() as session:
        progress = await rows.find(session, tenant_id, upload_id)
    assert progress.parts == PARTS
    assert progress.is_whole


async def test_what_has_expired_is_removed_with_its_parts(database: Database) -> None:
    tenant_id = await tenant(database)
    upload_id, _ = await create(database, tenant_id)
    async with database.writing() as session:
        await rows.add_part(session, tenant_id, upload_id, PARTS[0])
        upload = await session.get_one(AdapterUpload, upload_id)
        upload.expires_at = now() - timedelta(seconds=1)
    async with database.session() as session:
        with pytest.raises(NotFound):
            await rows.find(session, tenant_id, upload_id)
    async with database.writing() as session:
        assert await rows.remove_expired(session) == [upload_id]
    async with database.session() as session:
        for table in (AdapterUpload, AdapterUploadPart):
            assert await session.scalar(select(func.count()).select_from(table)) == 0
