"""`loragate usage`, `loragate prices` and `loragate budgets`."""

import asyncio
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, TypeVar

import click
import msgspec

from gateway.db import Database
from gateway.openapi_exports import Format
from gateway.settings import Settings
from gateway.shell import pass_settings
from gateway.tenants import directory
from gateway.tenants.admin.shell import (
    Row,
    as_json,
    change,
    look,
    print_many,
    print_one,
    with_database,
)
from gateway.tenants.usage import budgets, prices, report, webhooks
from gateway.tenants.usage.budgets import Period, Terms
from gateway.tenants.usage.export import export
from gateway.tenants.usage.rates import Rates
from gateway.tenants.usage.report import Question, UsageRow
from gateway.tenants.usage.tables import Budget, Price

T = TypeVar("T")

MICROS = 10**6
NANOS = 10**9
DIGITS_MAX = 20
"""More than any amount may have."""


class Money(click.ParamType[int]):
    """An amount like 12.50, as a whole number of the smallest part that is kept."""

    name = "amount"

    def __init__(self, parts: int) -> None:
        self._parts = parts

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            amount = Decimal(str(value)) * self._parts
        except ArithmeticError:
            amount = Decimal("NaN")
        # first of all its size: as an integer, 1e999999999 would fill the memory
        if not amount.is_finite() or amount.adjusted() > DIGITS_MAX or amount < 0 or amount % 1:
            self.fail(f"{value!r} is no amount like 12.50.", param, ctx)
        return int(amount)


MICRO_MONEY, NANO_MONEY = Money(MICROS), Money(NANOS)

OF_PROMPTS = "For a million tokens of prompts."
OF_CACHED = "For a million of these that were in the cache; default: the same."
OF_ANSWERS = "For a million tokens of answers."


@click.command("usage")
@click.argument("tenant", required=False)
@click.option(
    "--by",
    default="day",
    show_default=True,
    help="tenant, day, key, model, adapter, with commas between them; or request.",
)
@click.option("--start", help="From this moment on: 2026-01-31, ISO 8601 or Unix seconds.")
@click.option("--end", help="Before this moment; default: now.")
@click.option("--csv", "form", flag_value="csv", help="Print CSV.")
@click.option("--json", "form", flag_value="jsonl", help="Print JSON, one object a line.")
@pass_settings
def usage_command(
    settings: Settings,
    tenant: str | None,
    by: str,
    start: str | None,
    end: str | None,
    form: Format | None,
) -> None:
    """What TENANT (a slug), or all of them, have used."""

    async def run(database: Database) -> None:
        tenant_id = None
        if tenant is not None:
            async with database.session() as session:
                tenant_id = (await directory.tenant_by_slug(session, tenant)).id
        asked = report.question(by, start, end, tenant_id=tenant_id)
        if form is None:
            print_many(await _table(database, asked), False)
            return
        async for lines in export(database, asked, form):
            click.echo(lines, nl=False)

    with_database(settings, run)


async def _table(database: Database, asked: Question) -> list[Row]:
    decoder = msgspec.json.Decoder(UsageRow)
    found = [
        decoder.decode(line)
        async for lines in export(database, asked, "jsonl")
        for line in lines.splitlines()
    ]
    names = [name for name in asked.names if name != "cost_nanos"]
    return [
        {name: getattr(row, name) for name in names} | {"cost": _money(row.cost_nanos, NANOS)}
        for row in found
    ]


@click.group("prices")
def prices_group() -> None:
    """What tokens cost."""


