"""The error tree. Each error knows its HTTP status and OpenAI's `type` and `code`.

Raise one of these anywhere on the HTTP side; `gateway.rendering` turns it into OpenAI's error
object. The message tells the reader what to change, and never holds a secret or another tenant's
name; a key that a client wrote in the wrong place is cut when its text is quoted (f13). This module
imports next to nothing, so that the shell and the file checks can use it too.
"""

import math
from collections.abc import Mapping

from gateway.telemetry import redact


class ApiError(Exception):
    status = 500
    type = "server_error"
    code: str | None = "server_error"
    retry_after_s: float | None = None
    """When to try again; None: only a change of the request would help."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s

    def headers(self) -> dict[str, str]:
        """Retry advice. OpenAI's clients retry 408, 409, 429 and 5xx unless told not to."""
        if self.retry_after_s is not None:
            # rounded up: who comes early is refused again
            return {"retry-after": str(max(1, math.ceil(self.retry_after_s)))}
        return {"x-should-retry": "false"} if self.status in (408, 409, 429) else {}

    def body(self) -> dict[str, object]:
        return {
            "error": {
                "message": _shown(self.message),
                "type": self.type,
                "param": None if self.param is None else _shown(self.param),
                "code": self.code,
            }
        }


def _shown(text: str) -> str:
    """Without secrets. JSON can write half of a surrogate pair, which a message may quote; UTF-8
    cannot."""
    return redact(text).encode(errors="backslashreplace").decode()


class InvalidRequest(ApiError):
    status, type, code = 400, "invalid_request_error", None


class InvalidKey(ApiError):
    status, type, code = 401, "invalid_request_error", "invalid_api_key"

    def headers(self) -> dict[str, str]:
        return {"www-authenticate": "Bearer"}


class PermissionDenied(ApiError):
    status, type, code = 403, "permission_error", "permission_denied"


class NotFound(ApiError):
    status, type, code = 404, "invalid_request_error", "not_found"


class ModelNotFound(NotFound):
    """Also what another tenant's adapter looks like from here."""

    code = "model_not_found"

    def __init__(self, model: str) -> None:
        super().__init__(
            f"The model {model[:200]!r} does not exist or you do not have access to it. "
            "GET /v1/models lists what this key can use.",
            param="model",
        )


class MethodNotAllowed(ApiError):
    status, type, code = 405, "invalid_request_error", "method_not_allowed"


class Conflict(ApiError):
    status, type, code = 409, "invalid_request_error", "conflict"


class TooLarge(ApiError):
    status, type, code = 413, "invalid_request_error", "request_too_large"


class UnsupportedMedia(ApiError):
    status, type, code = 415, "invalid_request_error", "unsupported_media_type"


class InvalidAdapter(ApiError):
    """The upload was read, and this adapter cannot be served as PEFT would serve it."""

    status, type, code = 422, "invalid_request_error", "invalid_adapter"


class RateLimited(ApiError):
    status, type, code = 429, "rate_limit_error", "rate_limit_exceeded"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        limits: Mapping[str, str] | None = None,
    ) -> None:
        """`limits`: the headers x-ratelimit-*."""
        super().__init__(message, param=param, code=code, retry_after_s=retry_after_s)
        self.limits = limits or {}

    def headers(self) -> dict[str, str]:
        return {**super().headers(), **self.limits}


class InsufficientQuota(RateLimited):
    """A budget is spent: waiting does not help, whoever pays must act."""

    type, code = "insufficient_quota", "insufficient_quota"


class Overloaded(ApiError):
    status, type, code = 503, "overloaded_error", "overloaded"
    retry_after_s = 2.0


class EngineUnavailable(ApiError):
    status, type, code = 503, "overloaded_error", "engine_unavailable"
    retry_after_s = 2.0


class LimiterUnavailable(ApiError):
    """Requests that cannot be counted are not served."""

    status, type, code = 503, "overloaded_error", "limiter_unavailable"
    retry_after_s = 2.0


class DatabaseUnavailable(ApiError):
    status, type, code = 503, "overloaded_error", "database_unavailable"
    retry_after_s = 2.0
