"""`loragate limits` and `loragate plans`."""

from collections.abc import Callable
from typing import Any, TypeVar

import click
import msgspec

from gateway.settings import Settings
from gateway.shell import pass_settings
from gateway.tenants import plans
from gateway.tenants.admin import limits
from gateway.tenants.admin.shell import Row, as_json, change, look, print_many, print_one
from gateway.tenants.limits.rows import KINDS, LIMIT_MAX
from gateway.tenants.limits.rules import Limits
from gateway.tenants.plans import Plan

Command = TypeVar("Command", bound=Callable[..., Any])

NONE = "none"


class Limit(click.ParamType[str | int]):
    """A whole number, or `none`."""

    name = "number|none"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> str | int:
        if value == NONE:
            return NONE
        return click.IntRange(0, LIMIT_MAX).convert(value, param, ctx)


def limit_options(command: Command) -> Command:
    """One option for each kind of limit; what is left out stays."""
    for kind in reversed(KINDS):
        option = click.option("--" + kind.replace("_", "-"), kind, type=Limit())
        command = option(command)
    return command


@click.group("limits")
def limits_group() -> None:
    """What tenants and keys may do at most."""


@limits_group.command("show")
@click.argument("tenant")
@click.option("--key", help="Of this key of the tenant, by its id or public part.")
@as_json
@pass_settings
def show_limits(settings: Settings, tenant: str, key: str | None, as_json: bool) -> None:
    """Show the limits of TENANT (a slug): its own, and what holds with its plan's."""
    if key is not None:
        print_one(_row(look(settings, limits.key_limits, tenant, key)), as_json)
        return
    found = look(settings, limits.tenant_limits, tenant)
    _print_both(found, as_json)


@limits_group.command("set")
@click.argument("tenant")
@click.option("--key", help="Of this key of the tenant, by its id or public part.")
@limit_options
@as_json
@pass_settings
def set_limits(
    settings: Settings, /, tenant: str, key: str | None, as_json: bool, **given: str | int | None
) -> None:
    """Change limits of TENANT (a slug). What is left out stays; `none` removes a limit."""
    changes = _changes(given)
    if key is None:
        _print_both(change(settings, limits.set_tenant_limits, tenant, changes), as_json)
    else:
        changed = change(settings, limits.set_key_limits, tenant, key, changes)
        print_one(_row(changed), as_json)


@click.group("plans")
def plans_group() -> None:
    """Limits under a name, for the tenants of that plan that have none of their own."""


@plans_group.command("list")
@as_json
@pass_settings
def list_plans(settings: Settings, as_json: bool) -> None:
    """List all plans."""
    print_many(map(_plan_row, look(settings, plans.list_plans)), as_json)


@plans_group.command("show")
@click.argument("name")
@as_json
@pass_settings
def show_plan(settings: Settings, name: str, as_json: bool) -> None:
    """Show the plan NAME."""
    print_one(_plan_row(look(settings, plans.find_plan, name)), as_json)


@plans_group.command("set")
@click.argument("name")
@limit_options
@as_json
@pass_settings
def set_plan(settings: Settings, /, name: str, as_json: bool, **given: str | int | None) -> None:
    """Make the plan NAME, or change it. What is left out stays; `none` removes a limit."""
    print_one(_plan_row(change(settings, limits.set_plan, name, _changes(given))), as_json)


@plans_group.command("delete")
@click.argument("name")
@pass_settings
def delete_plan(settings: Settings, name: str) -> None:
    """Delete the plan NAME, which no tenant is on."""
    change(settings, limits.delete_plan, name)
    click.echo(f"Deleted the plan {name}.")


def _changes(given: dict[str, str | int | None]) -> dict[str, int | None]:
    return {
        kind: None if value == NONE else int(value)
        for kind, value in given.items()
        if value is not None
    }


def _print_both(found: limits.TenantLimits, as_json: bool) -> None:
    if as_json:
        print_one({"own": _row(found.own), "effective": _row(found.effective)}, as_json)
        return
    own, effective = _row(found.own), _row(found.effective)
    print_many(
        [{"limit": kind, "own": own[kind], "effective": effective[kind]} for kind in KINDS], as_json
    )


def _row(found: Limits) -> Row:
    return msgspec.structs.asdict(found)


def _plan_row(plan: Plan) -> Row:
    return {"plan": plan.name} | _row(plan.limits)
