"""What `model` may be: an adapter, one of its aliases, one of its versions."""

import asyncio
import json
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from gateway.engine.messages import Submit
from tests.adapters.making import config, tensors, weights
from tests.fakes import Script, says
from tests.inference.conftest import BASE, Api, frames_of
from tests.live import Live, error_of

STREAMS = 32
HEADER = "x-loragate-adapter-digest"


@pytest.fixture
def digests(api: Api) -> Iterator[list[str]]:
    """Two versions of the tenant's `pirate`."""
    made = []
    for seed in range(2):
        files: dict[str, Any] = {
            "name": (None, "pirate"),
            "config": ("adapter_config.json", json.dumps(config()).encode()),
            "weights": ("adapter_model.safetensors", weights(tensors(seed=seed))),
        }
        made.append(api.client.post("/v1/adapters", files=files).json()["digest"])
    api.engine.submits.clear()
    yield made
    api.client.delete("/v1/adapters/pirate")


def put(api: Api, alias: str, **body: Any) -> None:
    response = api.client.put(f"/v1/adapters/pirate/aliases/{alias}", json=body)
    assert response.status_code == 200, response.text


def test_the_name_an_alias_and_a_version_each_get_what_they_mean(
    api: Api, digests: list[str]
) -> None:
    one, two = digests
    put(api, "prod", version=1)
    for model, digest in {
        "pirate": two,
        "pirate@latest": two,
        "pirate@prod": one,
        "pirate@1": one,
        "pirate@v2": two,
        f"pirate@{one[:8]}": one,
    }.items():
        answer = api.chat(model=model)
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert body["model"] == model
        assert body["choices"][0]["message"]["content"] == f"Hello from {digest[:8]}."
        assert answer.headers[HEADER] == digest
    put(api, "default", version=1)
    assert api.chat(model="pirate").headers[HEADER] == one
    assert HEADER not in api.chat().headers


@pytest.mark.parametrize("label", ["", "absent", "v3", "00000000", "latest@latest", "x" * 300])
def test_l6_what_the_adapter_does_not_have_is_404(api: Api, digests: list[str], label: str) -> None:
    for answer in (api.chat(model=f"pirate@{label}"), api.complete(model=f"pirate@{label}")):
        assert error_of(answer, 404)["code"] == "model_not_found"
    assert api.engine.submits == []


def test_l6_another_tenants_versions_and_aliases_are_404(
    api: Api, digests: list[str], running: Live
) -> None:
    put(api, "prod", version=1)
    with running.client("stranger") as stranger:
        for model in ("pirate@prod", "pirate@1", f"pirate@{digests[0]}"):
            error_of(api.chat(stranger, model=model), 404)
            error_of(stranger.get(f"/v1/models/{model}"), 404)


def test_a_key_for_an_adapter_has_all_its_versions_and_aliases_and_no_others(
    api: Api, digests: list[str], running: Live
) -> None:
    put(api, "prod", version=1)
    with (
        running.client("acme", allowed_adapters=["pirate"]) as allowed,
        running.client("acme", allowed_adapters=["pirate@prod", "judge"]) as other,
    ):
        for model in ("pirate", "pirate@prod", "pirate@1", f"pirate@{digests[1]}"):
            assert api.chat(allowed, model=model).status_code == 200
            assert allowed.get(f"/v1/models/{model}").json()["id"] == model
            error_of(api.chat(other, model=model), 404)
            error_of(other.get(f"/v1/models/{model}"), 404)
        assert other.get("/v1/models").json()["data"] == []


def test_aliases_are_listed_as_models_and_versions_are_not(api: Api, digests: list[str]) -> None:
    put(api, "prod", version=1)
    put(api, "canary", split={"v1": 50, "v2": 50})
    put(api, "default", version=1)
    models = {model["id"]: model for model in api.client.get("/v1/models").json()["data"]}
    assert list(models) == [BASE, "pirate", "pirate@canary", "pirate@prod"]
    for name, model in models.items():
        assert api.client.get(f"/v1/models/{name}").json() == model
    for label in ("latest", "1", "default"):
        assert api.client.get(f"/v1/models/pirate@{label}").json()["id"] == f"pirate@{label}"
    error_of(api.client.get("/v1/models/pirate@absent"), 404)


