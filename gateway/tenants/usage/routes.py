"""Usage, prices and budgets over HTTP."""

from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from litestar import Response, Router, delete, get, post, put
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import JSONBody, PathParameter, QueryParameter
from litestar.response import Stream
from msgspec import Struct

from gateway.db import Database
from gateway.injection import Injected
from gateway.openapi_exports import MEDIA_TYPES, ExportOperation, Format
from gateway.settings import Settings
from gateway.tenants import directory
from gateway.tenants.admin.access import Slug, moment
from gateway.tenants.admin.access import actor as actor_dependency
from gateway.tenants.admin.desk import Desk
from gateway.tenants.admin.objects import Page
from gateway.tenants.audit.trail import Actor
from gateway.tenants.keys import Principal
from gateway.tenants.usage import budgets, prices, report, webhooks
from gateway.tenants.usage.budgets import Period, Terms
from gateway.tenants.usage.export import export
from gateway.tenants.usage.rates import Rates
from gateway.tenants.usage.report import Question, UsageRow
from gateway.tenants.usage.tables import Budget, Price

Start = Annotated[
    str | None,
    QueryParameter(description="From this moment on: Unix seconds or ISO 8601.", max_length=64),
]
End = Annotated[str | None, QueryParameter(description="Before this moment; now.", max_length=64)]
OwnGroups = Annotated[
    str,
    QueryParameter(
        description="Any of `day`, `key`, `model`, `adapter`, with commas between them; or "
        "`request` for each request. Empty: one sum.",
        max_length=100,
    ),
]
AllGroups = Annotated[
    str,
    QueryParameter(
        description="Any of `tenant`, `day`, `key`, `model`, `adapter`, with commas between them; "
        "or `request`, with or without `tenant`. Empty: one sum.",
        max_length=100,
    ),
]
Limit = Annotated[int, QueryParameter(description="Rows of a page.", ge=1, le=report.PAGE_MAX)]
After = Annotated[
    str | None, QueryParameter(description="`next` of the page before.", max_length=4096)
]
Form = Annotated[
    Literal["json", "csv", "jsonl"],
    QueryParameter(description="`csv` and `jsonl` have all rows at once, without pages."),
]


