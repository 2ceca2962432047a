"""A running gateway for the tests of uploads."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.db import Database
from gateway.settings import Adapters
from tests.adapters.making import config, weights
from tests.adapters.world import World, made
from tests.fakes import FakeEngine
from tests.live import Live, live

UPLOAD_BYTES_MAX = 6 * 2**20
ADAPTERS_MAX = 3


@dataclass
class Site:
    """One tenant of a running gateway."""

    live: Live
    tenant: str
    client: httpx.Client

    @property
    def engine(self) -> FakeEngine:
        return self.live.engine

    def upload(
        self,
        name: str = "pirate",
        config_json: Any = None,
        file: bytes | None = None,
        client: httpx.Client | None = None,
        **parts: Any,
    ) -> httpx.Response:
        """Upload an adapter: `config_json` as JSON or bytes, `parts` instead of the usual ones."""
        if not isinstance(config_json, bytes):
            config_json = httpx.Request("POST", "http://x", json=config_json or config()).content
        files: dict[str, Any] = {
            "name": (None, name),
            "config": ("adapter_config.json", config_json),
            "weights": ("adapter_model.safetensors", weights() if file is None else file),
        }
        kept = {part: value for part, value in (files | parts).items() if value is not None}
        return (client or self.client).post("/v1/adapters", files=kept)

    def stored(self) -> list[str]:
        """All files of the adapter store, drafts too."""
        root = self.live.settings.data_dir / "adapters"
        return sorted(
            os.path.relpath(Path(folder, name), root)
            for folder, _, names in os.walk(root)  # bears with folders that go away meanwhile
            for name in names
        )

    def names(self) -> list[str]:
        return [adapter["name"] for adapter in self.client.get("/v1/adapters").json()["data"]]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    limits = Adapters(upload_bytes_max=UPLOAD_BYTES_MAX, tenant_adapters_max=ADAPTERS_MAX)
    with live(tmp_path_factory.mktemp("live"), adapters=limits) as running:
        yield running


@pytest.fixture
def site(running: Live) -> Iterator[Site]:
    """An engine as new, a tenant, and no adapters afterwards."""
    running.engine.reset()
    with running.client("acme") as client:
        yield Site(running, "acme", client)
        running.engine.reset()
        for adapter in client.get("/v1/adapters").json()["data"]:
            client.delete(f"/v1/adapters/{adapter['id']}")


@pytest.fixture
async def world(database: Database, tmp_path: Path) -> World:
    return await made(database, tmp_path / "store")
