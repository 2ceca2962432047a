"""The failures of every route in the OpenAPI document, said once: whoever adds a route need not
think of them."""

from litestar import Litestar
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.datastructures import ResponseSpec
from litestar.routes import HTTPRoute
from msgspec import Struct

from gateway.health import PUBLIC


class ErrorObject(Struct, frozen=True):
    message: str
    """What to change."""
    type: str
    param: str | None
    """The parameter that is wrong, if one is."""
    code: str | None


class ErrorAnswer(Struct, frozen=True):
    """Every error has this shape."""

    error: ErrorObject


MEANINGS = {
    400: "The request is wrong; `param` says where.",
    401: "The API key is missing, wrong, revoked or expired.",
    403: "The key lacks the scope for this, or its tenant is suspended.",
    404: "There is no such thing, or it is another tenant's.",
    409: "It contradicts what is there already.",
    413: "The body is too large.",
    415: "The body has another media type than is read here.",
    422: "The adapter cannot be served.",
    429: "A limit or a budget is used up.",
    500: "The server failed; its log has the details.",
    503: "A part of the server is away or busy. Try again.",
}
ALWAYS = (500,)
WITH_A_KEY = (400, 401, 403, 429, 503)
ADMIN = "/v1/admin/"
"""Where queries name tenants, too."""
WITH_A_BODY = (404, 409, 413, 415, 422)
"""A body may name what is not there."""


def document_failures(app: Litestar) -> None:
    """Add to each route of the document what it may fail with. What a route says itself stays."""
    routes = [route for route in app.routes if isinstance(route, HTTPRoute)]
    for route in routes:
        for handler in route.route_handlers:
            if handler.resolve_include_in_schema():
                handler.responses = _failures(route, handler) | dict(handler.responses or {})


def _failures(route: HTTPRoute, handler: HTTPRouteHandler) -> dict[int, ResponseSpec]:
    statuses = set(ALWAYS)
    if handler.security != PUBLIC:
        statuses.update(WITH_A_KEY)
    if route.path_parameters or route.path.startswith(ADMIN):
        statuses.add(404)
    if handler.http_methods & {"POST", "PUT", "PATCH"}:
        statuses.update(WITH_A_BODY)
    if "DELETE" in handler.http_methods:
        statuses.add(409)
    return {status: _answer(status) for status in sorted(statuses)}


def _answer(status: int) -> ResponseSpec:
    return ResponseSpec(ErrorAnswer, description=MEANINGS[status], generate_examples=False)
