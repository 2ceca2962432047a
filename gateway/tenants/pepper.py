"""The secret under which API keys are hashed: from the settings, or made once and kept.

Whoever has the database alone can't test guesses against the hashes; they are random 256 bit keys,
so a slow password hash would add cost and no safety.
"""

import hashlib
import hmac
import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path

from gateway.settings import Secret, Settings, SettingsError

FILE = "pepper"
CHARACTERS_MIN = 32
BLOCK_BYTES = 64
"""Of SHA-256."""


class KeyHash:
    """HMAC-SHA256 of whole keys under the pepper (RFC 2104).

    From states that have read the pepper already: `hmac.digest` looks up its algorithm anew each
    time, and lets go of the interpreter's lock, which took as long as the rest of a request's
    authentication.
    """

    def __init__(self, pepper: Secret) -> None:
        if len(pepper.reveal()) < CHARACTERS_MIN:
            raise SettingsError(f"keys.pepper: needs at least {CHARACTERS_MIN} characters")
        secret = pepper.reveal().encode()
        if len(secret) > BLOCK_BYTES:
            secret = hashlib.sha256(secret).digest()
        secret = secret.ljust(BLOCK_BYTES, b"\0")
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in secret))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in secret))

    def of(self, key: str) -> bytes:
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(key.encode())
        outer.update(inner.digest())
        return outer.digest()

    def matches(self, key: str, expected: bytes) -> bool:
        """Takes the same time wherever the difference lies."""
        return hmac.compare_digest(self.of(key), expected)


def open_key_hash(settings: Settings) -> KeyHash:
    """The pepper of the settings, else the one in `data_dir`, which is made if it isn't there.

    Raises SettingsError.
    """
    if settings.keys.pepper:
        return KeyHash(settings.keys.pepper)
    path = settings.data_dir / FILE
    try:
        if not path.exists():
            _make(path)
        return KeyHash(Secret(path.read_text().strip()))
    except (OSError, SettingsError) as error:
        raise SettingsError(
            f"{path}: {error}. All API keys were hashed with what this file held: restore it, "
            "or set keys.pepper."
        ) from None


def _make(path: Path) -> None:
    """Whole or not at all, and the first of several processes wins."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=".pepper-")  # its mode is 0600
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.unlink(draft)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
