"""`loragate keys`."""

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import click
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.db import now
from gateway.settings import Settings
from gateway.shell import pass_settings
from gateway.tenants import key_form
from gateway.tenants import keys as key_rows
from gateway.tenants.admin import keys
from gateway.tenants.admin.desk import Desk
from gateway.tenants.admin.shell import (
    Row,
    actor,
    as_json,
    change,
    look,
    print_many,
    print_one,
    with_desk,
)
from gateway.tenants.keys import IssuedKey
from gateway.tenants.tables import ApiKey

DAYS_MAX = 36_500
"""A century: more than that is a slip of the keyboard, and the calendar has an end."""


class Number(click.FloatRange):
    """A range without NaN, which is neither below nor above any limit."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value!r} is not in the range {self._describe_range()}.", param, ctx)
        return number


as_admin = click.option("--admin", is_flag=True, help="An admin key, which is no tenant's.")


@click.group("keys")
def keys_group() -> None:
    """API keys of tenants, and the operator's own."""


@keys_group.command("create")
@click.argument("tenant", required=False)
@as_admin
@click.option("--name", default="", help="What it is for.")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    type=click.Choice(key_rows.SCOPES),
    help="Repeat for several; default: all but admin.",
)
@click.option("--expires-in-days", "days", type=Number(min=0, min_open=True, max=DAYS_MAX))
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    help="Only this adapter, by its name; repeat for several. Default: all, and the base model.",
)
@click.option(
    "--network",
    "networks",
    multiple=True,
    help="Only from this network, like 10.0.0.0/8; repeat for several. Default: from everywhere.",
)
@as_json
@pass_settings
def create_key(
    settings: Settings,
    tenant: str | None,
    admin: bool,
    name: str,
    scopes: tuple[str, ...],
    days: float | None,
    adapters: tuple[str, ...],
    networks: tuple[str, ...],
    as_json: bool,
) -> None:
    """Create a key for TENANT (a slug), or an admin key. It is shown this once."""
    if admin and (scopes or adapters):
        raise click.UsageError("An admin key has the scope `admin` alone, and no adapters.")
    owner = _owner([tenant] if tenant else [], admin)
    expires_at = None if days is None else now() + timedelta(days=days)

    async def create(desk: Desk) -> IssuedKey:
        async with desk.change(actor()) as change:
            return await keys.create(
                desk,
                change,
                owner,
                name,
                scopes or key_rows.TENANT_SCOPES,
                expires_at,
                adapters or None,
                networks or None,
            )

    _print_issued(with_desk(settings, create), as_json)


@keys_group.command("list")
@click.argument("tenant", required=False)
@as_admin
@as_json
@pass_settings
def list_keys(settings: Settings, tenant: str | None, admin: bool, as_json: bool) -> None:
    """List the keys of TENANT (a slug), or the admin keys; revoked ones too."""
    owner = _owner([tenant] if tenant else [], admin)

    async def fetch(session: AsyncSession) -> Sequence[ApiKey]:
        return await key_rows.list_keys(session, await keys.owner_id(session, owner))

    print_many(map(_row, look(settings, fetch)), as_json)


@keys_group.command("rotate")
@click.argument("names", nargs=-1, metavar="[TENANT] KEY")
@as_admin
@click.option(
    "--overlap-hours",
    "hours",
    type=Number(min=0, max=key_rows.OVERLAP_MAX.days * 24),
    default=24.0,
    show_default=True,
    help="How long the old key goes on.",
)
@as_json
@pass_settings
def rotate_key(
    settings: Settings, names: tuple[str, ...], admin: bool, hours: float, as_json: bool
) -> None:
    """Replace a key of TENANT (a slug) by a new one, shown this once.

    The new key may do what the old one may, under the same limits. KEY is its id or the 10
    characters before the secret.
    """
    owner, key = _owner_and_key(names, admin)

    async def rotate(desk: Desk) -> IssuedKey:
        async with desk.change(actor()) as change:
            return await keys.rotate(desk, change, owner, key, timedelta(hours=hours))

    _print_issued(with_desk(settings, rotate), as_json)


@keys_group.command("revoke")
@click.argument("names", nargs=-1, metavar="[TENANT] KEY")
@as_admin
@as_json
@pass_settings
def revoke_key(settings: Settings, names: tuple[str, ...], admin: bool, as_json: bool) -> None:
    """Revoke a key of TENANT (a slug). KEY is its id or the 10 characters before the secret."""
    owner, key = _owner_and_key(names, admin)
    print_one(_row(change(settings, keys.revoke, owner, key)), as_json)


@keys_group.command("generate")
@pass_settings
def generate_key(settings: Settings) -> None:
    """Print a new admin key for the setting keys.admin (LORAGATE_ADMIN_KEY). Nothing is stored."""
    click.echo(key_form.make("admin", settings.keys.environment).text.reveal())


def _owner(names: Sequence[str], admin: bool) -> str | None:
    if len(names) != (0 if admin else 1):
        raise click.UsageError("Name a tenant, or give --admin for the operator's own keys.")
    return None if admin else names[0]


def _owner_and_key(names: tuple[str, ...], admin: bool) -> tuple[str | None, str]:
    if not names:
        raise click.UsageError("Name the key.")
    return _owner(names[:-1], admin), names[-1]


def _print_issued(issued: IssuedKey, as_json: bool) -> None:
    print_one({"key": issued.text.reveal()} | _row(issued.row), as_json)
    if not as_json:
        click.echo("Keep the key now: only a hash of it is stored.", err=True)


def _row(key: ApiKey) -> Row:
    return {
        "id": key.id,
        "redacted": key.redacted,
        "name": key.name,
        "scopes": key.scopes,
        "adapters": key.allowed_adapters,
        "networks": key.allowed_networks,
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
        "last_used_at": key.last_used_at,
        "replaced_by": key.replaced_by_id,
    }
