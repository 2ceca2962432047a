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
_KEY = re.compile(r"(lg_sk_(?:[0-9A-Za-z]{10}(?=_))?)[0-9A-Za-z_]+")
_URL_PASSWORD = re.compile(r"(\w://[^\s/:@]*:)\S+(@)")

_QUIET = {
    "alembic": logging.WARNING,  # gateway.migrate says what was done
    "asyncio": logging.WARNING,
    "httpx": logging.WARNING,
    "uvicorn": logging.INFO,
}


def redact(text: str) -> str:
    """The text without API keys and without the passwords of URLs."""
    return _URL_PASSWORD.sub(r"\1…\2", _KEY.sub(r"\1…", text))


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": redact(record.getMessage()),
        }
        if current := request_id.get():
            line["request_id"] = current
        for name, value in getattr(record, "fields", {}).items():
            line[name] = value if isinstance(value, int | float | None) else redact(str(value))
        if record.exc_info:
            line["traceback"] = redact(self.formatException(record.exc_info))
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
