import io
import json
import logging
import time
from collections.abc import Iterator

import pytest

from gateway import telemetry
from gateway.telemetry import FIELD_CHARS_MAX, redact
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


@pytest.mark.parametrize("text", ["a://x:" * 10_000, "a://" * 16_000, "lg_sk_" * 10_000])
def test_a_text_made_to_be_slow_is_redacted_in_no_time(text: str) -> None:
    began = time.perf_counter()
    redact(text)
    redact(text + "@")
    assert time.perf_counter() - began < 0.2


def test_f13_a_password_of_any_length_is_cut() -> None:
    assert redact(f"at postgresql://u:{'s3c' * 5000}@h/d") == "at postgresql://u:…@h/d"
    assert redact("x://u:@h") == "x://u:@h"


def test_a_field_has_a_greatest_length_and_no_secret_at_its_end(written: io.StringIO) -> None:
    long = "x" * (FIELD_CHARS_MAX - 20) + " postgresql://u:" + "s3cret" * 100 + "@h"
    logging.getLogger("x").info(long, extra={"fields": {"odd": long}})
    entry = only_line(written)
    for name in ("message", "odd"):
        assert len(str(entry[name])) <= FIELD_CHARS_MAX
        assert "s3c" not in str(entry[name])


def test_half_of_a_surrogate_pair_is_escaped_and_the_line_still_redacted(
    written: io.StringIO, capfd: pytest.CaptureFixture[str]
) -> None:
    key = key_form.make().text.reveal()
    try:
        raise ValueError(f"\ud800 {key}")
    except ValueError:
        fields = {"half": f"\udfff {key}"}
        logging.getLogger("x").exception("\ud800 %s", key, extra={"fields": fields})
    entry = only_line(written)
    assert str(entry["message"]).startswith("\\ud800 lg_sk_")
    assert str(entry["half"]).startswith("\\udfff lg_sk_")
    assert key[17:] not in written.getvalue() + "".join(capfd.readouterr())
