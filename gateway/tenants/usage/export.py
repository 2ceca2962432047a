"""Usage as CSV or JSON Lines, page by page: a reader may be slow, the database does not wait."""

import csv
import io
from collections.abc import AsyncIterator

import msgspec

from gateway.db import Database
from gateway.openapi_exports import Format
from gateway.tenants.usage import report
from gateway.tenants.usage.report import Page, Question, UsageRow

FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""What makes a spreadsheet compute a cell that begins with it."""


async def export(database: Database, asked: Question, form: Format) -> AsyncIterator[bytes]:
    """Whole lines. Raises DatabaseUnavailable, before the first line or after any."""
    found = await _page(database, asked, None)
    if form == "csv":
        yield csv_lines([list(asked.names)])
    while True:
        yield _lines(found.rows, asked, form)
        if found.after is None:
            return
        found = await _page(database, asked, found.after)


async def _page(database: Database, asked: Question, after: str | None) -> Page:
    async with database.reading() as connection:
        return await report.page(connection, asked, report.PAGE_MAX, after)


def _lines(rows: list[UsageRow], asked: Question, form: Format) -> bytes:
    if form == "jsonl":
        return b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
    return csv_lines([[getattr(row, name) for name in asked.names] for row in rows])


def csv_lines(rows: list[list[object]]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([_harmless(cell) for cell in row] for row in rows)
    return text.getvalue().encode()


def _harmless(cell: object) -> object:
    """Text that a spreadsheet reads as text, whoever has chosen it."""
    if isinstance(cell, str) and cell.startswith(FORMULA):
        return f"'{cell}"
    return cell
