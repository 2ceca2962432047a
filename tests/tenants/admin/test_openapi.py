"""The admin API in the OpenAPI document, and that its answers are what it says."""

from typing import Any

import pytest

from tests.tenants.admin.conftest import Office


@pytest.fixture
async def operations(office: Office) -> dict[tuple[str, str], Any]:
    """(method, path) → operation, of the admin API."""
    paths = (await office.http.get("/openapi.json")).json()["paths"]
    return {
        (method, path): operation
        for path, methods in paths.items()
        if path.startswith("/v1/admin")
        for method, operation in methods.items()
    }


async def test_every_route_says_how_it_fails_and_in_which_shape(
    operations: dict[tuple[str, str], Any],
) -> None:
    assert len(operations) >= 22
    for (_, path), operation in operations.items():
        answers = operation["responses"]
        assert {"400", "401", "403", "429", "503"} <= answers.keys(), path
        assert ("404" in answers) >= ("{slug}" in path), path
        assert ("413" in answers) >= ("requestBody" in operation), path
        for status, answer in answers.items():
            if int(status) >= 400:
                assert "ErrorAnswer" in str(answer["content"]["application/json"]), (path, status)


async def test_a_body_of_another_kind_or_too_large_is_refused(office: Office) -> None:
    await office.call("POST", "/tenants", 400, content=b"slug=acme")
    await office.call("POST", "/tenants", 400, content=b'{"slug": ')
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/xml"):
        headers = {"content-type": kind}
        await office.call("POST", "/tenants", 400, content=b"slug=acme", headers=headers)
    await office.call("POST", "/tenants", 413, content=b" " * (5 * 2**20))
    deep = b'{"slug": ' + b"[" * 100_000
    await office.call("POST", "/tenants", 400, content=deep)
