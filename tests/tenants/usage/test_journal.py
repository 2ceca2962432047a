import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gateway.tenants.usage import journal as module
from gateway.tenants.usage.entries import Entry
from gateway.tenants.usage.journal import Journal, JournalFull

STARTED = datetime(2026, 1, 31, 23, 59, 59, 123456, tzinfo=UTC)


def entry(number: int, tokens: int = 1) -> Entry:
    return Entry(f"r{number}", "t", "k", "m", STARTED, completion_tokens=tokens)


def drained(journal: Journal) -> list[Entry]:
    found: list[Entry] = []
    while journal.waiting_bytes:
        entries, place = journal.head()
        found += entries
        journal.take(place)
    return found


def test_what_was_put_in_comes_out_in_order_and_leaves_an_empty_file(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path / "usage")
    put = [entry(number) for number in range(1000)]
    for start in range(0, 1000, 100):
        journal.append(put[start : start + 100])
    assert drained(journal) == put
    assert journal.path.stat().st_size == 0
    journal.append([entry(7)])
    assert drained(journal) == [entry(7)]
    journal.close()
    assert list((tmp_path / "usage").iterdir()) == []


def test_what_was_not_taken_is_there_again(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path)
    journal.append([entry(1), entry(2)])
    journal.head()
    journal.close()
    (left,) = Journal.left_behind(tmp_path)
    assert drained(left) == [entry(1), entry(2)]
    left.close()


def test_the_journal_of_a_living_process_is_left_alone(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path)
    journal.append([entry(1)])
    assert Journal.left_behind(tmp_path) == []
    journal.close()


def test_a_line_that_a_crash_has_torn_is_left_out_and_the_others_are_kept(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path)
    journal.append([entry(1), entry(2)])
    journal.close()
    with journal.path.open("ab") as file:
        file.write(b'{"request_id":"r3","ten')
    (left,) = Journal.left_behind(tmp_path)
    assert drained(left) == [entry(1), entry(2)]
    left.close()


GARBAGE = [
    {"prompt_tokens": 2**63},
    {"prompt_tokens": -1},
    {"cost_nanos": 10**400},
    {"completion_tokens": "1"},
    {"started_at": "2026-01-31T23:59:59"},
    {"started_at": "soon"},
    {"model": "a\0b"},
    {"model": "m" * 256},
    {"key_id": "k" * 37},
    {"finish_reason": 1},
]


@pytest.mark.parametrize("changes", GARBAGE)
def test_what_no_database_would_take_is_left_out_and_the_others_are_kept(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    journal = Journal.create(tmp_path)
    journal.append([entry(1)])
    journal.close()
    told = json.loads(journal.path.read_text())
    with journal.path.open("a") as file:
        file.write(
            json.dumps(told | changes) + "\n" + json.dumps(told | {"request_id": "r2"}) + "\n"
        )
    (left,) = Journal.left_behind(tmp_path)
    assert drained(left) == [entry(1), entry(2)]
    left.close()


def test_a_full_journal_says_so_and_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal.create(tmp_path)
    monkeypatch.setattr(module, "BYTES_MAX", 1000)
    journal.append([entry(1)])
    with pytest.raises(JournalFull):
        journal.append([entry(number) for number in range(100)])
    assert drained(journal) == [entry(1)]
    journal.close()


def test_a_disk_that_takes_half_has_taken_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal.create(tmp_path)
    journal.append([entry(1)])
    write = os.pwrite

    def half(descriptor: int, data: bytes, place: int) -> int:
        if len(data) < 200:
            raise OSError("No space left on device")
        return write(descriptor, data[: len(data) // 2], place)

    size = journal.path.stat().st_size
    with monkeypatch.context() as broken:
        broken.setattr(os, "pwrite", half)
        with pytest.raises(OSError, match="No space"):
            journal.append([entry(number) for number in range(2, 20)])
    assert journal.path.stat().st_size == size
    journal.append([entry(20)])
    assert drained(journal) == [entry(1), entry(20)]
    journal.close()


def test_the_journal_is_for_its_owner_alone(tmp_path: Path) -> None:
    journal = Journal.create(tmp_path / "usage")
    assert journal.path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "usage").stat().st_mode & 0o777 == 0o700
    journal.close()
