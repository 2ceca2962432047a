import io
import json
import logging
from collections.abc import Iterator

import pytest

from gateway import telemetry
from gateway.telemetry import redact
from gateway.tenants import key_form


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    written = io.StringIO()
    telemetry.configure_logging(written)
    yield written
    root.handlers[:], root.level = before
    logging.captureWarnings(False)


def only_line(written: io.StringIO) -> dict[str, object]:
    (line,) = written.getvalue().splitlines()
    entry: dict[str, object] = json.loads(line)
    return entry


def test_a_line_is_one_json_object(written: io.StringIO) -> None:
    logging.getLogger("x.y").warning('two\nlines, "%s" ü', "quoted", extra={"fields": {"ms": 1.5}})
    entry = only_line(written)
    assert entry.pop("time")
    assert entry == {
        "level": "warning",
        "logger": "x.y",
        "message": 'two\nlines, "quoted" ü',
        "ms": 1.5,
    }


def test_a_field_that_json_does_not_know_is_written_as_text(written: io.StringIO) -> None:
    logging.getLogger("x").info("x", extra={"fields": {"odd": object, "nested": {2: "3"}}})
    assert only_line(written)["odd"] == "<class 'object'>"


def test_the_request_id_of_the_running_task_is_added(written: io.StringIO) -> None:
    token = telemetry.request_id.set("req_1")
    logging.getLogger("x").info("inside")
    telemetry.request_id.reset(token)
    assert only_line(written)["request_id"] == "req_1"


def test_uvicorns_lines_come_through_the_same_handler(written: io.StringIO) -> None:
    logging.getLogger("uvicorn.error").info("from uvicorn")
    assert only_line(written)["logger"] == "uvicorn.error"


def test_f13_a_key_is_cut_wherever_it_stands(written: io.StringIO) -> None:
    made = key_form.make()
    key = made.text.reveal()
    try:
        raise ValueError(f"bad key {key}!")
    except ValueError:
        logging.getLogger("x").exception("with %s", key, extra={"fields": {"key": key}})
    text = written.getvalue()
    assert key[17:] not in text
    assert text.count(f"lg_sk_{made.public_id}…") == 3


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://u:secret@h/d", "postgresql://u:…@h/d"),
        (
            "at postgresql+asyncpg://u:s3c/\"r'3@t@h:5432/d, a@b",
            "at postgresql+asyncpg://u:…@h:5432/d, a@b",
        ),
        ("redis://:secret@h:6379/0 and redis://h/1", "redis://:…@h:6379/0 and redis://h/1"),
        ("http://h:80/a and a@b", "http://h:80/a and a@b"),
        ("lg_sk_", "lg_sk_"),
        ("lg_sk_short", "lg_sk_…"),
    ],
)
def test_f13_a_password_in_a_url_is_cut_and_nothing_else(
    text: str, shown: str, written: io.StringIO
) -> None:
    assert redact(text) == shown
    logging.getLogger("x").info(text)
    assert only_line(written)["message"] == shown
