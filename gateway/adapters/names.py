"""What names mean, remembered for a moment, so that a request needs no database to find its
adapter."""

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


class Names:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._known: dict[tuple[str, str], tuple[Version, float]] = {}
        self.changes = 0
        """How often a name has changed in this process."""

    def get(self, tenant_id: str, name: str) -> Version | None:
        """None: ask the database."""
        version, until = self._known.get((tenant_id, name), (None, 0.0))
        return version if self._clock() < until else None

    def put(self, tenant_id: str, name: str, version: Version, changes: int) -> None:
        """Remember what the database said, asked when there had been `changes` changes: if a name
        has changed since, it may have been this one."""
        if changes != self.changes:
            return
        if len(self._known) >= NAMES_MAX:
            self._known.clear()
        self._known[tenant_id, name] = version, self._clock() + BELIEVED_S

    def changed(self, tenant_id: str) -> None:
        """A name of the tenant was placed or removed; call it once that is committed."""
        self.changes += 1
        self._known = {key: known for key, known in self._known.items() if key[0] != tenant_id}
