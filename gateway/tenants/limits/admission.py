"""One request between its admission and its end, whichever way it ends."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.errors import ApiError
from gateway.tenants.limits.limiter import Demand, Limiter, Reservation, Used


class Admission:
    """Counts what the engine produces, and says how much of it may go out."""

    def __init__(self, reservation: Reservation, prompt_tokens: int) -> None:
        self.headers = reservation.headers
        self.produced = 0
        """Tokens of the answer, without those that were not granted."""
        self._computed = self._cached = 0
        self._reservation = reservation
        self._prompt_tokens = prompt_tokens

    async def granted(self, ids: list[int]) -> list[int]:
        """Of new tokens those that may go out; fewer mean that the answer ends with them.

        Raises LimiterUnavailable.
        """
        produced = self.produced + len(ids)
        allowed = await self._reservation.grant(produced)
        if produced > allowed:
            ids = ids[: allowed - self.produced]
        self.produced += len(ids)
        return ids

    def computed(self, cached_tokens: int, output_tokens: int) -> None:
        """What the engine has told when the answer ends, however it does. That can be more than
        what was granted or waited for, and is what the ledger charges."""
        self._cached, self._computed = cached_tokens, output_tokens

    def used(self, error: BaseException | None) -> Used:
        """Of a request that ended with this error.

        One that failed before its first token used nothing, and if that was not its own fault, it
        does not count as a request. Of one whose client left, the prompt counts: it was computed,
        or about to be.
        """
        output = max(self.produced, self._computed)
        if isinstance(error, ApiError) and output == 0:
            return Used(0, 0, refused=error.status >= 500)
        return Used(self._prompt_tokens, output, self._cached)


@asynccontextmanager
async def admitted(limiter: Limiter, demand: Demand) -> AsyncIterator[Admission]:
    """Raises what `Limiter.reserve` raises. Settles on every way out."""
    reservation = await limiter.reserve(demand)
    admission = Admission(reservation, demand.prompt_tokens)
    used = None
    try:
        yield admission
    except BaseException as error:
        used = admission.used(error)
        raise
    finally:
        await reservation.settle(used or admission.used(None))
