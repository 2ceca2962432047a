"""Migrations on both databases: up, down, several at once, and equal to the tables in the code."""

import asyncio
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, inspect, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError

from gateway import migrate
from gateway.db import Base, Database, async_url
from gateway.errors import DatabaseUnavailable
from gateway.settings import Database as DatabaseSettings
from gateway.settings import Secret, Settings
from tests.databases import PASSWORD, free_port

UPGRADE = """
import asyncio, sys
from pathlib import Path
from gateway import migrate
from gateway.db import async_url
asyncio.run(migrate.upgrade(async_url(sys.argv[1], Path())))
"""


@pytest.fixture
def url(database_url: str) -> URL:
    return async_url(database_url, Path())


async def tables(url: URL) -> set[str]:
    async with migrate.connection(url) as connection:
        return set(await connection.run_sync(lambda sync: inspect(sync).get_table_names()))


async def test_up_makes_the_tables_and_down_removes_them(url: URL) -> None:
    await migrate.upgrade(url)
    assert {"tenants", "api_keys", "alembic_version"} <= await tables(url)
    await migrate.downgrade(url, "base")
    assert await tables(url) == {"alembic_version"}
    await migrate.upgrade(url)
    assert "tenants" in await tables(url)


async def test_each_step_goes_down_and_up_again(url: URL) -> None:
    script = ScriptDirectory(str(migrate.folder()))
    steps = [step.revision for step in reversed(list(script.walk_revisions()))]
    for before, step in zip(["base", *steps], steps, strict=False):
        await migrate.upgrade(url, step)
        await migrate.downgrade(url, before)
        await migrate.upgrade(url, step)


async def test_an_upgrade_keeps_the_rows_and_a_second_one_changes_nothing(url: URL) -> None:
    await migrate.upgrade(url, "0001")
    async with migrate.connection(url) as connection:
        await connection.execute(
            text(
                "INSERT INTO tenants (id, slug, name, status, weight, created_at)"
                " VALUES ('1', 'acme', 'Acme', 'active', 1.0, '2026-01-01 00:00:00+00:00')"
            )
        )
        await connection.commit()
    await migrate.upgrade(url)
    await migrate.upgrade(url)
    async with migrate.connection(url) as connection:
        assert (await connection.execute(text("SELECT slug FROM tenants"))).scalars().all() == [
            "acme"
        ]


MOMENT = "'2026-01-01 00:00:00+00:00'"
FILLED = (
    "INSERT INTO tenants (id, slug, name, status, weight, created_at)"
    f" VALUES ('t1', 'acme', 'Acme', 'suspended', 2.5, {MOMENT})",
    "INSERT INTO api_keys (id, tenant_id, public_id, hash, name, scopes, created_at, revoked_at,"
    f" last4) VALUES ('k1', 't1', '0123456789', :hash, 'ci', '[\"inference\"]', {MOMENT},"
    f" {MOMENT}, 'abcd')",
    "INSERT INTO adapter_versions (digest, size_bytes, rank_max, targets, base_digest, base_model,"
    f" created_at) VALUES ('d1', 7, 8, '[]', 'b1', 'base', {MOMENT})",
    "INSERT INTO adapters (id, tenant_id, name, version_digest, status, created_at)"
    f" VALUES ('a1', 't1', 'pirate', 'd1', 'ready', {MOMENT})",
)
"""A database of the release before."""
ALSO_NEW = (
    "INSERT INTO api_keys (id, tenant_id, public_id, prefix, hash, name, scopes, created_at, last4)"
    f" VALUES ('k2', NULL, '0123456780', 'lg_admin_', :hash, 'op', '[\"admin\"]', {MOMENT}, 'x')",
    "INSERT INTO limits (owner, adapters_max) VALUES ('plan:pro', 1)",
    "UPDATE tenants SET plan = 'pro'",
    "UPDATE api_keys SET allowed_adapters = '[\"pirate\"]', allowed_networks = '[\"::/0\"]'"
    " WHERE id = 'k1'",
    "INSERT INTO audit_entries (sequence, at, actor, action, target, request_id, hash)"
    f" VALUES (1, {MOMENT}, 'shell:a', 'x', 'y', '', 'z')",
    "INSERT INTO usage_entries (request_id, tenant_id, key_id, model, prompt_tokens, cached_tokens,"
    " completion_tokens, cost_nanos, started_at)"
    f" VALUES ('r', 't1', 'k1', 'm', 1, 1, 1, 1, {MOMENT})",
)
"""What only the newer one can hold."""


async def test_a_filled_database_goes_up_and_down_with_its_rows_intact(url: URL) -> None:
    async def run(*statements: str) -> None:
        async with migrate.connection(url) as connection:
            for statement in statements:
                named = {"hash": b"\x00\xff"} if ":hash" in statement else {}
                await connection.execute(text(statement), named)
            await connection.commit()

    async def rows() -> list[tuple[object, ...]]:
        """All that the older release knows of, by tables."""
        columns = {
            "tenants": "id, slug, name, status, weight, created_at",
            "api_keys": "id, tenant_id, public_id, hash, name, scopes, created_at, expires_at, "
            "revoked_at, last_used_at, last4",
            "adapter_versions": "*",
            "adapters": "*",
        }
        async with migrate.connection(url) as connection:
            return [
                tuple(map(str, row))
                for table, names in columns.items()
                for row in await connection.execute(
                    text(f"SELECT {names} FROM {table} WHERE {table}.created_at IS NOT NULL")
                )
            ]

    await migrate.upgrade(url, "0002")
    await run(*FILLED)
    before = await rows()
    assert len(before) == 4
    await migrate.upgrade(url, "0003")
    assert await rows() == before
    async with migrate.connection(url) as connection:
        prefix = await connection.scalar(text("SELECT prefix FROM api_keys"))
        plan = await connection.scalar(text("SELECT plan FROM tenants"))
    assert (prefix, plan) == ("lg_sk_", "")
    # the release before still runs against the new tables
    await run(FILLED[1].replace("'k1'", "'k3'").replace("0123456789", "0123456788"))
    await run("DELETE FROM api_keys WHERE id = 'k3'", *ALSO_NEW)
    await migrate.downgrade(url, "0002")
    assert await rows() == before
    await migrate.upgrade(url, "0003")
    assert await rows() == before


