from typing import Any

import pytest

from tests.inference.conftest import Api


@pytest.fixture
def paths(api: Api) -> Any:
    return api.client.get("/openapi.json").json()["paths"]


@pytest.mark.parametrize(
    ("path", "needed", "optional"),
    [
        ("/v1/chat/completions", ["model", "messages"], ["stream", "max_completion_tokens"]),
        ("/v1/completions", ["model", "prompt"], ["stream", "stop", "top_k", "ignore_eos"]),
    ],
)
def test_request_bodies_are_described(
    paths: Any, path: str, needed: list[str], optional: list[str]
) -> None:
    schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema["type"] == "object"
    assert schema["additionalProperties"] is False
    assert set(needed) <= set(schema["required"])
    assert set(needed + optional) <= set(schema["properties"])
    assert not {"tools", "n", "logprobs"} & set(schema["properties"])
    assert "$ref" not in str(schema)


def test_the_upload_is_described(paths: Any) -> None:
    content = paths["/v1/adapters"]["post"]["requestBody"]["content"]
    assert set(content["multipart/form-data"]["schema"]["properties"]) == {
        "name",
        "config",
        "weights",
        "archive",
        "index",
    }


def test_every_route_has_a_name_and_a_summary(paths: Any) -> None:
    ours = [methods for path, methods in paths.items() if path.startswith("/v1/")]
    routes = [route for methods in ours for route in methods.values()]
    assert len(routes) >= 8
    assert len({route["operationId"] for route in routes}) == len(routes)
    assert all(route["summary"] for route in routes)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_answers_are_described(paths: Any, path: str) -> None:
    answer = paths[path]["post"]["responses"]["200"]["content"]
    assert "Completion" in str(answer)