@prices_group.command("set")
@click.argument("model")
@click.option("--input", "input_micros", type=MICRO_MONEY, required=True, help=OF_PROMPTS)
@click.option("--cached-input", "cached_micros", type=MICRO_MONEY, help=OF_CACHED)
@click.option("--output", "output_micros", type=MICRO_MONEY, required=True, help=OF_ANSWERS)
@click.option("--tenant", help="A slug; default: everyone who has no price of its own.")
@click.option("--from", "valid_from", type=click.DateTime(), help="In UTC; default: now.")
@as_json
@pass_settings
def set_price(
    settings: Settings,
    model: str,
    input_micros: int,
    cached_micros: int | None,
    output_micros: int,
    tenant: str | None,
    valid_from: datetime | None,
    as_json: bool,
) -> None:
    """Set the price of MODEL: the base model, an adapter's name, or '*' for all."""
    cached = input_micros if cached_micros is None else cached_micros
    rates = Rates(input_micros, cached, output_micros)
    moment = None if valid_from is None else valid_from.replace(tzinfo=UTC)
    row = change(settings, prices.set_price, rates, model=model, tenant=tenant, valid_from=moment)
    print_one(_price_row(row), as_json)


@prices_group.command("list")
@as_json
@pass_settings
def list_prices(settings: Settings, as_json: bool) -> None:
    """List the prices in force, and those to come."""
    print_many(map(_price_row, look(settings, prices.list_prices)), as_json)


@click.group("budgets")
def budgets_group() -> None:
    """What tenants and their keys may spend."""


@budgets_group.command("set")
@click.argument("tenant")
@click.argument("period", type=click.Choice(["day", "month"]))
@click.argument("amount", type=NANO_MONEY)
@click.option("--key", help="Of one key, by its id or the 10 characters after `lg_sk_`.")
@click.option("--soft", is_flag=True, help="Only alert, refuse nothing.")
@click.option("--alert", "percents", type=int, multiple=True, help="Percent; repeat for several.")
@click.option("--webhook", default="", help="URL that alerts are sent to.")
@as_json
@pass_settings
def set_budget(
    settings: Settings,
    tenant: str,
    period: Period,
    amount: int,
    key: str | None,
    soft: bool,
    percents: tuple[int, ...],
    webhook: str,
    as_json: bool,
) -> None:
    """Let TENANT (a slug) spend AMOUNT in each PERIOD, in UTC."""
    terms = Terms(amount, not soft, percents, webhook)
    asyncio.run(webhooks.check_setting(webhook, settings))
    row = change(settings, budgets.set_budget, tenant, period, terms, key)
    print_one(_budget_row(row), as_json)


@budgets_group.command("list")
@click.argument("tenant")
@as_json
@pass_settings
def list_budgets(settings: Settings, tenant: str, as_json: bool) -> None:
    """List the budgets of TENANT (a slug) and its keys."""
    print_many(map(_budget_row, look(settings, budgets.list_budgets, tenant)), as_json)


@budgets_group.command("delete")
@click.argument("tenant")
@click.argument("budget")
@as_json
@pass_settings
def delete_budget(settings: Settings, tenant: str, budget: str, as_json: bool) -> None:
    """Remove a budget of TENANT (a slug) by its id."""
    print_one(_budget_row(change(settings, budgets.delete_budget, tenant, budget)), as_json)


commands: list[click.Command] = [usage_command, prices_group, budgets_group]


def _money(parts: int, whole: int) -> str:
    """Exactly: 1.25, without zeros that say nothing."""
    text = f"{Decimal(parts) / whole:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _price_row(price: Price) -> Row:
    return {
        "id": price.id,
        "tenant_id": price.tenant_id,
        "model": price.model,
        "input": _money(price.input_micros, MICROS),
        "cached_input": _money(price.cached_input_micros, MICROS),
        "output": _money(price.output_micros, MICROS),
        "valid_from": price.valid_from,
    }


def _budget_row(budget: Budget) -> Row:
    return {
        "id": budget.id,
        "owner": budget.owner,
        "period": budget.period,
        "amount": _money(budget.amount_nanos, NANOS),
        "hard": budget.hard,
        "alert_percents": budget.alert_percents,
        "webhook_url": budget.webhook_url,
    }
