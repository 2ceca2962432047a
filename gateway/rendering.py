"""Every error as OpenAI's error object: ours, the framework's, the database's, and the unforeseen.

    {"error": {"message": …, "type": …, "param": …, "code": …}}

OpenAI's clients read these four and nothing else, so no error may leave in another shape.
"""

import logging
from typing import Any

from litestar import MediaType, Request, Response
from litestar.exceptions import HTTPException
from litestar.types import ExceptionHandlersMap

from gateway import errors
from gateway.connection import ClientGone
from gateway.db import is_lost, unavailable
from gateway.errors import ApiError
from gateway.telemetry import redact

log = logging.getLogger(__name__)

_BY_STATUS: dict[int, type[ApiError]] = {
    400: errors.InvalidRequest,
    401: errors.InvalidKey,
    403: errors.PermissionDenied,
    409: errors.Conflict,
    415: errors.UnsupportedMedia,
    429: errors.RateLimited,
    503: errors.Overloaded,
}

PATH_CHARS = 200
"""Of a path, in a message; a secret that stands across the end is cut too, since twice as many are
read."""

INTERNAL_MESSAGE = (
    "The server failed to answer this request. It is not the request's fault; the server's log "
    "has the details under the request id."
)


def render(request: Request[Any, Any, Any], error: Exception) -> Response[dict[str, object]]:
    """The one exception handler of the app."""
    known = _known(request, error)
    if known is None:
        log.error("unforeseen error in %s %s", request.method, route(request), exc_info=error)
        known = ApiError(INTERNAL_MESSAGE)
    elif known.status == 500 or isinstance(known, errors.DatabaseUnavailable):
        log.error("%s: %s", type(known).__name__, _cause(error))
    headers = known.headers()
    if isinstance(error, HTTPException):
        headers = (error.headers or {}) | headers
    return Response(
        known.body(), status_code=known.status, headers=headers, media_type=MediaType.JSON
    )


def route(request: Request[Any, Any, Any]) -> str:
    """The template, `/v1/adapters/{name}`: a client's own text has no end of values."""
    return str(request.scope.get("path_template", "unknown route"))


def _known(request: Request[Any, Any, Any], error: Exception) -> ApiError | None:
    if isinstance(error, ApiError):
        return error
    if is_lost(error):
        return unavailable()
    if isinstance(error, HTTPException):
        return _from_framework(request, error)
    if isinstance(error, RecursionError) and "deserializing" in str(error):
        return errors.InvalidRequest("The request body is nested too deeply.")
    return None


def _from_framework(request: Request[Any, Any, Any], error: HTTPException) -> ApiError | None:
    path = redact(request.scope["path"][: 2 * PATH_CHARS])[:PATH_CHARS]
    match error.status_code:
        case 404:
            return errors.NotFound(f"There is no {request.method} {path}. GET /docs lists the API.")
        case 405:
            allowed = (error.headers or {}).get("allow", "another method")
            return errors.MethodNotAllowed(f"{path} takes {allowed}, not {request.method}.")
        case 413:
            return errors.TooLarge("The request body is larger than this server reads.")
        case 500 if "disconnected" in error.detail:
            return ClientGone()
        case status if status in _BY_STATUS:
            return _BY_STATUS[status](_detail(error), param=_param(error))
        case status if 400 <= status < 500:
            known = errors.InvalidRequest(_detail(error))
            known.status = status
            return known
        case _:
            return None


def _detail(error: HTTPException) -> str:
    """What was wrong with which parameter. Litestar's own line would hold the whole URL."""
    faults = [fault for fault in error.extra or () if isinstance(fault, dict)]
    if not faults:
        return redact(error.detail)
    if any(fault.get("message") == "'data'" for fault in faults):
        return "The request has no body. Send JSON."
    return redact("; ".join(f"{_name(fault)}: {fault.get('message', '')}" for fault in faults))


def _param(error: HTTPException) -> str | None:
    faults = [fault for fault in error.extra or () if isinstance(fault, dict)]
    return _name(faults[0]) if faults else None


def _name(fault: dict[str, Any]) -> str:
    return str(fault.get("key", "request"))


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


exception_handlers: ExceptionHandlersMap = {Exception: render}
