"""What the operator's commands share: the desk behind them, and how rows are printed."""

import asyncio
import getpass
import json
import os
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime
from typing import Concatenate, ParamSpec, TypeVar

import click
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.db import Database
from gateway.migrate import prepare
from gateway.redis_client import connect
from gateway.settings import Settings
from gateway.tenants.admin.desk import Change, Desk
from gateway.tenants.announcements import Announcer
from gateway.tenants.audit.trail import Actor
from gateway.tenants.pepper import open_key_hash

P = ParamSpec("P")
T = TypeVar("T")

Row = dict[str, object]

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")


def change(
    settings: Settings,
    verb: Callable[Concatenate[Change, P], Awaitable[T]],
    *arguments: P.args,
    **options: P.kwargs,
) -> T:
    """Do one of the operator's verbs as the user of this shell."""

    async def act(desk: Desk) -> T:
        async with desk.change(actor()) as change:
            return await verb(change, *arguments, **options)

    return with_desk(settings, act)


def look(
    settings: Settings,
    question: Callable[Concatenate[AsyncSession, P], Awaitable[T]],
    *arguments: P.args,
    **options: P.kwargs,
) -> T:
    async def act(desk: Desk) -> T:
        async with desk.look() as session:
            return await question(session, *arguments, **options)

    return with_desk(settings, act)


def with_desk(settings: Settings, act: Callable[[Desk], Awaitable[T]]) -> T:
    return with_database(settings, lambda database: _at_desk(settings, database, act))


def with_database(settings: Settings, act: Callable[[Database], Awaitable[T]]) -> T:
    async def run() -> T:
        database = Database(await prepare(settings), pool_size=1)
        try:
            return await act(database)
        finally:
            await database.close()

    return asyncio.run(run())


async def _at_desk(
    settings: Settings, database: Database, act: Callable[[Desk], Awaitable[T]]
) -> T:
    redis = connect(settings)
    try:
        key_hash = open_key_hash(settings)
        return await act(Desk(database, key_hash, Announcer(redis), settings.keys.environment))
    finally:
        if redis is not None:
            await redis.aclose()


def actor() -> Actor:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in containers
        user = str(os.getuid())
    return Actor(f"shell:{user[:100]}")


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
        case None | "":
            return "-"
        case datetime():
            return value.isoformat(timespec="seconds")
        case list():
            return ",".join(map(str, value))
        case dict():
            return json.dumps(value)
        case _:
            return str(value)
