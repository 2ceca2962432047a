"""What names mean, remembered for a moment, so that a request needs no database to find its
adapter."""

import hashlib
import time
from collections.abc import Callable

from msgspec import Struct

BELIEVED_S = 3.0
"""How long another process's change of a name may go unnoticed here; changes of this process are
noticed at once."""
NAMES_MAX = 10_000


class Version(Struct, frozen=True):
    """An adapter version as a request needs to know it."""

    name: str
    """Of the adapter."""
    digest: str
    base_digest: str
    base_model: str


class Meaning(Struct, frozen=True):
    """What a name in a request means: one version, or two that share the requests."""

    version: Version
    newer: Version | None = None
    """The one with the higher number."""
    newer_percent: int = 0
    """Of clients that get it."""
    salt: str = ""
    """Which alias this is: a client's place in one split says nothing of its place in another."""

    @property
    def versions(self) -> list[Version]:
        return [self.version] if self.newer is None else [self.version, self.newer]

    def version_for(self, client: str) -> Version:
        """The same for the same client while the split stays. The places of clients are fixed, and
        the newer version has those from 0 up: who has it keeps it when its share grows."""
        if self.newer is None:
            return self.version
        digest = hashlib.sha256(f"{self.salt}\0{client}".encode(errors="surrogatepass")).digest()
        place = int.from_bytes(digest[:8]) % 100
        return self.newer if place < self.newer_percent else self.version


class Names:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[tuple[str, str], tuple[Meaning, float]] = {}
        self.changes = 0
        """How often a name has changed in this process."""

    def get(self, tenant_id: str, name: str) -> Meaning | None:
        """None: ask the database."""
        meaning, until = self._known.get((tenant_id, name), (None, 0.0))
        return meaning if self._clock() < until else None

    def put(self, tenant_id: str, name: str, meaning: Meaning, changes: int) -> None:
        """Remember what the database said, asked when there had been `changes` changes: if a name
        has changed since, it may have been this one."""
        if changes != self.changes:
            return
        if len(self._known) >= NAMES_MAX:
            self._known.clear()
        self._known[tenant_id, name] = meaning, self._clock() + BELIEVED_S

    def changed(self, tenant_id: str) -> None:
        """A name of the tenant was placed or removed; call it once that is committed."""
        self.changes += 1
        self._known = {key: known for key, known in self._known.items() if key[0] != tenant_id}
