"""Names, which end up in tables, logs and the audit trail."""

import re

from gateway.errors import InvalidRequest
from gateway.telemetry import redact

SLUG = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
"""Of tenants and plans: 1 to 63 lower-case letters, digits and inner hyphens."""
CHARACTERS_MAX = 200
MODEL_CHARACTERS_MAX = 255


def checked_name(name: str, whose: str) -> str:
    """Raises InvalidRequest for one that a table or a terminal would stumble over, or that gives a
    secret away."""
    if len(name) > CHARACTERS_MAX or not name.isprintable():
        raise InvalidRequest(
            f"{whose}'s name has at most {CHARACTERS_MAX} characters, all of them printable.",
            param="name",
        )
    if redact(name) != name:
        raise InvalidRequest("A name must not hold an API key or a password.", param="name")
    return name


def can_be_model(name: str) -> bool:
    """Whether an adapter or a base model could be called so, and no secret is given away."""
    fits = 1 <= len(name) <= MODEL_CHARACTERS_MAX and name.isprintable()
    return fits and redact(name) == name
