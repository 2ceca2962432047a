"""A running gateway for the tests of the API."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from gateway.engine.messages import Submit
from gateway.settings import Server
from tests.adapters.making import config, weights
from tests.fakes import FakeEngine
from tests.live import Live, live

BASE = "smollm2-135m-instruct"
BODY_BYTES_MAX = 2**20
FIRST_TOKEN_S_MAX = 2.0


@dataclass
class Api:
    """One tenant's view of a running gateway."""

    live: Live
    client: httpx.Client

    @property
    def engine(self) -> FakeEngine:
        return self.live.engine

    def chat(self, client: httpx.Client | None = None, **changes: Any) -> httpx.Response:
        body = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]} | changes
        return (client or self.client).post("/v1/chat/completions", json=body)

    def complete(self, **changes: Any) -> httpx.Response:
        body = {"model": BASE, "prompt": "hi"} | changes
        return self.client.post("/v1/completions", json=body)

    def upload(self, name: str, client: httpx.Client | None = None) -> dict[str, Any]:
        files: dict[str, Any] = {
            "name": (None, name),
            "config": ("adapter_config.json", json.dumps(config()).encode()),
            "weights": ("adapter_model.safetensors", weights()),
        }
        response = (client or self.client).post("/v1/adapters", files=files)
        assert response.is_success, response.text
        adapter: dict[str, Any] = response.json()
        self.engine.submits.clear()
        return adapter

    def submitted(self) -> Submit:
        """The one request that the engine got."""
        (submit,) = self.engine.submits
        return submit


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    server = Server(body_bytes_max=BODY_BYTES_MAX, first_token_s_max=FIRST_TOKEN_S_MAX)
    with live(tmp_path_factory.mktemp("live"), server=server) as running:
        yield running


@pytest.fixture
def api(running: Live) -> Iterator[Api]:
    """An engine as new."""
    running.engine.reset()
    with running.client() as client:
        yield Api(running, client)
    running.engine.reset()


def frames_of(text: str) -> list[Any]:
    """The data of a stream, decoded, without its last frame, which must be [DONE]."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    data = [block for block in blocks if not block.startswith(":")]
    assert all(block.startswith("data: ") and "\n" not in block for block in data), text
    assert data.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in data]
