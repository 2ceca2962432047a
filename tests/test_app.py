"""What holds for every route: access, error shape, ids, limits, logs, probes, stopping."""

import asyncio
import io
import json
import logging
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from litestar import Litestar, Request, get, post
from litestar.exceptions import (
    ClientException,
    HTTPException,
    ImproperlyConfiguredException,
    NotAuthorizedException,
    PermissionDeniedException,
    TooManyRequestsException,
    ValidationException,
)
from litestar.params import FromPath, FromQuery, JSONBody
from sqlalchemy.exc import OperationalError

from gateway import errors, telemetry
from gateway.app import create_app
from gateway.db import now
from gateway.injection import Injected
from gateway.settings import Server, Settings
from gateway.tenants import key_form
from gateway.tenants.announcements import ALONE_S
from gateway.tenants.keys import Principal
from tests.databases import PASSWORD, Postgres, stopped
from tests.fakes import FakeEngine
from tests.serving import bearer, client_of, issue_key, settings_for, started

RAISED: dict[str, BaseException] = {}


@get("/probe/raise/{name:str}")
async def raise_it(name: FromPath[str]) -> None:
    raise RAISED[name]


@get("/probe/principal")
async def who(principal: Injected[Principal], request_id: Injected[str]) -> dict[str, str]:
    logging.getLogger("probe").info("handling")
    return {"tenant": principal.tenant_slug, "request_id": request_id}


@get("/probe/number")
async def number(value: FromQuery[int]) -> int:
    return value


@post("/probe/body")
async def body_size(request: Request[Any, Any, Any]) -> int:
    return len(await request.body())


@post("/probe/data")
async def typed(data: JSONBody[dict[str, int]]) -> dict[str, int]:
    return data


@post("/probe/upload", request_max_body_size=2**20)
async def upload(request: Request[Any, Any, Any]) -> int:
    return len(await request.body())


PROBES = [raise_it, who, number, body_size, typed, upload]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    plain = settings_for(tmp_path / "data")
    return msgspec.structs.replace(plain, server=Server(body_bytes_max=10_000))


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def app(settings: Settings, engine: FakeEngine) -> Litestar:
    app = create_app(settings, engine)
    for probe in PROBES:
        app.register(probe)
    return app


