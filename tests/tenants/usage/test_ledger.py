import asyncio
import json
import logging
from datetime import UTC, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.db import Database, async_url, new_id, now
from gateway.errors import DatabaseUnavailable
from gateway.tenants.usage import entries, ledger
from gateway.tenants.usage.entries import Entry, spent_since
from gateway.tenants.usage.journal import Journal
from gateway.tenants.usage.rates import cost_nanos
from tests.databases import Postgres, stopped
from tests.tenants.usage.keeping import RATES, ledger_of, make_principal, opened, rows_of


async def test_a_request_is_recorded_with_everything_that_was_used(
    database: Database, tmp_path: Path
) -> None:
    principal = await make_principal(database)
    book = ledger_of(database, tmp_path)
    async with book.running():
        record = book.open(
            request_id="r1",
            principal=principal,
            model="support",
            adapter_digest="d" * 64,
            rates=RATES,
        )
        await asyncio.sleep(0.01)
        record.begin(100, 64)
        for _ in range(5):
            record.produced(2)
        record.finish("stop", 100, 11, 64)
        await book.flush()
        (row,) = await rows_of(database)
    assert (row.tenant_id, row.key_id) == (principal.tenant_id, principal.key_id)
    assert (row.model, row.adapter_digest) == ("support", "d" * 64)
    assert (row.prompt_tokens, row.cached_tokens, row.completion_tokens) == (100, 64, 11)
    assert row.cost_nanos == 75  # 36 × 1 + 64 × 0.1 + 11 × 3 = 75.4
    assert row.finish_reason == "stop"
    assert row.first_token_ms is not None
    assert row.duration_ms is not None
    assert 10 <= row.first_token_ms <= row.duration_ms < 1000
    assert abs(row.started_at - now()) < timedelta(minutes=1)
    assert row.started_at.tzinfo is UTC


async def test_f8_what_a_running_request_has_used_is_written_while_it_runs(
    database: Database, tmp_path: Path
) -> None:
    principal = await make_principal(database)
    book = ledger_of(database, tmp_path)
    async with book.running():
        record = opened(book, principal)
        await book.flush()
        assert await rows_of(database) == []  # it waits, and has used nothing
        record.begin(10, 0)
        for produced in range(1, 4):
            record.produced(1)
            await book.flush()
            (row,) = await rows_of(database)
            assert (row.prompt_tokens, row.completion_tokens) == (10, produced)
            assert (row.finish_reason, row.duration_ms) == (None, None)
            assert row.first_token_ms is not None


async def test_f9_the_engines_own_counts_are_the_last_word(
    database: Database, tmp_path: Path
) -> None:
    principal = await make_principal(database)
    book = ledger_of(database, tmp_path)
    async with book.running():
        for name, counts in {"all cached": (8, 1, 8), "nothing": (0, 0, 0)}.items():
            record = opened(book, principal, name)
            record.finish("cancelled", *counts)
        opened(book, principal, "refused").finish("failed", 0, 0, 0)
        await book.flush()
        rows = {row.request_id: row for row in await rows_of(database)}
    assert rows.keys() == {"all cached", "nothing"}  # what the engine refused leaves no entry
    assert rows["all cached"].cached_tokens == 8
    assert rows["all cached"].cost_nanos == 4
    assert rows["nothing"].cost_nanos == 0


async def test_an_answer_that_ended_at_a_stop_string_was_not_cancelled(
    database: Database, tmp_path: Path
) -> None:
    principal = await make_principal(database)
    book = ledger_of(database, tmp_path)
    async with book.running():
        for name, told in {"a": "cancelled", "b": "length", "c": "failed"}.items():
            record = opened(book, principal, name)
            record.begin(3, 0)
            record.produced(1)
            record.ends("stop")
            await book.flush()
            record.finish(told, 3, 2, 0)  # type: ignore[arg-type]  # one of them
        await book.flush()
        reasons = {row.request_id: row.finish_reason for row in await rows_of(database)}
    assert reasons == {"a": "stop", "b": "length", "c": "failed"}


grown = st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50))


@settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(counts=st.lists(grown, min_size=1, max_size=8), order=st.randoms(use_true_random=False))
def test_neither_order_nor_repetition_changes_what_is_recorded(
    counts: list[tuple[int, int, int]], order: Any, migrated_url: str
) -> None:
    """The states of one request, as it grows; the last has an end."""
    prompt = cached = completion = 0
    states = []
    moment = now()
    for number, (p, c, o) in enumerate(counts):
        prompt, cached, completion = prompt + p + c, cached + c, completion + o
        last = number == len(counts) - 1
        states.append(
            Entry(
                request_id="",
                tenant_id="",
                key_id="k",
                model="m",
                started_at=moment,
                prompt_tokens=prompt,
                cached_tokens=cached,
                completion_tokens=completion,
                cost_nanos=cost_nanos(RATES, prompt, cached, completion),
                first_token_ms=1.5,
                duration_ms=9.0 if last else None,
                finish_reason="stop" if last else None,
            )
        )
    asyncio.run(_any_order(states, order, migrated_url))


async def _any_order(states: list[Entry], order: Any, url: str) -> None:
    database = Database(async_url(url, Path()))
    try:
        principal = await make_principal(database, f"t{new_id()}")
        name = new_id()
        ours = [
            msgspec.structs.replace(state, request_id=name, tenant_id=principal.tenant_id)
            for state in states
        ]
        played = [*ours, *order.choices(ours, k=4)]
        order.shuffle(played)
        while played:
            size = order.randint(1, 3)
            await entries.write(database, played[:size])
            played = played[size:]
        (row,) = [row for row in await rows_of(database) if row.request_id == name]
        last = ours[-1]
        for field in Entry.__struct_fields__:
            assert getattr(row, field) == getattr(last, field), field
    finally:
        await database.close()


