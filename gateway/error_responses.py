"""The errors of a route in the OpenAPI document."""

from litestar.openapi.datastructures import ResponseSpec
from msgspec import Struct


class ErrorDetail(Struct, frozen=True):
    message: str
    """What to change."""
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct, frozen=True):
    error: ErrorDetail


MEANINGS = {
    400: "The request cannot be used as it is.",
    401: "The API key is missing, unknown, revoked or expired.",
    403: "The API key may not do this.",
    404: "Not there.",
    409: "It contradicts what is there.",
    413: "The request body is too large.",
    429: "Too much at once, or more than there is room for.",
    503: "The database or the engine is away, or the server is stopping. Try again.",
}

ALWAYS = (400, 401, 403, 429, 503)
"""Of every route that needs a key."""


def documented(*statuses: int) -> dict[int, ResponseSpec]:
    """For `responses=` of a route: these, and those that every route has."""
    return {
        status: ResponseSpec(ErrorBody, description=MEANINGS[status], generate_examples=False)
        for status in sorted({*ALWAYS, *statuses})
    }