@pytest.fixture
async def client(app: Litestar) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(app) as client:
        yield client


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """All that is logged, as it would reach stderr."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    written = io.StringIO()
    telemetry.configure_logging(written, logging.DEBUG)
    yield written
    root.handlers[:], root.level = before
    logging.captureWarnings(False)


def entries(lines: io.StringIO, logger: str) -> list[dict[str, Any]]:
    found = (json.loads(line) for line in lines.getvalue().splitlines())
    return [entry for entry in found if entry["logger"] == logger]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object; asserts that it is OpenAI's."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert body["error"]["message"]
    assert isinstance(body["error"]["type"], str)
    assert isinstance(body["error"]["code"], str | None)  # f19: an integer breaks SDKs
    assert response.headers["x-request-id"]
    found: dict[str, Any] = body["error"]
    return found


# --- access ---------------------------------------------------------------------------------------


async def test_a_good_key_is_let_in(client: httpx.AsyncClient, settings: Settings) -> None:
    issued = await issue_key(settings)
    response = await client.get("/probe/principal", headers=bearer(issued))
    assert response.status_code == 200
    assert response.json()["tenant"] == "acme"


@pytest.mark.parametrize(
    "header", [None, "Basic dTpw", "Bearer", "Bearer sk-nonsense", "Bearer {unknown}"]
)
async def test_no_other_header_is_let_in(header: str | None, client: httpx.AsyncClient) -> None:
    unknown = key_form.make().text.reveal()
    headers = {"authorization": header.format(unknown=unknown)} if header else {}
    for path in ("/probe/principal", "/v1/models", "/v1/adapters"):
        response = await client.get(path, headers=headers)
        assert error_of(response, 401)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
        assert unknown not in response.text


async def test_a_key_elsewhere_than_in_the_header_is_ignored_and_not_logged(
    client: httpx.AsyncClient, settings: Settings, lines: io.StringIO
) -> None:
    key = (await issue_key(settings)).text.reveal()
    for response in [
        await client.get("/v1/models", params={"api_key": key, "key": key, "authorization": key}),
        await client.get("/v1/models", headers={"x-api-key": key, "cookie": f"key={key}"}),
        await client.get("/v1/models", auth=("user", key)),
    ]:
        error_of(response, 401)
        assert key not in response.text
    assert key not in lines.getvalue()


async def test_f15_a_revoked_key_is_refused_within_a_second(
    client: httpx.AsyncClient, settings: Settings
) -> None:
    from sqlalchemy import update

    from gateway.db import Database, async_url
    from gateway.tenants.tables import ApiKey

    issued = await issue_key(settings)
    assert (await client.get("/v1/models", headers=bearer(issued))).status_code == 200
    database = Database(async_url("", settings.data_dir))
    async with database.session() as session:
        await session.execute(update(ApiKey).values(revoked_at=now()))
    await database.close()
    await asyncio.sleep(ALONE_S)
    assert ALONE_S <= 1
    assert (
        "revoked"
        in error_of(await client.get("/v1/models", headers=bearer(issued)), 401)["message"]
    )


async def test_the_probes_of_health_need_no_key(client: httpx.AsyncClient) -> None:
    assert (await client.get("/health/live")).json() == {"status": "live"}
    assert (await client.get("/health/ready")).status_code == 200


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (errors.InvalidRequest("x"), 400, "invalid_request_error", None),
        (errors.InvalidKey("x"), 401, "invalid_request_error", "invalid_api_key"),
        (errors.PermissionDenied("x"), 403, "permission_error", "permission_denied"),
        (errors.ModelNotFound("x"), 404, "invalid_request_error", "model_not_found"),
        (errors.Conflict("x"), 409, "invalid_request_error", "conflict"),
        (errors.TooLarge("x"), 413, "invalid_request_error", "request_too_large"),
        (errors.UnsupportedMedia("x"), 415, "invalid_request_error", "unsupported_media_type"),
        (errors.InvalidAdapter("x"), 422, "invalid_request_error", "invalid_adapter"),
        (errors.RateLimited("x"), 429, "rate_limit_error", "rate_limit_exceeded"),
        (errors.Overloaded("x"), 503, "overloaded_error", "overloaded"),
        (errors.EngineUnavailable("x"), 503, "overloaded_error", "engine_unavailable"),
        (errors.DatabaseUnavailable("x"), 503, "overloaded_error", "database_unavailable"),
        (ClientException("x"), 400, "invalid_request_error", None),
        (ValidationException("x"), 400, "invalid_request_error", None),
        (NotAuthorizedException("x"), 401, "invalid_request_error", "invalid_api_key"),
        (PermissionDeniedException("x"), 403, "permission_error", "permission_denied"),
        (HTTPException("x", status_code=409), 409, "invalid_request_error", "conflict"),
        (
            HTTPException("x", status_code=415),
            415,
            "invalid_request_error",
            "unsupported_media_type",
        ),
        (HTTPException("x", status_code=418), 418, "invalid_request_error", None),
        (TooManyRequestsException("x"), 429, "rate_limit_error", "rate_limit_exceeded"),
        (HTTPException("x", status_code=503), 503, "overloaded_error", "overloaded"),
        (ImproperlyConfiguredException("x"), 500, "server_error", "server_error"),
        (
            OperationalError("SELECT", None, Exception("x")),
            503,
            "overloaded_error",
            "database_unavailable",
        ),
        (ConnectionResetError("x"), 503, "overloaded_error", "database_unavailable"),
        (RuntimeError("x"), 500, "server_error", "server_error"),
        (KeyError("x"), 500, "server_error", "server_error"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
async def test_f17_every_error_has_one_shape_its_status_and_its_code(
    error: Exception,
    status: int,
    kind: str,
    code: str | None,
    client: httpx.AsyncClient,
) -> None:
    RAISED["it"] = error
    response = await client.get("/probe/raise/it")
    shown = error_of(response, status)
    assert (shown["type"], shown["code"]) == (kind, code)
    retry = response.headers.get("retry-after"), response.headers.get("x-should-retry")
    if status == 503:
        assert retry == ("2", None)
    elif status in (409, 429):
        assert retry == (None, "false")  # f18: no wait would help
    else:
        assert retry == (None, None)


async def test_f18_a_wait_that_helps_is_named(client: httpx.AsyncClient) -> None:
    RAISED["it"] = errors.RateLimited("Too fast.", retry_after_s=12.3)
    response = await client.get("/probe/raise/it")
    error_of(response, 429)
    assert response.headers["retry-after"] == "13"  # rounded up
    assert "x-should-retry" not in response.headers


async def test_an_unforeseen_error_tells_the_log_and_not_the_client(
    client: httpx.AsyncClient, lines: io.StringIO
) -> None:
    RAISED["it"] = RuntimeError("the inner workings")
    response = await client.get("/probe/raise/it", headers={"x-request-id": "mine"})
    error_of(response, 500)
    assert "inner" not in response.text
    (entry,) = entries(lines, "gateway.rendering")
    assert "the inner workings" in entry["traceback"]
    assert entry["request_id"] == "mine"
    assert entry["level"] == "error"


class Unshowable(errors.InvalidRequest):
    def body(self) -> dict[str, object]:
        raise RuntimeError("the inner workings")


@pytest.mark.parametrize("error", [Unshowable("x"), asyncio.CancelledError()])
async def test_an_error_that_leaves_the_inner_app_has_the_one_shape_too(
    error: BaseException, client: httpx.AsyncClient, lines: io.StringIO
) -> None:
    RAISED["it"] = error
    response = await client.get("/probe/raise/it", headers={"x-request-id": "mine"})
    assert error_of(response, 500)["code"] == "server_error"
    assert response.headers.get_list("x-request-id") == ["mine"]
    assert "inner" not in response.text
    (entry,) = entries(lines, "gateway.boundary")
    assert (entry["level"], entry["request_id"]) == ("error", "mine")
    assert type(error).__name__ in entry["traceback"] or "inner workings" in entry["traceback"]
    (access,) = entries(lines, "gateway.access")
    assert access["status"] == 500


async def test_a_request_that_somebody_cancelled_is_not_answered(
    app: Litestar, client: httpx.AsyncClient, lines: io.StringIO
) -> None:
    entered = asyncio.Event()

    @get("/probe/slow")
    async def slow() -> None:
        entered.set()
        await asyncio.Event().wait()

    app.register(slow)
    running = asyncio.create_task(client.get("/probe/slow"))
    await entered.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert entries(lines, "gateway.boundary") == []


async def test_half_of_a_surrogate_pair_in_a_message_is_escaped(
    client: httpx.AsyncClient,
) -> None:
    RAISED["it"] = errors.InvalidRequest("bad \ud800", param="\udfff")
    shown = error_of(await client.get("/probe/raise/it"), 400)
    assert (shown["message"], shown["param"]) == ("bad \\ud800", "\\udfff")


async def test_a_path_made_to_be_slow_is_refused_in_no_time(client: httpx.AsyncClient) -> None:
    began = time.perf_counter()
    message = error_of(await client.get("/" + "a://x:" * 10_000), 404)["message"]
    assert time.perf_counter() - began < 1
    assert len(message) < 300


async def test_a_route_that_is_not_there_is_404(client: httpx.AsyncClient) -> None:
    for path in (
        "/",
        "/v2/models",
        "/v1/models/../x",
        "/docs/x",
        "/docs/x.json",
        "/probe/%00",
        "//",
    ):
        response = await client.get(path)
        assert error_of(response, 404)["code"] in ("not_found", "model_not_found")


async def test_a_method_that_is_not_there_is_405_and_says_which_are(
    client: httpx.AsyncClient,
) -> None:
    response = await client.delete("/v1/chat/completions")
    shown = error_of(response, 405)
    assert shown["code"] == "method_not_allowed"
    assert "POST" in shown["message"]
    assert "POST" in response.headers["allow"]


async def test_a_parameter_that_cannot_be_read_is_named(client: httpx.AsyncClient) -> None:
    key = key_form.make().text.reveal()
    shown = error_of(await client.get("/probe/number", params={"value": "x", "key": key}), 400)
    assert shown["param"] == "value"
    assert "int" in shown["message"]
    assert key not in shown["message"]
    assert error_of(await client.get("/probe/number"), 400)["message"]


@pytest.mark.parametrize("body", [b"{", b"\xff\xfe", b"[1]", b"", b'{"a": "b"}', b"[" * 9000])
async def test_a_body_that_cannot_be_read_is_400(body: bytes, client: httpx.AsyncClient) -> None:
    headers = {"content-type": "application/json"}
    error_of(await client.post("/probe/data", content=body, headers=headers), 400)


async def test_a_client_gets_the_shape_that_openais_package_reads(
    client: httpx.AsyncClient,
) -> None:
    openai = pytest.importorskip("openai")
    response = await client.get("/v1/models")
    error = openai.AuthenticationError("", response=response, body=response.json()["error"])
    assert (error.code, error.type) == ("invalid_api_key", "invalid_request_error")
    assert error.request_id == response.headers["x-request-id"]


# --- sizes ----------------------------------------------------------------------------------------


async def test_a_body_up_to_the_limit_is_read_and_a_longer_one_is_413(
    client: httpx.AsyncClient,
) -> None:
    assert (await client.post("/probe/body", content=b"x" * 10_000)).text == "10000"
    for path in ("/probe/body", "/probe/data"):
        response = await client.post(path, content=b"x" * 10_001)
        assert error_of(response, 413)["code"] == "request_too_large"


async def test_an_upload_has_its_own_limit(client: httpx.AsyncClient) -> None:
    assert (await client.post("/probe/upload", content=b"x" * 2**20)).text == str(2**20)
    error_of(await client.post("/probe/upload", content=b"x" * (2**20 + 1)), 413)


@pytest.mark.parametrize("path", ["/probe/body", "/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("announced", [True, False], ids=["content-length", "chunked"])
async def test_f39_a_long_body_is_refused_before_it_is_all_read(
    path: str, announced: bool, client: httpx.AsyncClient, settings: Settings
) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 10 * 2**20:
            sent += 1000
            yield b" " * 1000

    headers = bearer(await issue_key(settings)) | {"content-type": "application/json"}
    if announced:
        headers["content-length"] = str(10 * 2**20)
    error_of(await client.post(path, content=endless(), headers=headers), 413)
    assert sent <= (1000 if announced else 12_000)


# --- ids and logs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sane", ["a", "req-1.2_3", "x" * 128])
async def test_a_sane_request_id_is_kept(sane: str, client: httpx.AsyncClient) -> None:
    for path in ("/health/live", "/nope", "/v1/models"):
        response = await client.get(path, headers={"x-request-id": sane})
        assert response.headers.get_list("x-request-id") == [sane]


@pytest.mark.parametrize("strange", ["", " ", "x" * 129, "a b", "a/b", "ä", "{key}", "a\tb"])
async def test_a_strange_request_id_is_replaced(strange: str, client: httpx.AsyncClient) -> None:
    given = strange.format(key=key_form.make().text.reveal()).encode()
    response = await client.get("/nope", headers={b"x-request-id": given})
    (used,) = response.headers.get_list("x-request-id")
    assert used.startswith("req_")
    assert len(used) == 4 + 32


async def test_every_line_of_a_request_has_its_id(
    client: httpx.AsyncClient, settings: Settings, lines: io.StringIO
) -> None:
    issued = await issue_key(settings)
    ids = [f"request-{number}" for number in range(5)]
    answers = await asyncio.gather(
        *(
            client.get("/probe/principal", headers=bearer(issued) | {"x-request-id": one})
            for one in ids
        )
    )
    assert [answer.json()["request_id"] for answer in answers] == ids
    assert sorted(entry["request_id"] for entry in entries(lines, "probe")) == ids
    assert "request_id" not in json.loads(lines.getvalue().splitlines()[0])


async def test_the_access_log_has_a_line_for_each_request(
    client: httpx.AsyncClient, settings: Settings, lines: io.StringIO
) -> None:
    issued = await issue_key(settings)
    await client.get("/probe/principal", headers=bearer(issued))
    await client.get("/v1/models", headers={"x-request-id": "second"})
    one, two = entries(lines, "gateway.access")
    assert (one["method"], one["route"], one["status"], one["tenant"]) == (
        "GET",
        "/probe/principal",
        200,
        "acme",
    )
    assert (two["status"], two["tenant"], two["request_id"]) == (401, None, "second")
    assert one["ms"] > 0


async def test_f34_the_access_log_has_the_route_and_not_the_path(
    client: httpx.AsyncClient, lines: io.StringIO
) -> None:
    await client.get("/v1/adapters/some-name?x=1")
    await client.get("/some/other/path")
    routes = [entry["route"] for entry in entries(lines, "gateway.access")]
    assert routes[0].startswith("/v1/adapters/{")
    assert routes[1] == "unknown route"
    assert "some" not in lines.getvalue()


async def test_probes_of_health_do_not_fill_the_log(
    client: httpx.AsyncClient, lines: io.StringIO
) -> None:
    await client.get("/health/live")
    assert {entry["level"] for entry in entries(lines, "gateway.access")} == {"debug"}


async def test_f13_no_key_and_no_password_is_in_logs_or_answers(
    migrated_postgres_url: str,
    postgres_server: Postgres,
    tmp_path: Path,
    engine: FakeEngine,
    lines: io.StringIO,
    capfd: pytest.CaptureFixture[str],
) -> None:
    settings = settings_for(tmp_path, migrated_postgres_url)
    app = create_app(settings, engine)
    for probe in PROBES:
        app.register(probe)
    planted = [PASSWORD]
    shown = [repr(settings), repr(app.state)]
    async with client_of(app) as client:
        for _ in range(3):
            issued = await issue_key(settings)
            planted.append(issued.text.reveal()[17:])
            shown += [repr(issued), repr(issued.row)]
            headers = bearer(issued)
            logging.getLogger("probe").error("careless: %s", headers)
            RAISED["it"] = RuntimeError(f"careless: {headers} {migrated_postgres_url}")
            requests = [
                client.get("/v1/models", headers=headers),
                client.get("/probe/raise/it", headers=headers),
                client.get(f"/v1/{issued.text.reveal()}", headers=headers),
                client.get("/v1/models", params=headers),
                client.get("/v1/models", headers={"authorization": headers["authorization"] + "x"}),
            ]
            for response in await asyncio.gather(*requests):
                shown += [response.text, str(response.headers)]
        with stopped(postgres_server):
            unknown = key_form.make().text.reveal()
            planted.append(unknown[17:])
            response = await client.get(
                "/v1/models", headers={"authorization": f"Bearer {unknown}"}
            )
            error_of(response, 503)
            shown.append(response.text)
    shown += [lines.getvalue(), *capfd.readouterr()]
    assert "careless" in lines.getvalue()
    for secret in planted:
        assert not [text for text in shown if secret in text]


# --- the database ---------------------------------------------------------------------------------


async def test_f16_f26_a_database_that_goes_away_is_503_and_comes_back_by_itself(
    migrated_postgres_url: str, postgres_server: Postgres, tmp_path: Path, engine: FakeEngine
) -> None:
    settings = settings_for(tmp_path, migrated_postgres_url)
    async with client_of(create_app(settings, engine)) as client:
        issued = await issue_key(settings)
        unknown = {"authorization": f"Bearer {key_form.make().text.reveal()}"}
        assert (await client.get("/v1/models", headers=bearer(issued))).status_code == 200
        with stopped(postgres_server):
            for headers in (bearer(issued), unknown):
                response = await client.get("/v1/models", headers=headers)
                assert error_of(response, 503)["code"] == "database_unavailable"
                assert response.headers["retry-after"] == "2"
            error_of(await client.get("/v1/models"), 401)  # needs no database to be known
            ready = await client.get("/health/ready")
            assert ready.status_code == 503
            assert ready.json() == {
                "engine": "ready",
                "database": "unreachable",
                "server": "ready",
            }
            assert (await client.get("/health/live")).status_code == 200
        assert (await client.get("/v1/models", headers=bearer(issued))).status_code == 200
        error_of(await client.get("/v1/models", headers=unknown), 401)
        assert (await client.get("/health/ready")).status_code == 200


# --- health, stopping, documentation --------------------------------------------------------------


async def test_f24_ready_means_that_the_model_is_loaded_and_live_does_not(
    client: httpx.AsyncClient, engine: FakeEngine
) -> None:
    engine.set_ready(False)
    response = await client.get("/health/ready")
    assert response.status_code == 503
    assert response.json()["engine"] == "loading"
    assert response.headers["retry-after"] == "2"
    assert (await client.get("/health/live")).status_code == 200
    engine.set_ready(True)
    assert (await client.get("/health/ready")).status_code == 200


async def test_f23_while_draining_new_requests_are_sent_elsewhere_and_running_ones_end_well(
    app: Litestar, client: httpx.AsyncClient
) -> None:
    entered, leave = asyncio.Event(), asyncio.Event()

    @get("/probe/slow")
    async def slow() -> str:
        entered.set()
        await leave.wait()
        return "done"

    app.register(slow)
    running = asyncio.create_task(client.get("/probe/slow"))
    await entered.wait()
    app.state.drain.begin()
    refused = await client.get("/v1/models")
    assert error_of(refused, 503)["code"] == "overloaded"
    assert refused.headers["retry-after"]
    assert (await client.get("/health/ready")).json()["server"] == "draining"
    assert (await client.get("/health/live")).status_code == 200
    assert not await app.state.drain.finished(within_s=0.05)
    leave.set()
    assert (await running).text == "done"
    assert await app.state.drain.finished(within_s=1)


async def test_what_was_opened_is_closed(settings: Settings, engine: FakeEngine) -> None:
    app = create_app(settings, engine)
    async with client_of(app):
        assert engine.started
        assert not engine.closed
    assert engine.closed


async def test_a_start_that_fails_closes_what_was_opened(
    settings: Settings, engine: FakeEngine
) -> None:
    async def fails() -> None:
        raise RuntimeError("planned")

    engine.start = fails  # type: ignore[method-assign]  # that is the test
    app = create_app(settings, engine)
    with pytest.raises(ExceptionGroup) as error:
        async with started(app):
            pass
    assert error.value.subgroup(RuntimeError) is not None
    assert engine.closed


async def test_the_data_folder_is_for_its_owner_alone(
    client: httpx.AsyncClient, settings: Settings
) -> None:
    assert settings.data_dir.stat().st_mode & 0o777 == 0o700


async def test_the_api_is_documented_with_the_key_it_needs(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    assert document["info"]["title"] == "Loragate"
    assert document["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    assert document["security"] == [{"bearer": []}]
    assert document["paths"]["/health/live"]["get"]["security"] == [{}]
    for path in ("/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/adapters"):
        for operation in document["paths"][path].values():
            assert operation.get("security", document["security"]) == [{"bearer": []}]
    for path in ("/docs", "/openapi.json"):
        assert path not in document["paths"]


async def test_the_page_of_the_api_needs_nothing_from_elsewhere(client: httpx.AsyncClient) -> None:
    response = await client.get("/docs")
    assert response.headers["content-type"].startswith("text/html")
    for needed in ("/v1/chat/completions", "/v1/adapters", "Authorization: Bearer"):
        assert needed in response.text
    for foreign in ("src=", "<script", "<link", "https://"):
        assert foreign not in response.text
