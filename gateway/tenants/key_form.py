"""The text of an API key: made, and checked without a database.

    lg_sk_Ab3dE6gH9j_<43 characters, 256 random bits><6 characters, CRC32 of all before them>
       │  └ public id, by which it is looked up
       └ kind: `sk`, a tenant's, or `admin`, the operator's; before it, where the settings name
         one, the environment: `lg_test_sk_…`

The checksum is public arithmetic, no protection: it turns typos and junk away early, and lets a
scanner for leaked keys be sure of a find.
"""

import re
import secrets
import zlib
from typing import Literal

from msgspec import Struct

from gateway.settings import Secret

Kind = Literal["sk", "admin"]

ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
PUBLIC_CHARACTERS = 10
SECRET_BYTES = 32
SECRET_CHARACTERS = 43  # 62^43 > 2^256
CHECKSUM_CHARACTERS = 6  # 62^6 > 2^32

_FORM = re.compile(
    f"(lg_(?:[a-z0-9]{{1,12}}_)?(sk|admin)_([0-9A-Za-z]{{{PUBLIC_CHARACTERS}}})"
    f"_[0-9A-Za-z]{{{SECRET_CHARACTERS}}})"
    f"([0-9A-Za-z]{{{CHECKSUM_CHARACTERS}}})"
)


class NewKey(Struct, frozen=True):
    """A key just made; the only moment at which its text is there."""

    text: Secret
    prefix: str
    public_id: str
    last4: str


def make(kind: Kind = "sk", environment: str = "") -> NewKey:
    prefix = f"lg_{environment}_{kind}_" if environment else f"lg_{kind}_"
    public_id = "".join(secrets.choice(ALPHABET) for _ in range(PUBLIC_CHARACTERS))
    secret = _base62(int.from_bytes(secrets.token_bytes(SECRET_BYTES)), SECRET_CHARACTERS)
    body = f"{prefix}{public_id}_{secret}"
    text = body + checksum(body)
    return NewKey(text=Secret(text), prefix=prefix, public_id=public_id, last4=text[-4:])


def checksum(body: str) -> str:
    return _base62(zlib.crc32(body.encode()), CHECKSUM_CHARACTERS)


def public_id(text: str) -> str | None:
    """The public id of a key, or None where the text can't be a key: wrong form or checksum."""
    match = _match(text)
    return None if match is None else match[3]


def is_admin(text: str) -> bool:
    """Whether the text has the form of an admin key, checksum and all."""
    match = _match(text)
    return match is not None and match[2] == "admin"


def _match(text: str) -> re.Match[str] | None:
    match = _FORM.fullmatch(text)
    return match if match is not None and checksum(match[1]) == match[4] else None


def _base62(number: int, characters: int) -> str:
    digits = []
    for _ in range(characters):
        number, digit = divmod(number, len(ALPHABET))
        digits.append(ALPHABET[digit])
    return "".join(reversed(digits))
