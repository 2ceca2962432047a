"""The chain: what is appended at once is in line, and what is tampered with shows."""

import asyncio
from pathlib import Path

import pytest
from sqlalchemy import event, func, select, text
from sqlalchemy.exc import DBAPIError

from gateway.db import Database, async_url
from gateway.tenants import directory
from gateway.tenants.audit import reading
from gateway.tenants.audit.tables import AuditEntry
from gateway.tenants.audit.trail import Actor, record
from gateway.tenants.tables import Tenant

ACTOR = Actor("shell:alice", "req-1")


async def append(database: Database, number: int) -> None:
    async with database.writing() as session:
        await record(
            session,
            ACTOR,
            "limits.set",
            f"plan:{number}",
            tenant_id=None,
            before={"number": number - 1, "nested": {"b": [1.5, None], "a": "ü\u2028"}},
            after={"number": number, "weight": 2.0, "huge": 10**15},
        )


async def tamper(database: Database, *statements: str) -> None:
    """As somebody with all rights on the database would."""
    sqlite = database.engine.dialect.name == "sqlite"
    async with database.session() as session:
        for name in ("update", "delete") if sqlite else ("rows", "all"):
            table = "" if sqlite else " ON audit_entries"
            await session.execute(text(f"DROP TRIGGER audit_entries_{name}{table}"))
        for statement in statements:
            await session.execute(text(statement))


async def test_an_untouched_trail_is_intact(database: Database) -> None:
    assert await reading.verify(database) == reading.Verified(0, "")
    for number in range(1, 6):
        await append(database, number)
    found = await reading.verify(database)
    assert (found.entries, found.fault) == (5, None)
    assert len(found.head) == 64


@pytest.mark.parametrize("batch", [1, 2, 500])
@pytest.mark.parametrize(
    ("statement", "intact", "fault"),
    [
        ("UPDATE audit_entries SET actor = 'shell:eve' WHERE sequence = 3", 2, "3 is not what"),
        ("UPDATE audit_entries SET after = NULL WHERE sequence = 3", 2, "3 is not what"),
        (
            'UPDATE audit_entries SET "before" = \'{"number": 7}\' WHERE sequence = 3',
            2,
            "3 is not what",
        ),
        ("UPDATE audit_entries SET request_id = '' WHERE sequence = 5", 4, "5 is not what"),
        (
            "UPDATE audit_entries SET at = '2020-01-01 00:00:00+00:00' WHERE sequence = 1",
            0,
            "1 is not what",
        ),
        (
            "UPDATE audit_entries SET hash = (SELECT hash FROM audit_entries WHERE sequence = 1) "
            "WHERE sequence = 2",
            1,
            "2 is not what",
        ),
        ("DELETE FROM audit_entries WHERE sequence = 3", 2, "3 is missing"),
        ("DELETE FROM audit_entries WHERE sequence = 1", 0, "1 is missing"),
        ("DELETE FROM audit_entries WHERE sequence = 5", 4, "5 is missing"),
        ("DELETE FROM audit_entries", 0, "1 is missing"),
        (
            "INSERT INTO audit_entries SELECT 0, at, actor, action, target, tenant_id, "
            'request_id, "before", after, hash FROM audit_entries WHERE sequence = 1',
            0,
            "1 is missing",
        ),
    ],
)
async def test_tampering_shows_and_where(
    statement: str,
    intact: int,
    fault: str,
    batch: int,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reading, "BATCH", batch)
    for number in range(1, 6):
        await append(database, number)
    await tamper(database, statement)
    found = await reading.verify(database)
    assert found.entries == intact
    assert found.fault is not None
    assert fault in found.fault


async def test_a_trail_that_was_made_anew_shows_by_an_anchor(database: Database) -> None:
    for number in range(1, 4):
        await append(database, number)
    before = await reading.verify(database)
    anchor = before.entries, before.head
    await append(database, 4)
    assert (await reading.verify(database, anchor)).fault is None
    await tamper(
        database,
        "DELETE FROM audit_entries",
        "UPDATE audit_head SET sequence = 0, hash = ''",
    )
    for number in range(11, 13):
        await append(database, number)
    assert (await reading.verify(database)).fault is None, "by itself it is consistent"
    assert "before the anchor" in str((await reading.verify(database, anchor)).fault)
    for number in range(13, 16):
        await append(database, number)
    assert "anchor is another" in str((await reading.verify(database, anchor)).fault)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE audit_entries SET actor = 'shell:eve'",
        "DELETE FROM audit_entries",
        "TRUNCATE audit_entries",
    ],
)
async def test_the_database_itself_refuses_to_change_an_entry(
    statement: str, database: Database
) -> None:
    await append(database, 1)
    with pytest.raises(DBAPIError):  # SQLite has no TRUNCATE
        async with database.session() as session:
            await session.execute(text(statement))
    found = await reading.verify(database)
    assert (found.entries, found.fault) == (1, None)


async def test_an_entry_is_kept_if_and_only_if_the_change_is(database: Database) -> None:
    async def fail() -> None:
        async with database.writing() as session:
            await directory.create_tenant(session, "dropped")
            await record(session, ACTOR, "tenant.create", "tenant:x", tenant_id=None)
            raise KeyError

    with pytest.raises(KeyError):
        await fail()
    async with database.writing() as session:
        await directory.create_tenant(session, "kept")
        await record(session, ACTOR, "tenant.create", "tenant:y", tenant_id=None)
    async with database.session() as session:
        assert (await session.scalars(select(AuditEntry.target))).all() == ["tenant:y"]
        assert (await session.scalars(select(Tenant.slug))).all() == ["kept"]
    assert (await reading.verify(database)).fault is None


async def test_writers_at_the_same_moment_from_several_processes_are_one_line(
    database: Database,
) -> None:
    """Two pools stand for two processes: they share no lock but the database's."""
    other = Database(database.engine.url)
    try:

        async def change(number: int) -> None:
            """Reads first and then writes, where SQLite's readers cannot always become writers."""
            async with (database, other)[number % 2].writing() as session:
                seen = await session.scalar(select(func.count()).select_from(Tenant))
                await directory.create_tenant(session, f"t{number}")
                await record(
                    session, ACTOR, "tenant.create", "t", tenant_id=None, after={"seen": seen}
                )

        await asyncio.gather(*(change(number) for number in range(60)))
    finally:
        await other.close()
    found = await reading.verify(database)
    assert (found.entries, found.fault) == (60, None)


async def test_sqlite_has_the_write_lock_before_it_reads(
    migrated_sqlite_url: str,
) -> None:
    database = Database(async_url(migrated_sqlite_url, Path()))
    other = Database(database.engine.url)
    seen: list[int] = []

    async def change(pool: Database, slug: str) -> None:
        async with pool.writing() as session:
            seen.append(await session.scalar(select(func.count()).select_from(Tenant)) or 0)
            await asyncio.sleep(0.05)
            await directory.create_tenant(session, slug)

    await asyncio.gather(change(database, "a"), change(other, "b"), change(database, "c"))
    assert sorted(seen) == [0, 1, 2]
    await database.close()
    await other.close()


async def test_an_export_holds_no_connection_while_its_reader_takes_its_time(
    database: Database,
) -> None:
    for number in range(1, 4):
        await append(database, number)
    held: list[int] = []
    event.listen(database.engine.sync_engine, "checkout", lambda *_: held.append(1))
    event.listen(database.engine.sync_engine, "checkin", lambda *_: held.pop())
    async for _ in reading.export(database, "jsonl"):
        assert held == []
