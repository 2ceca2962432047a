"""`loragate tenants` and `loragate keys`."""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, TypeVar

import click
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.db import Database, now
from gateway.migrate import prepare
from gateway.settings import Settings
from gateway.shell import pass_settings
from gateway.tenants import directory, keys
from gateway.tenants.pepper import open_key_hash
from gateway.tenants.tables import ApiKey, Tenant

T = TypeVar("T")

Row = dict[str, object]

DAYS_MAX = 36_500
"""A century: more than that is a slip of the keyboard, and the calendar has an end."""


class Days(click.FloatRange):
    """A range without NaN, which is neither below nor above any limit."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        days = float(super().convert(value, param, ctx))
        if math.isnan(days):
            self.fail(f"{value!r} is not in the range {self._describe_range()}.", param, ctx)
        return days


as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")


@click.group("tenants")
def tenants_group() -> None:
    """Who may use this server."""


@tenants_group.command("create")
@click.argument("slug")
@click.option("--name", default="", help="For people; default: the slug.")
@as_json
@pass_settings
def create_tenant(settings: Settings, slug: str, name: str, as_json: bool) -> None:
    """Create the tenant SLUG."""
    tenant = _in_session(settings, lambda s: directory.create_tenant(s, slug, name))
    print_one(_tenant_row(tenant), as_json)


@tenants_group.command("list")
@as_json
@pass_settings
def list_tenants(settings: Settings, as_json: bool) -> None:
    """List all tenants."""
    print_many(map(_tenant_row, _in_session(settings, directory.list_tenants)), as_json)


@click.group("keys")
def keys_group() -> None:
    """API keys of a tenant."""


@keys_group.command("create")
@click.argument("tenant")
@click.option("--name", default="", help="What it is for.")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    type=click.Choice(keys.SCOPES),
    help="Repeat for several; default: all but admin.",
)
@click.option("--expires-in-days", "days", type=Days(min=0, min_open=True, max=DAYS_MAX))
@as_json
@pass_settings
def create_key(
    settings: Settings,
    tenant: str,
    name: str,
    scopes: tuple[str, ...],
    days: float | None,
    as_json: bool,
) -> None:
    """Create a key for TENANT (a slug). It is shown this once."""
    key_hash = open_key_hash(settings)
    expires_at = None if days is None else now() + timedelta(days=days)

    async def create(session: AsyncSession) -> keys.IssuedKey:
        owner = await directory.tenant_by_slug(session, tenant)
        wanted = scopes or keys.TENANT_SCOPES
        return await keys.create_key(session, key_hash, owner.id, name, wanted, expires_at)

    issued = _in_session(settings, create)
    row = {"key": issued.text.reveal()} | _key_row(issued.row)
    print_one(row, as_json)
    if not as_json:
        click.echo("Keep the key now: only a hash of it is stored.", err=True)


@keys_group.command("list")
@click.argument("tenant")
@as_json
@pass_settings
def list_keys(settings: Settings, tenant: str, as_json: bool) -> None:
    """List the keys of TENANT (a slug), revoked ones too."""

    async def fetch(session: AsyncSession) -> Sequence[ApiKey]:
        owner = await directory.tenant_by_slug(session, tenant)
        return await keys.list_keys(session, owner.id)

    print_many(map(_key_row, _in_session(settings, fetch)), as_json)


@keys_group.command("revoke")
@click.argument("tenant")
@click.argument("key")
@as_json
@pass_settings
def revoke_key(settings: Settings, tenant: str, key: str, as_json: bool) -> None:
    """Revoke a key of TENANT (a slug). KEY is its id or the 10 characters after `lg_sk_`."""

    async def revoke(session: AsyncSession) -> ApiKey:
        owner = await directory.tenant_by_slug(session, tenant)
        return await keys.revoke_key(session, owner.id, key)

    print_one(_key_row(_in_session(settings, revoke)), as_json)


commands: list[click.Command] = [tenants_group, keys_group]


def _in_session(settings: Settings, act: Callable[[AsyncSession], Awaitable[T]]) -> T:
    async def run() -> T:
        database = Database(await prepare(settings), pool_size=1)
        try:
            async with database.session() as session:
                return await act(session)
        finally:
            await database.close()

    return asyncio.run(run())


def _tenant_row(tenant: Tenant) -> Row:
    return {
        "id": tenant.id,
        "slug": tenant.slug,
        "name": tenant.name,
        "status": tenant.status,
        "weight": tenant.weight,
        "created_at": tenant.created_at,
    }


def _key_row(key: ApiKey) -> Row:
    return {
        "id": key.id,
        "redacted": key.redacted,
        "name": key.name,
        "scopes": key.scopes,
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
        "last_used_at": key.last_used_at,
    }


def print_one(row: Row, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(row, default=_text))
    else:
        width = max(map(len, row))
        for name, value in row.items():
            click.echo(f"{name:{width}}  {_text(value)}")


def print_many(rows: Iterable[Row], as_json: bool) -> None:
    """A table, or JSON Lines' elder sister: one array."""
    rows = list(rows)
    if as_json:
        click.echo(json.dumps(rows, default=_text))
        return
    if not rows:
        click.echo("none")
        return
    table = [list(rows[0])] + [[_text(value) for value in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        click.echo("  ".join(f"{cell:{w}}" for cell, w in zip(line, widths, strict=True)).rstrip())


def _text(value: object) -> str:
    match value:
        case None:
            return "-"
        case datetime():
            return value.isoformat(timespec="seconds")
        case list():
            return ",".join(map(str, value))
        case _:
            return str(value)
