"""Usage as CSV or JSON Lines, page by page: a reader may be slow, the database does not wait."""

from collections.abc import AsyncIterator

import msgspec

from gateway.csv_text import csv_lines
from gateway.db import Database
from gateway.openapi_exports import Format
from gateway.tenants.usage import report
from gateway.tenants.usage.report import Page, Question, UsageRow


async def export(database: Database, asked: Question, form: Format) -> AsyncIterator[bytes]:
    """Whole lines. Raises DatabaseUnavailable, before the first line or after any."""
    found = await _page(database, asked, None)
    if form == "csv":
        yield csv_lines([asked.names]).encode()
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
    return csv_lines([getattr(row, name) for name in asked.names] for row in rows).encode()
