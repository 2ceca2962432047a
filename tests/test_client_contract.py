"""f17, f18, f19: what openai-python makes of each failure: what it raises, whether it tries again,
and how long it waits before."""

from collections.abc import Iterator
from typing import NamedTuple, get_args

import openai
import pytest
from litestar import get
from openai import OpenAI
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from gateway import errors
from gateway.engine.messages import FailureCode
from tests.fakes import Script
from tests.inference.conftest import BASE
from tests.live import Live, live

PATIENT = 3
"""Tries of openai-python: one, and two more."""


class Row(NamedTuple):
    error: BaseException
    status: int
    code: str | None
    raised: type[openai.APIStatusError]
    wait_s: float | None = None
    """Between its tries, as it was told; None: it tries only once."""


LOST = OperationalError("SELECT 1", None, ConnectionError())
ROWS = {
    "wrong": Row(errors.InvalidRequest("no", param="x"), 400, None, openai.BadRequestError),
    "key": Row(errors.InvalidKey("no"), 401, "invalid_api_key", openai.AuthenticationError),
    "scope": Row(
        errors.PermissionDenied("no"), 403, "permission_denied", openai.PermissionDeniedError
    ),
    "model": Row(errors.ModelNotFound("x"), 404, "model_not_found", openai.NotFoundError),
    "conflict": Row(errors.Conflict("no"), 409, "conflict", openai.ConflictError),
    "race": Row(
        errors.Conflict("no", retry_after_s=1.0), 409, "conflict", openai.ConflictError, 1.0
    ),
    "size": Row(errors.TooLarge("no"), 413, "request_too_large", openai.APIStatusError),
    "media type": Row(
        errors.UnsupportedMedia("no"), 415, "unsupported_media_type", openai.APIStatusError
    ),
    "adapter": Row(
        errors.InvalidAdapter("no"), 422, "invalid_adapter", openai.UnprocessableEntityError
    ),
    "rate": Row(
        # rounded up: a client that comes early is refused again
        errors.RateLimited("no", retry_after_s=3.2),
        429,
        "rate_limit_exceeded",
        openai.RateLimitError,
        4.0,
    ),
    "quota": Row(
        errors.RateLimited("no", code="insufficient_quota"),
        429,
        "insufficient_quota",
        openai.RateLimitError,
    ),
    "overload": Row(errors.Overloaded("no"), 503, "overloaded", openai.InternalServerError, 2.0),
    "engine": Row(
        errors.EngineUnavailable("no"), 503, "engine_unavailable", openai.InternalServerError, 2.0
    ),
    "database": Row(LOST, 503, "database_unavailable", openai.InternalServerError, 2.0),
    "pool": Row(
        PoolTimeout("waited"), 503, "database_unavailable", openai.InternalServerError, 2.0
    ),
}


class Failing:
    """What the route raises, and how often it was asked."""

    def __init__(self) -> None:
        self.error: BaseException = ZeroDivisionError("a detail")
        self.asked = 0


@pytest.fixture(scope="module")
def failing() -> Failing:
    return Failing()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, failing: Failing) -> Iterator[Live]:
    @get("/v1/models/failing", operation_id="failing")  # the client looks for a model of this name
    async def fail() -> None:
        failing.asked += 1
        raise failing.error

    with live(tmp_path_factory.mktemp("contract")) as running:
        running.app.register(fail)
        yield running


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the client would wait between tries."""
    waits: list[float] = []
    monkeypatch.setattr(
        OpenAI, "_sleep_for_retry", lambda self, **given: waits.append(_wait(self, **given))
    )
    return waits


def _wait(client: OpenAI, **given: object) -> float:
    response = given["response"]
    headers = None if response is None else response.headers  # type: ignore[attr-defined]  # untyped
    wait_s = client._parse_retry_after_header(headers)
    return 0.0 if wait_s is None else wait_s


@pytest.fixture
def client(running: Live, waits: list[float]) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{running.url}/v1", api_key=running.key()) as client:
        yield client


@pytest.mark.parametrize("name", ROWS)
def test_f17_f18_a_failure_is_raised_and_retried_as_its_row_says(
    name: str, client: OpenAI, failing: Failing, waits: list[float]
) -> None:
    row = ROWS[name]
    failing.error, failing.asked = row.error, 0
    with pytest.raises(row.raised) as raised:
        client.models.retrieve("failing")
    assert raised.value.status_code == row.status
    assert raised.value.code == row.code
    assert raised.value.request_id
    assert failing.asked == (1 if row.wait_s is None else PATIENT)
    assert waits == ([] if row.wait_s is None else [row.wait_s] * (PATIENT - 1))


def test_f17_what_nobody_foresaw_says_nothing_of_itself(client: OpenAI, failing: Failing) -> None:
    failing.error = ZeroDivisionError("a detail")
    with pytest.raises(openai.InternalServerError) as raised:
        client.models.retrieve("failing")
    assert raised.value.code == "server_error"
    assert "detail" not in str(raised.value.body).replace("has the details", "")


ENGINE: dict[FailureCode, tuple[int, str]] = {
    "prompt_too_long": (400, "context_length_exceeded"),
    "adapter_failed": (422, "invalid_adapter"),
    "not_finite": (422, "invalid_adapter"),
    "overloaded": (503, "overloaded"),
    "late": (503, "overloaded"),
    "engine_lost": (503, "engine_unavailable"),
    "internal": (500, "server_error"),
}


def test_f17_every_failure_of_the_engine_has_a_row() -> None:
    assert set(ENGINE) == set(get_args(FailureCode))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("code", ENGINE)
def test_f19_a_failure_before_the_first_token_has_its_status_streamed_or_not(
    code: FailureCode, stream: bool, client: OpenAI, running: Live
) -> None:
    running.engine.script = lambda _: Script(failure=(code, "detail"))
    with pytest.raises(openai.APIStatusError) as raised:
        client.with_options(max_retries=0).chat.completions.create(
            model=BASE, messages=[{"role": "user", "content": "hi"}], stream=stream
        )
    assert (raised.value.status_code, raised.value.code) == ENGINE[code]


@pytest.mark.parametrize("code", ENGINE)
def test_f19_a_failure_after_the_first_token_ends_the_stream_with_an_error(
    code: FailureCode, client: OpenAI, running: Live
) -> None:
    running.engine.script = lambda _: Script([[65]], failure=(code, "detail"))
    chunks = client.chat.completions.create(
        model=BASE, messages=[{"role": "user", "content": "hi"}], stream=True
    )
    seen: list[str] = []
    with pytest.raises(openai.APIError) as raised:
        seen.extend(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert "".join(seen) == "A"
    assert raised.value.code == ENGINE[code][1]  # a string: an integer breaks other SDKs
