"""What every route of the admin API asks for: the operator, and the parts of a path."""

from datetime import UTC, datetime
from typing import Annotated

from litestar.di import Provide
from litestar.params import PathParameter, QueryParameter

from gateway.errors import InvalidRequest
from gateway.injection import Injected
from gateway.tenants.audit.trail import Actor
from gateway.tenants.keys import ADMIN, Principal

Slug = Annotated[str, PathParameter(description="The tenant's slug.")]
KeyId = Annotated[str, PathParameter(description="The key's id, or its public part.")]
PlanName = Annotated[str, PathParameter(description="The plan's name.")]
Limit = Annotated[int, QueryParameter(description="So many at most.", ge=1, le=100)]
After = Annotated[
    str | None,
    QueryParameter(
        description="The id of the last object of the page before.", pattern="^[0-9a-f-]{0,36}$"
    ),
]


def moment(unix: int | None, param: str) -> datetime | None:
    """Raises InvalidRequest for one that no calendar has."""
    try:
        return None if unix is None else datetime.fromtimestamp(unix, UTC)
    except (OverflowError, ValueError, OSError):
        raise InvalidRequest(f"`{param}` is Unix time in seconds.", param=param) from None


def _actor(principal: Injected[Principal], request_id: Injected[str]) -> Actor:
    principal.require(ADMIN)
    return Actor(f"key:{principal.public_id}", request_id)


actor = {"actor": Provide(_actor, sync_to_thread=False)}
"""Dependencies of the routes: whoever takes the `actor` has made sure that it is the operator."""