def test_a_split_is_sticky_by_user(api: Api, digests: list[str]) -> None:
    put(api, "prod", split={"v1": 60, "v2": 40})
    users = [f"user-{number}" for number in range(150)]

    def got(content: str) -> dict[str, str]:
        messages = [{"role": "user", "content": content}]
        return {
            user: api.chat(model="pirate@prod", user=user, messages=messages).headers[HEADER]
            for user in users
        }

    first = got("hello")
    assert got("something else") == first
    count = Counter(first.values())[digests[1]]
    assert abs(count - 0.4 * len(users)) < 4 * math.sqrt(len(users) * 0.4 * 0.6)


def test_a_split_without_a_user_is_sticky_by_conversation(
    api: Api, digests: list[str], running: Live
) -> None:
    put(api, "prod", split={"v1": 50, "v2": 50})
    system = {"role": "system", "content": "Be brief."}

    def got(client: httpx.Client, number: int, turns: int) -> str:
        messages = [system, {"role": "user", "content": f"question {number}"}]
        for turn in range(turns):
            messages += [
                {"role": "assistant", "content": f"answer {turn}"},
                {"role": "user", "content": f"more {turn}"},
            ]
        return api.chat(client, model="pirate@prod", messages=messages).headers[HEADER]

    first = [got(api.client, number, 0) for number in range(40)]
    assert set(first) == set(digests)
    assert [got(api.client, number, 3) for number in range(40)] == first
    with running.client("acme", scopes=("inference",)) as other_key:
        assert [got(other_key, number, 0) for number in range(40)] != first


def test_a_text_is_known_again_by_its_beginning(api: Api, digests: list[str]) -> None:
    put(api, "prod", split={"v1": 50, "v2": 50})
    for prompt, longer in (("a" * 300, "a" * 400), ([65] * 70, [65] * 90)):
        got = {
            api.complete(model="pirate@prod", prompt=text).headers[HEADER]
            for text in (prompt, longer)
        }
        assert len(got) == 1


async def test_r7_flips_under_32_streams_change_no_answer_that_has_begun(
    api: Api, digests: list[str], running: Live
) -> None:
    """Every stream is one version's from first to last, and those that begin after a flip's
    answer get what it says."""
    letters = dict(zip(digests, "ab", strict=True))

    def script(request: Submit) -> Script:
        assert request.adapter is not None
        return says(letters[request.adapter.digest] * 40, per_step=1, delay_s=0.002)

    api.engine.script = script
    put(api, "prod", version=1)
    headers = {"authorization": f"Bearer {running.key()}"}
    flipping = True
    async with httpx.AsyncClient(
        base_url=running.url, headers=headers, timeout=60, limits=httpx.Limits(max_connections=40)
    ) as client:

        async def stream() -> str:
            body = {
                "model": "pirate@prod",
                "stream": True,
                "messages": [{"role": "user", "content": "hi"}],
            }
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            text = "".join(
                frame["choices"][0]["delta"].get("content", "") for frame in frames_of(answer.text)
            )
            assert text == letters[answer.headers[HEADER]] * 40
            return text[0]

        async def ask() -> Counter[str]:
            got: Counter[str] = Counter()
            while flipping:
                got[await stream()] += 1
            return got

        asking = [asyncio.create_task(ask()) for _ in range(STREAMS)]
        for number in range(30):
            version = number % 2 + 1
            moved = await client.put(
                "/v1/adapters/pirate/aliases/prod", json={"version": f"v{version}"}
            )
            assert moved.status_code == 200
            assert await stream() == "ab"[version - 1]
        flipping = False
        got = sum(await asyncio.gather(*asking), Counter[str]())
    assert min(got["a"], got["b"]) > 0
    assert api.engine.running == set()
