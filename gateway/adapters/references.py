"""How a request says which version of an adapter it means.

    adapter               the alias `default` where there is one, else `latest`
    adapter@latest        what was uploaded last
    adapter@prod          what the tenant's alias `prod` means
    adapter@3, @v3        the version with this number
    adapter@0f3a9c81…     the version whose digest begins like this, 8 digits at least

An alias can have no name that could be read as a version.
"""

import re

from msgspec import Struct

from gateway.errors import InvalidRequest

LATEST = "latest"
"""Moves by itself, to what is uploaded."""
DEFAULT = "default"
"""Where the tenant has set it, what the adapter's name alone means."""

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
ALIAS = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")
NUMBER = re.compile(r"[vV]?([1-9][0-9]{0,6})")
PREFIX = re.compile(r"[0-9a-f]{8,64}")


class Reference(Struct, frozen=True):
    """`name_or_id`, and what stands behind its `@`: empty if there is none."""

    name_or_id: str
    label: str


def parse(model: str) -> Reference | None:
    """None for what can mean nothing."""
    name_or_id, at, label = model.partition("@")
    if not at:
        return Reference(model, "")
    return Reference(name_or_id, label) if is_version(label) or ALIAS.fullmatch(label) else None


def is_version(label: str) -> bool:
    """Whether it is a number or the beginning of a digest, and so no alias."""
    return number_in(label) is not None or PREFIX.fullmatch(label) is not None


def number_in(label: str) -> int | None:
    found = NUMBER.fullmatch(label)
    return None if found is None else int(found[1])


def check_alias(name: str) -> None:
    """Raises InvalidRequest for what cannot be an alias that a tenant sets."""
    if name == LATEST:
        raise InvalidRequest(
            "`latest` moves by itself: it always means what was uploaded last. Set another alias, "
            "or `default`, which is what the adapter's name alone means.",
            param="alias",
        )
    if ALIAS.fullmatch(name) is None or is_version(name):
        raise InvalidRequest(
            f"The alias {name[:100]!r} cannot be used. Use up to 64 letters, digits, '.', '_' and "
            "'-', beginning with a letter, and not the form of a version (`v3`) or a digest.",
            param="alias",
        )
