"""A key that is for certain adapters: the others, and the base model, are not there for it."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.adapters.making import config, weights
from tests.inference.conftest import BASE, Api
from tests.live import Live, error_of


@pytest.fixture
def ids(api: Api) -> Iterator[dict[str, str]]:
    """Two adapters of the tenant: name → id."""
    names = ("pirate", "judge")
    yield {name: api.upload(name)["id"] for name in names}
    for name in names:
        api.client.delete(f"/v1/adapters/{name}")


@pytest.fixture
def limited(running: Live) -> Iterator[httpx.Client]:
    with running.client("acme", allowed_adapters=["pirate", "parrot"]) as client:
        yield client


def upload(client: httpx.Client, name: str) -> httpx.Response:
    files: dict[str, Any] = {
        "name": (None, name),
        "config": ("adapter_config.json", json.dumps(config()).encode()),
        "weights": ("adapter_model.safetensors", weights()),
    }
    return client.post("/v1/adapters", files=files)


def test_it_calls_its_own_by_name_and_by_id(
    api: Api, ids: dict[str, str], limited: httpx.Client
) -> None:
    for model in ("pirate", ids["pirate"]):
        assert api.chat(limited, model=model).status_code == 200


def test_all_others_and_the_base_model_are_404_by_name_and_by_id(
    api: Api, ids: dict[str, str], limited: httpx.Client
) -> None:
    api.chat(model="judge")  # its name is remembered
    api.chat(model=ids["judge"])
    api.engine.submits.clear()
    for model in ("judge", ids["judge"], BASE):
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
            ("/v1/completions", {"prompt": "hi"}),
        ):
            answer = limited.post(path, json={"model": model} | body)
            assert error_of(answer, 404)["code"] == "model_not_found"
        assert error_of(limited.get(f"/v1/models/{model}"), 404)["code"] == "model_not_found"
    assert api.engine.submits == []


def test_the_base_model_can_be_among_them(api: Api, running: Live) -> None:
    with running.client("acme", allowed_adapters=[BASE]) as client:
        assert api.chat(client).status_code == 200
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == [BASE]
        assert client.get(f"/v1/models/{BASE}").status_code == 200


def test_only_they_are_listed_shown_and_deleted(
    api: Api, ids: dict[str, str], limited: httpx.Client
) -> None:
    for path, field in (("/v1/models", "id"), ("/v1/adapters", "name")):
        assert [one[field] for one in limited.get(path).json()["data"]] == ["pirate"]
    for name in ("judge", ids["judge"]):
        for method in ("GET", "DELETE"):
            error_of(limited.request(method, f"/v1/adapters/{name}"), 404)
    assert api.client.get("/v1/adapters/judge").status_code == 200
    assert limited.get(f"/v1/adapters/{ids['pirate']}").status_code == 200
    assert limited.delete("/v1/adapters/pirate").status_code == 200


def test_only_their_names_can_be_uploaded(api: Api, limited: httpx.Client) -> None:
    error = error_of(upload(limited, "stranger"), 403)
    assert "'stranger'" in error["message"]
    assert upload(limited, "parrot").status_code == 201
    assert [one["name"] for one in api.client.get("/v1/adapters").json()["data"]] == ["parrot"]
    api.client.delete("/v1/adapters/parrot")
