"""`loragate audit`."""

from collections.abc import Sequence
from typing import Any

import click
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.db import Database
from gateway.openapi_exports import Format
from gateway.settings import Settings
from gateway.shell import pass_settings
from gateway.tenants import directory
from gateway.tenants.admin.shell import as_json, look, print_many, print_one, with_database
from gateway.tenants.audit import reading
from gateway.tenants.audit.tables import AuditEntry

SHOWN = ("sequence", "at", "actor", "action", "target", "before", "after", "request_id")

of_tenant = click.option("--tenant", help="Only what concerns this tenant, by its slug.")


class Anchor(click.ParamType[tuple[int, str]]):
    """`17:<hash>`, as `audit verify` printed it once."""

    name = "sequence:hash"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, str]:
        number, _, digest = str(value).partition(":")
        if not (number.isascii() and number.isdigit() and len(digest) == 64):
            self.fail("an anchor looks like 17:<64 hexadecimal digits>", param, ctx)
        return int(number), digest


@click.group("audit")
def audit_group() -> None:
    """Who changed what."""


@audit_group.command("list")
@of_tenant
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True)
@as_json
@pass_settings
def list_audit(settings: Settings, tenant: str | None, limit: int, as_json: bool) -> None:
    """List the latest changes."""

    async def fetch(session: AsyncSession) -> Sequence[AuditEntry]:
        return await reading.newest(session, limit, tenant_id=await _tenant_id(session, tenant))

    entries = [reading.told(entry) for entry in look(settings, fetch)]
    names = reading.FIELDS if as_json else SHOWN
    print_many([{name: entry[name] for name in names} for entry in entries], as_json)


@audit_group.command("export")
@of_tenant
@click.option(
    "--format", "form", type=click.Choice(("jsonl", "csv")), default="jsonl", show_default=True
)
@pass_settings
def export_audit(settings: Settings, tenant: str | None, form: Format) -> None:
    """Print the whole trail, the oldest entry first."""

    async def write(database: Database) -> None:
        async with database.session() as session:
            tenant_id = await _tenant_id(session, tenant)
        async for text in reading.export(database, form, tenant_id):
            click.echo(text, nl=False)

    with_database(settings, write)


@audit_group.command("verify")
@click.option(
    "--anchor", type=Anchor(), help="The head of an earlier run, which must still be in the chain."
)
@as_json
@pass_settings
def verify_audit(settings: Settings, anchor: tuple[int, str] | None, as_json: bool) -> None:
    """Check that no entry was changed, removed or added by hand; exits 1 if one was.

    Note the head somewhere else: given as --anchor, it shows even a trail that was made anew.
    """
    found = with_database(settings, lambda database: reading.verify(database, anchor))
    row: dict[str, object] = {"intact": found.fault is None, "entries": found.entries}
    head = f"{found.entries}:{found.head}" if found.entries else ""
    print_one(row | {"head": head, "fault": found.fault}, as_json)
    if found.fault is not None:
        click.get_current_context().exit(1)


async def _tenant_id(session: AsyncSession, slug: str | None) -> str | None:
    return None if slug is None else (await directory.tenant_by_slug(session, slug)).id