BEFORE_VERSIONS = (
    FILLED[0],
    *FILLED[2:],
    "INSERT INTO adapters (id, tenant_id, name, version_digest, status, created_at)"
    f" VALUES ('a2', 't1', 'parrot', 'd1', 'ready', {MOMENT})",
)


async def test_adapters_become_version_1_and_go_back_to_what_they_were(url: URL) -> None:
    async def run(*statements: str) -> list[list[tuple[object, ...]]]:
        async with migrate.connection(url) as connection:
            results = [await connection.execute(text(statement)) for statement in statements]
            found = [
                [tuple(row) for row in result] if result.returns_rows else [] for result in results
            ]
            await connection.commit()
            return found

    adapters = "SELECT id, tenant_id, name, version_digest, status FROM adapters ORDER BY id"
    await migrate.upgrade(url, "0003")
    await run(*BEFORE_VERSIONS)
    (before,) = await run(adapters)
    await migrate.upgrade(url, "0004")
    versions, numbers = await run(
        "SELECT adapter_id, number, version_digest FROM named_versions ORDER BY adapter_id",
        "SELECT last_number FROM adapters",
    )
    assert versions == [("a1", 1, "d1"), ("a2", 1, "d1")]
    assert numbers == [(1,), (1,)]
    # the release before still runs against the new tables, and what it deletes leaves no rows
    await run(BEFORE_VERSIONS[-1].replace("a2", "a3").replace("parrot", "judge"))
    await run(
        "INSERT INTO adapter_aliases (adapter_id, name, number, newer_percent, updated_at)"
        f" VALUES ('a1', 'prod', 1, 0, {MOMENT}), ('a2', 'prod', 1, 0, {MOMENT})"
    )
    async with Database(url).session() as session:  # with foreign keys, as the gateway has them
        await session.execute(text("DELETE FROM adapters WHERE id = 'a2'"))
    left = await run("SELECT adapter_id FROM named_versions", "SELECT name FROM adapter_aliases")
    assert left == [[("a1",)], [("prod",)]]
    await migrate.downgrade(url, "0003")
    (after,) = await run(adapters)
    assert after == [row for row in before if row[0] == "a1"] + [
        ("a3", "t1", "judge", "d1", "ready")
    ]
    await migrate.upgrade(url)


async def test_the_tables_in_the_code_are_the_tables_in_the_database(url: URL) -> None:
    await migrate.upgrade(url)

    def differences(connection: Connection) -> list[object]:
        return list(compare_metadata(MigrationContext.configure(connection), Base.metadata))

    async with migrate.connection(url) as connection:
        assert await connection.run_sync(differences) == []


async def test_f27_parallel_upgrades_all_succeed(url: URL) -> None:
    program = [sys.executable, "-c", UPGRADE, url.render_as_string(hide_password=False)]
    run = partial(subprocess.run, program, capture_output=True, check=False)
    runs = await asyncio.gather(*(asyncio.to_thread(run) for _ in range(3)))
    assert [run.returncode for run in runs] == [0, 0, 0], runs
    assert "tenants" in await tables(url)


BROKEN = """
import sqlalchemy as sa
from alembic import op
revision, down_revision = "9999", "{head}"

def upgrade():
    op.create_table("half_done", sa.Column("id", sa.Integer, primary_key=True))
    op.execute("SELECT * FROM no_such_table")
"""


async def test_f28_a_failing_migration_fails_aloud_and_leaves_the_database_as_it_was(
    url: URL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(migrate.folder(), tmp_path / "migrations")
    head = ScriptDirectory(str(copy)).get_current_head()
    (copy / "versions" / "9999_broken.py").write_text(BROKEN.format(head=head))
    monkeypatch.setattr(migrate, "folder", lambda: copy)
    with pytest.raises((DBAPIError, DatabaseUnavailable), match="no_such_table"):
        await migrate.upgrade(url)
    assert await tables(url) == set()


def test_the_alembic_command_works_on_the_configured_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LORAGATE_DATA_DIR", str(tmp_path / "data"))
    config = Config()
    config.set_main_option("script_location", str(migrate.folder()))
    command.upgrade(config, "head")
    command.check(config)
    assert (tmp_path / "data" / "loragate.db").exists()


async def test_a_database_that_is_away_is_named_without_its_password(tmp_path: Path) -> None:
    url = f"postgresql://u:{PASSWORD}@127.0.0.1:{free_port()}/x"
    settings = Settings(data_dir=tmp_path, database=DatabaseSettings(url=Secret(url)))
    with pytest.raises(DatabaseUnavailable, match=r"database\.url") as error:
        await migrate.prepare(settings)
    assert PASSWORD not in str(error.value)


async def test_the_data_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "deep" / "data")
    await migrate.prepare(settings)
    assert settings.data_dir.stat().st_mode & 0o777 == 0o700
