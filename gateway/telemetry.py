"""Logs: one JSON object a line on stderr, each with the request it belongs to, none with a secret.

    {"time": …, "level": "info", "logger": "gateway.access", "message": "POST /v1/completions 200",
     "request_id": "req_…", "route": "/v1/completions", "status": 200, "ms": 41.2, "tenant": "acme"}

Pass fields as `log.info("…", extra={"fields": {…}})`.
"""

import logging
import re
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TextIO

import msgspec

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Id of the request that the running task serves; empty outside of one."""

# What must never be read by whoever reads logs. An API key is cut after the part that isn't secret.
_KEY_PREFIX = "lg_"
_KEY = re.compile(r"(lg_(?:[a-z0-9]{1,12}_)?(?:sk|admin)_(?:[0-9A-Za-z]{10}(?=_))?)[0-9A-Za-z_]+")
_WORD = re.compile(r"\S+")
_URL_USER = re.compile(r"\w://[^\s/:@]*:")

FIELD_CHARS_MAX = 2**15
"""Of each field of a line; a traceback is well below it."""

_QUIET = {
    "alembic": logging.WARNING,  # gateway.migrate says what was done
    "asyncio": logging.WARNING,
    "httpx": logging.WARNING,
    "uvicorn": logging.INFO,
}


def redact(text: str) -> str:
    """The text without API keys and without the passwords of URLs."""
    if _KEY_PREFIX in text:
        text = _KEY.sub(r"\1…", text)
    return _WORD.sub(_without_password, text) if "@" in text else text


def _without_password(word: re.Match[str]) -> str:
    """From the user's end to the last @, since a password may hold one. Not one regular expression:
    it would look for the @ from each user anew, a time quadratic in a stranger's text."""
    text = word[0]
    at = text.rfind("@")
    user = _URL_USER.search(text, 0, max(at, 0))
    return text if user is None or user.end() == at else f"{text[: user.end()]}…{text[at:]}"


def _field(text: str) -> str:
    """Fit for a line: short, without secrets, and UTF-8 even if half of a surrogate pair is in it.
    A secret that stands across the end is cut too, since more is read than shown."""
    shown = redact(text[: 2 * FIELD_CHARS_MAX])[:FIELD_CHARS_MAX]
    return shown.encode(errors="backslashreplace").decode()


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _field(record.getMessage()),
        }
        if current := request_id.get():
            line["request_id"] = current
        for name, value in getattr(record, "fields", {}).items():
            line[name] = value if isinstance(value, int | float | None) else _field(str(value))
        if record.exc_info:
            line["traceback"] = _field(self.formatException(record.exc_info))
        return msgspec.json.encode(line).decode()


def configure_logging(stream: TextIO | None = None, level: int = logging.INFO) -> None:
    """Send every logger of this process, uvicorn's too, through one handler to stderr."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name, quiet_level in _QUIET.items():
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.setLevel(max(level, quiet_level))
        logger.propagate = True
    logging.captureWarnings(True)
    # no line says where in the source or on which thread it was written; to find out takes longer
    # than to write it (docs.python.org/3/howto/logging.html#optimization)
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
