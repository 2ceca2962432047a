"""Guessing keys is slowed, source by source: so many wrong ones at once, then so many a second.

What counts is a key that is wrong, not one that is expired or lacks a scope: whoever has the secret
guesses nothing. The counts are this process's own, and right keys that it knows are never held up
(`gateway.tenants.auth`), so that a neighbour behind the same address can't lock anyone out.
"""

import logging
import time
from collections.abc import Callable
from ipaddress import IPv6Address, IPv6Network

from gateway.errors import RateLimited
from gateway.tenants.networks import Address

log = logging.getLogger(__name__)

AT_ONCE = 60
"""Wrong keys from one source before it has to wait."""
PER_S = 1.0
"""Then as many a second. A key has 256 random bits: this is for the database's sake and the log's,
not the key's."""
WAIT_S_MAX = 60.0
"""However many were under way at once when the source had used up its tries."""
SOURCES_MAX = 10_000
"""What is remembered at most; the source that failed longest ago is forgotten first."""
IPV6_BITS = 64
"""What one customer of a network has; the addresses below are his to choose."""


class Failures:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # source → (wrong keys that still count, when that was so)
        self._counted: dict[str, tuple[float, float]] = {}

    def check(self, address: Address | None) -> None:
        """Raises RateLimited where the source has to wait."""
        over = self._count(_source(address)) + 1 - AT_ONCE
        if over > 0:
            raise RateLimited(
                "Too many wrong API keys came from this address. Check the key that is sent, and "
                "try again later.",
                retry_after_s=over / PER_S,
            )

    def note(self, address: Address | None) -> None:
        source = _source(address)
        count = min(self._count(source) + 1, AT_ONCE - 1 + PER_S * WAIT_S_MAX)
        self._counted.pop(source, None)
        self._counted[source] = count, self._clock()
        if len(self._counted) > SOURCES_MAX:
            del self._counted[next(iter(self._counted))]
        if count > AT_ONCE - 1:
            log.warning("many wrong API keys", extra={"fields": {"source": source}})

    def _count(self, source: str) -> float:
        count, at = self._counted.get(source, (0.0, 0.0))
        return max(0.0, count - PER_S * (self._clock() - at))


def _source(address: Address | None) -> str:
    if isinstance(address, IPv6Address):
        return str(IPv6Network((address, IPV6_BITS), strict=False))
    return str(address)
