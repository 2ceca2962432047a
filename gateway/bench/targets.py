"""What requests are sent to: the models of a server, each perhaps with a key and a body of its own.

A file of them is JSON Lines:

    {"model": "pirate"}
    {"model": "legal", "api_key": "lg_sk_…"}
    {"model": "base", "extra": {"lora": [{"id": 3, "scale": 1.0}]}}
"""

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

FIXED = ("model", "prompt", "messages", "max_tokens", "stream")
"""What a workload is made of, and no extra may replace."""


class TargetsError(Exception):
    """The message says what to change."""


class Target(Struct, frozen=True, forbid_unknown_fields=True):
    model: str
    extra: dict[str, Any] = {}
    """Merged into the body of each request."""
    api_key: str = ""
    """Empty: the common one."""


def read_targets(file: Path) -> list[Target]:
    """Raises TargetsError with the number of the line."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise TargetsError(f"{file} cannot be read: {error.strerror}.") from None
    targets = [
        _read(line, f"{file}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not targets:
        raise TargetsError(f"{file} has no models: one a line, as JSON.")
    return targets


def _read(line: bytes, where: str) -> Target:
    try:
        target = msgspec.json.decode(line, type=Target)
    except msgspec.MsgspecError as error:
        raise TargetsError(f"{where}: {error}.") from None
    if not target.model:
        raise TargetsError(f"{where}: the model has no name.")
    check_extra(target.extra, where)
    check_key(target.api_key, where)
    return target


def check_extra(extra: dict[str, Any], where: str) -> None:
    if fixed := [name for name in FIXED if name in extra]:
        raise TargetsError(f"{where}: {', '.join(fixed)} cannot be set by an extra.")


def check_key(key: str, where: str) -> None:
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise TargetsError(f"{where}: the API key has characters that no key has. Copy it again.")
