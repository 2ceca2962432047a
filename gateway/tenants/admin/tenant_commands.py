"""`loragate tenants`."""

import click

from gateway.settings import Settings
from gateway.shell import pass_settings
from gateway.tenants import directory
from gateway.tenants.admin import tenants
from gateway.tenants.admin.shell import Row, as_json, change, look, print_many, print_one
from gateway.tenants.tables import Tenant


@click.group("tenants")
def tenants_group() -> None:
    """Who may use this server."""


@tenants_group.command("create")
@click.argument("slug")
@click.option("--name", default="", help="For people; default: the slug.")
@click.option("--plan", default="", help="Whose limits hold; default: none.")
@click.option(
    "--weight", default=1.0, show_default=True, help="Share of the engine beside other tenants."
)
@as_json
@pass_settings
def create_tenant(
    settings: Settings, slug: str, name: str, plan: str, weight: float, as_json: bool
) -> None:
    """Create the tenant SLUG."""
    print_one(_row(change(settings, tenants.create, slug, name, plan, weight)), as_json)


@tenants_group.command("list")
@as_json
@pass_settings
def list_tenants(settings: Settings, as_json: bool) -> None:
    """List all tenants, deleted ones too."""
    print_many(map(_row, look(settings, directory.list_tenants)), as_json)


@tenants_group.command("show")
@click.argument("slug")
@as_json
@pass_settings
def show_tenant(settings: Settings, slug: str, as_json: bool) -> None:
    """Show the tenant SLUG."""
    print_one(_row(look(settings, directory.tenant_by_slug, slug)), as_json)


@tenants_group.command("set")
@click.argument("slug")
@click.option("--name", help="For people.")
@click.option("--plan", help="Whose limits hold; empty: no plan's.")
@click.option("--weight", type=float, help="Share of the engine beside other tenants.")
@as_json
@pass_settings
def set_tenant(
    settings: Settings,
    slug: str,
    name: str | None,
    plan: str | None,
    weight: float | None,
    as_json: bool,
) -> None:
    """Change the tenant SLUG; what is left out stays."""
    changed = change(settings, tenants.update, slug, name=name, plan=plan, weight=weight)
    print_one(_row(changed), as_json)


@tenants_group.command("suspend")
@click.argument("slug")
@as_json
@pass_settings
def suspend_tenant(settings: Settings, slug: str, as_json: bool) -> None:
    """Refuse the keys of the tenant SLUG until it is activated."""
    print_one(_row(change(settings, tenants.suspend, slug)), as_json)


@tenants_group.command("activate")
@click.argument("slug")
@as_json
@pass_settings
def activate_tenant(settings: Settings, slug: str, as_json: bool) -> None:
    """Let the suspended tenant SLUG in again."""
    print_one(_row(change(settings, tenants.activate, slug)), as_json)


@tenants_group.command("delete")
@click.argument("slug")
@click.confirmation_option(prompt="Its keys and adapters are gone for good. Delete it?")
@as_json
@pass_settings
def delete_tenant(settings: Settings, slug: str, as_json: bool) -> None:
    """Delete the tenant SLUG for good. What it used stays on record, and its slug taken."""
    print_one(_row(change(settings, tenants.delete, slug)), as_json)


def _row(tenant: Tenant) -> Row:
    return {
        "id": tenant.id,
        "slug": tenant.slug,
        "name": tenant.name,
        "status": tenant.status,
        "plan": tenant.plan,
        "weight": tenant.weight,
        "created_at": tenant.created_at,
    }