class UsagePage(Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[UsageRow]
    has_more: bool
    next: str | None
    """Give it as `after` for the page that follows."""


class PriceObject(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "price"
    tenant_id: str | None
    """None: for every tenant that has none of its own."""
    model: str
    input_micros: int
    cached_input_micros: int
    output_micros: int
    valid_from: int
    """Unix time."""


class PriceRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: str
    """The base model, an adapter's name, or `*` for all."""
    input_micros: int
    """Of a million tokens, in millionths of your currency."""
    output_micros: int
    cached_input_micros: int | None = None
    """Of tokens that the cache had; without it, those of the input."""
    tenant: str | None = None
    """A slug; without it, the price is everyone's."""
    valid_from: int | None = None
    """Unix time; without it, now."""


class BudgetObject(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "budget"
    owner: str
    """`tenant:<id>` or `key:<id>`."""
    period: str
    amount_nanos: int
    hard: bool
    alert_percents: list[int]
    webhook_url: str
    created_at: int


class BudgetRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    period: Period
    """In UTC."""
    amount_nanos: int
    """In thousand-millionths of your currency."""
    key: str | None = None
    """One of the tenant's keys, by id or public id; without it, the budget is the tenant's."""
    hard: bool = True
    """Whether requests are refused once it is spent."""
    alert_percents: list[int] = []
    """At which shares of the amount to alert."""
    webhook_url: str = ""
    """Where alerts are sent; empty: they are only logged."""


class DeletedBudget(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "budget"
    deleted: bool = True


EXPORTS = {
    200: ResponseSpec(
        UsagePage, description="A page; with `format`, all rows as CSV or JSON Lines."
    )
}


@get(
    "/v1/usage",
    operation_id="getUsage",
    summary="What the tenant has used",
    tags=["Usage"],
    responses=EXPORTS,
    operation_class=ExportOperation,
)
async def get_usage(
    principal: Injected[Principal],
    database: Injected[Database],
    start: Start = None,
    end: End = None,
    group_by: OwnGroups = "",
    limit: Limit = 100,
    after: After = None,
    format: Form = "json",
) -> Response[Any]:
    principal.require("usage:read")
    groups = [group for group in report.GROUPS if group != "tenant"]
    asked = report.question(group_by, start, end, tenant_id=principal.tenant_id, groups=groups)
    return await _answer(database, asked, limit, after, format)


@get(
    "/usage",
    operation_id="getUsageOfTenants",
    summary="What tenants have used",
    responses=EXPORTS,
    operation_class=ExportOperation,
)
async def get_usage_of_tenants(
    actor: Injected[Actor],
    database: Injected[Database],
    tenant: Annotated[
        str | None, QueryParameter(description="A slug; without it, all.", max_length=63)
    ] = None,
    start: Start = None,
    end: End = None,
    group_by: AllGroups = "",
    limit: Limit = 100,
    after: After = None,
    format: Form = "json",
) -> Response[Any]:
    tenant_id = None
    if tenant is not None:
        async with database.session() as session:
            tenant_id = (await directory.tenant_by_slug(session, tenant)).id
    asked = report.question(group_by, start, end, tenant_id=tenant_id)
    return await _answer(database, asked, limit, after, format)


@get(
    "/prices",
    operation_id="listPrices",
    summary="Prices in force, and those to come",
)
async def list_prices(actor: Injected[Actor], desk: Injected[Desk]) -> Page[PriceObject]:
    async with desk.look() as session:
        rows = await prices.list_prices(session)
    return Page([_price(row) for row in rows], has_more=False)


@post(
    "/prices",
    operation_id="setPrice",
    summary="Set a price from a moment on",
    description="Prices before it stay what they were: nothing is charged anew.",
)
async def set_price(
    data: JSONBody[PriceRequest], actor: Injected[Actor], desk: Injected[Desk]
) -> PriceObject:
    cached = data.input_micros if data.cached_input_micros is None else data.cached_input_micros
    rates = Rates(data.input_micros, cached, data.output_micros)
    valid_from = moment(data.valid_from, "valid_from")
    async with desk.change(actor) as change:
        row = await prices.set_price(
            change, rates, model=data.model, tenant=data.tenant, valid_from=valid_from
        )
    return _price(row)


@get(
    "/tenants/{slug:str}/budgets",
    operation_id="listBudgets",
    summary="A tenant's budgets, and those of its keys",
)
async def list_budgets(
    slug: Slug, actor: Injected[Actor], desk: Injected[Desk]
) -> Page[BudgetObject]:
    async with desk.look() as session:
        rows = await budgets.list_budgets(session, slug)
    return Page([_budget(row) for row in rows], has_more=False)


@put(
    "/tenants/{slug:str}/budgets",
    operation_id="setBudget",
    summary="Set a budget",
    description="Replaces the one that the same owner has for the same period.",
)
async def set_budget(
    slug: Slug,
    data: JSONBody[BudgetRequest],
    actor: Injected[Actor],
    settings: Injected[Settings],
    desk: Injected[Desk],
) -> BudgetObject:
    await webhooks.check_setting(data.webhook_url, settings)
    terms = Terms(data.amount_nanos, data.hard, tuple(data.alert_percents), data.webhook_url)
    async with desk.change(actor) as change:
        row = await budgets.set_budget(change, slug, data.period, terms, data.key)
    return _budget(row)


@delete(
    "/tenants/{slug:str}/budgets/{budget_id:str}",
    status_code=200,
    operation_id="deleteBudget",
    summary="Remove a budget",
)
async def delete_budget(
    slug: Slug,
    budget_id: Annotated[str, PathParameter(description="The budget's id.")],
    actor: Injected[Actor],
    desk: Injected[Desk],
) -> DeletedBudget:
    async with desk.change(actor) as change:
        row = await budgets.delete_budget(change, slug, budget_id)
    return DeletedBudget(id=row.id)


router = Router(
    "/v1/admin",
    route_handlers=[
        get_usage_of_tenants,
        list_prices,
        set_price,
        list_budgets,
        set_budget,
        delete_budget,
    ],
    dependencies=actor_dependency,
    tags=["Admin: usage"],
)

handlers: list[HTTPRouteHandler | Router] = [get_usage, router]


async def _answer(
    database: Database, asked: Question, limit: int, after: str | None, form: str
) -> Response[Any]:
    if form != "json":
        kind: Format = "csv" if form == "csv" else "jsonl"
        lines = export(database, asked, kind)
        first = await anext(lines)  # whatever fails until here has a status of its own
        return Stream(
            _joined(first, lines),
            media_type=MEDIA_TYPES[kind],
            headers={"content-disposition": f'attachment; filename="usage.{form}"'},
        )
    if after is not None:
        asked = report.resumed(asked, after)
    async with database.reading() as connection:
        found = await report.page(connection, asked, limit, after)
    return Response(UsagePage(data=found.rows, has_more=found.after is not None, next=found.after))


async def _joined(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for lines in rest:
        yield lines


def _price(row: Price) -> PriceObject:
    return PriceObject(
        id=row.id,
        tenant_id=row.tenant_id,
        model=row.model,
        input_micros=row.input_micros,
        cached_input_micros=row.cached_input_micros,
        output_micros=row.output_micros,
        valid_from=int(row.valid_from.timestamp()),
    )


def _budget(row: Budget) -> BudgetObject:
    return BudgetObject(
        id=row.id,
        owner=row.owner,
        period=row.period,
        amount_nanos=row.amount_nanos,
        hard=row.hard,
        alert_percents=list(row.alert_percents),
        webhook_url=row.webhook_url,
        created_at=int(row.created_at.timestamp()),
    )
