import asyncio
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import func, select

from gateway.db import Database, now
from gateway.errors import InvalidRequest
from gateway.tenants import directory
from gateway.tenants.audit.tables import AuditEntry
from gateway.tenants.usage import prices
from gateway.tenants.usage.prices import MICROS_MAX, PriceBook
from gateway.tenants.usage.rates import FREE, Rates, cost_nanos
from gateway.tenants.usage.tables import Price
from tests.tenants.usage.keeping import changing

BASE = "base-1b"


def rates(number: int) -> Rates:
    return Rates(number, number, number)


async def put(
    database: Database,
    number: int,
    model: str,
    tenant: str | None = None,
    begins_in: timedelta | None = None,
) -> None:
    valid_from = None if begins_in is None else now() + begins_in
    async with changing(database) as change:
        await prices.set_price(
            change, rates(number), model=model, tenant=tenant, valid_from=valid_from
        )


def test_a_million_tokens_cost_their_price() -> None:
    price = Rates(input_micros=500_000, cached_input_micros=50_000, output_micros=1_500_000)
    assert cost_nanos(price, 10**6, 0, 0) == 500_000_000
    assert cost_nanos(price, 10**6, 10**6, 0) == 50_000_000
    assert cost_nanos(price, 0, 0, 10**6) == 1_500_000_000
    assert cost_nanos(price, 1000, 400, 20) == 600 * 500 + 400 * 50 + 20 * 1500


@pytest.mark.parametrize(("micros", "cost"), [(499, 0), (500, 1), (501, 1), (1499, 1), (1500, 2)])
def test_half_a_nano_is_rounded_up(micros: int, cost: int) -> None:
    assert cost_nanos(Rates(output_micros=micros), 0, 0, 1) == cost


counts = st.integers(0, 10**6)
one_rate = st.integers(0, MICROS_MAX)


@given(st.builds(Rates, one_rate, one_rate, one_rate), counts, counts, counts, counts, counts)
def test_a_cost_never_falls_as_tokens_come_and_fits_64_bits(
    price: Rates, cached: int, uncached: int, output: int, more: int, one: int
) -> None:
    before = cost_nanos(price, cached + uncached, cached, output)
    assert before <= cost_nanos(price, cached + uncached + one, cached, output + more) < 2**63


async def test_the_most_particular_price_counts(database: Database) -> None:
    async with database.session() as session:
        acme = (await directory.create_tenant(session, "acme")).id
        other = (await directory.create_tenant(session, "other")).id
    book = PriceBook(database)
    await book.refresh()
    assert book.rates(acme, "support", BASE) == FREE
    # from the most general to the most particular: each beats all before it
    for number, (tenant, model) in enumerate(
        [
            (None, "*"),
            (None, BASE),
            ("acme", "*"),
            ("acme", BASE),
            (None, "support"),
            ("acme", "support"),
        ],
        1,
    ):
        await put(database, number, model, tenant)
        await book.refresh()
        assert book.rates(acme, "support", BASE) == rates(number)
    assert book.rates(acme, "sales", BASE) == rates(4)
    assert book.rates(acme, BASE, BASE) == rates(4)
    assert book.rates(other, "support", BASE) == rates(5)
    assert book.rates(other, BASE, BASE) == rates(2)
    assert book.rates(other, "x", "another-base") == rates(1)


async def test_a_price_is_superseded_and_never_changed(database: Database) -> None:
    book = PriceBook(database)
    await put(database, 1, "*")
    await put(database, 2, "*")
    await put(database, 3, "*", begins_in=timedelta(seconds=0.3))
    await book.refresh()
    assert book.rates("", "a", BASE) == rates(2)
    async with database.session() as session:
        assert [row.input_micros for row in await prices.list_prices(session)] == [2, 3]
        assert await session.scalar(select(func.count()).select_from(Price)) == 3
    await asyncio.sleep(0.35)
    await book.refresh()
    assert book.rates("", "a", BASE) == rates(3)
    async with database.session() as session:
        assert [row.input_micros for row in await prices.list_prices(session)] == [3]
        trail = (await session.scalars(select(AuditEntry).order_by(AuditEntry.sequence))).all()
    assert [(entry.action, entry.before and entry.before["input_micros"]) for entry in trail] == [
        ("price.set", None),
        ("price.set", 1),
        ("price.set", 2),
    ]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"rates": Rates(input_micros=-1)}, "input_micros"),
        ({"rates": Rates(output_micros=MICROS_MAX + 1)}, "output_micros"),
        ({"model": ""}, "model"),
        ({"model": "a" * 256}, "model"),
        ({"valid_from": now() - timedelta(minutes=2)}, "valid_from"),
    ],
)
async def test_a_price_that_cannot_be_is_refused(
    changes: dict[str, object], param: str, database: Database
) -> None:
    given: dict[str, object] = {"rates": FREE, "model": "*"} | changes
    async with changing(database) as change:
        with pytest.raises(InvalidRequest) as error:
            await prices.set_price(change, given.pop("rates"), **given)  # type: ignore[arg-type]  # as a caller would
    assert error.value.param == param
