"""What the walk of a request knows of limits: it reserves, asks how far it may go, and settles."""

from typing import Protocol

from msgspec import Struct

from gateway.tenants.keys import Principal
from gateway.tenants.usage.rates import Rates


class Demand(Struct, frozen=True):
    request_id: str
    """Ours, and unique."""
    principal: Principal
    prompt_tokens: int
    output_tokens_max: int
    price: Rates


class Used(Struct, frozen=True):
    """What a request came to."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    """Of the prompt."""
    refused: bool = False
    """By us, before any token: then it does not count as a request either."""


class Reservation(Protocol):
    headers: dict[str, str]
    """x-ratelimit-*; none for whom no rate is limited."""

    async def grant(self, produced: int) -> int:
        """How many tokens the answer may have so far, of which `produced` are there.

        Waits only if these are more than were granted. Raises LimiterUnavailable.
        """
        ...

    async def settle(self, used: Used) -> None:
        """The second time, nothing happens. Takes effect even if whoever awaits it is cancelled."""
        ...


class Limiter(Protocol):
    async def reserve(self, demand: Demand) -> Reservation:
        """Raises RateLimited, InsufficientQuota, LimiterUnavailable, DatabaseUnavailable."""
        ...


class Unbounded:
    """The reservation of whom nothing limits."""

    def __init__(self, output_tokens_max: int) -> None:
        self.headers: dict[str, str] = {}
        self._output_tokens_max = output_tokens_max

    async def grant(self, produced: int) -> int:
        return self._output_tokens_max

    async def settle(self, used: Used) -> None:
        pass