async def test_the_spent_sum_is_of_one_owner_and_since_a_moment(
    database: Database, tmp_path: Path
) -> None:
    acme, other = await make_principal(database), await make_principal(database, "other")
    before = now()
    book = ledger_of(database, tmp_path)
    async with book.running():
        for number, principal in enumerate((acme, acme, other)):
            opened(book, principal, f"r{number}").finish("length", 1000, 1000, 0)
        await book.flush()
    async with database.reading() as connection:

        async def spent(owner: str, start: Any = before) -> int:
            return await spent_since(connection, owner, start)

        assert await spent(f"tenant:{acme.tenant_id}") == 2 * 4000
        assert await spent(f"key:{acme.key_id}") == 2 * 4000
        assert await spent(f"tenant:{other.tenant_id}") == 4000
        assert await spent("tenant:nobody") == 0
        assert await spent(f"tenant:{acme.tenant_id}", now()) == 0


# --- what goes wrong ------------------------------------------------------------------------------


async def test_usage_survives_a_crash_and_is_not_counted_twice(
    database: Database, tmp_path: Path
) -> None:
    """The journal as a process leaves it that dies after the database has taken half of it."""
    principal = await make_principal(database)
    book = ledger_of(database, tmp_path)
    left = Journal.create(tmp_path / "usage")
    states = [
        Entry(f"r{n}", principal.tenant_id, "k", "m", now(), completion_tokens=n, cost_nanos=n)
        for n in range(300)
    ]
    left.append(states)
    left.close()
    await entries.write(database, states[:150])
    for _ in range(2):
        async with book.running():
            await book.flush()
    rows = await rows_of(database)
    assert sum(row.cost_nanos for row in rows) == sum(range(300))
    assert {row.finish_reason for row in rows} == {None}
    assert list((tmp_path / "usage").iterdir()) == []


async def test_f16_without_a_database_usage_is_safe_on_disk_and_comes_in_later(
    postgres_database: Database, postgres_server: Postgres, tmp_path: Path
) -> None:
    principal = await make_principal(postgres_database)
    book = ledger_of(postgres_database, tmp_path)
    async with book.running():
        with stopped(postgres_server):
            for number in range(50):
                opened(book, principal, f"r{number}").finish("length", 1, 1, 0)
            await book.save()
            with pytest.raises(DatabaseUnavailable):
                await book.write()
            (file,) = (tmp_path / "usage").iterdir()
            assert len(file.read_text().splitlines()) == 50
            assert not book._changed  # nothing of it is kept in memory
        opened(book, principal, "late").finish("length", 1, 1, 0)
        for _ in range(100):
            if len(await rows_of(postgres_database)) == 51:
                break
            await asyncio.sleep(0.1)
    assert len(await rows_of(postgres_database)) == 51
    assert list((tmp_path / "usage").iterdir()) == []


async def test_a_disk_that_takes_nothing_costs_no_usage_and_memory_has_a_bound(
    migrated_sqlite_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(ledger, "CHANGED_MAX", 10)
    database = Database(async_url(migrated_sqlite_url, Path()))
    principal = await make_principal(database)
    book = ledger_of(database, tmp_path)

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    async with book.running():
        with monkeypatch.context() as broken:
            broken.setattr(Journal, "append", full)
            growing = opened(book, principal, "growing")
            for number in range(3):
                growing.begin(1, 0)
                growing.produced(1)
                opened(book, principal, f"a{number}").finish("length", 1, 1, 0)
                await book.save()
            assert len(book._changed) == 4
            for number in range(20):
                opened(book, principal, f"b{number}").finish("length", 1, 1, 0)
            await book.save()
            assert len(book._changed) == 10
            assert "14 requests is given up" in caplog.text
        growing.produced(1)
        await book.flush()
        rows = {row.request_id: row for row in await rows_of(database)}
    assert rows.keys() == {"growing"} | {f"b{number}" for number in range(10, 20)}
    assert rows["growing"].completion_tokens == 4
    await database.close()


async def test_an_entry_that_the_database_never_takes_holds_up_no_other(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    principal = await make_principal(database)
    nobody = type(principal)("no-such-tenant", "x", "k", frozenset())
    book = ledger_of(database, tmp_path)
    async with book.running():
        opened(book, principal, "a").finish("stop", 1, 1, 0)
        opened(book, nobody, "b").finish("stop", 1, 1, 0)
        opened(book, principal, "c").finish("stop", 1, 1, 0)
        with caplog.at_level(logging.ERROR):
            await book.flush()
        assert [row.request_id for row in await rows_of(database)] == ["a", "c"]
    (line,) = [record for record in caplog.records if "does not take" in record.getMessage()]
    told = json.loads(line.getMessage()[line.getMessage().index("{") :])
    assert told["request_id"] == "b"


async def test_what_is_noted_while_a_flush_runs_is_in_the_next(
    database: Database, tmp_path: Path
) -> None:
    principal = await make_principal(database)
    book = ledger_of(database, tmp_path)
    async with book.running():
        record = opened(book, principal)
        record.begin(1, 0)
        record.produced(1)
        flushing = asyncio.create_task(book.flush())
        while not flushing.done():
            record.produced(1)
            await asyncio.sleep(0)
        await flushing
        record.produced(1)
        record.finish("length", 1, 10**6, 0)
        await book.flush()
        (row,) = await rows_of(database)
    assert row.completion_tokens == 10**6
