"""A gateway with an operator, on both databases."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from litestar import Litestar

from gateway.app import create_app
from gateway.settings import Keys, Secret, Settings
from gateway.tenants import key_form
from tests.fakes import FakeEngine, byte_tokenizer_folder, model_info
from tests.serving import client_of, settings_for


@dataclass
class Office:
    """The operator's view of a running gateway."""

    app: Litestar
    settings: Settings
    http: httpx.AsyncClient
    """Without a key."""
    admin_key: str

    async def call(self, method: str, path: str, status: int = 200, **options: Any) -> Any:
        """Ask as the operator; asserts the status and returns the JSON."""
        headers = {"authorization": f"Bearer {self.admin_key}"} | options.pop("headers", {})
        answer = await self.http.request(method, f"/v1/admin{path}", headers=headers, **options)
        assert answer.status_code == status, answer.text
        return answer.json()

    async def tenant(self, slug: str = "acme", **fields: Any) -> dict[str, Any]:
        made: dict[str, Any] = await self.call(
            "POST", "/tenants", 201, json={"slug": slug} | fields
        )
        return made

    async def key(self, slug: str = "acme", **fields: Any) -> dict[str, Any]:
        made: dict[str, Any] = await self.call("POST", f"/tenants/{slug}/keys", 201, json=fields)
        return made

    async def use(self, key: str, path: str = "/v1/models", **options: Any) -> httpx.Response:
        """Ask with a key; GET unless `method` says otherwise."""
        method = options.pop("method", "GET")
        headers = {"authorization": f"Bearer {key}"} | options.pop("headers", {})
        return await self.http.request(method, path, headers=headers, **options)

    async def audit(self) -> list[dict[str, Any]]:
        """All entries, the oldest first."""
        listed: list[dict[str, Any]] = (await self.call("GET", "/audit?limit=100"))["data"]
        return listed[::-1]


@pytest.fixture
async def office(tmp_path: Path, migrated_url: str) -> AsyncIterator[Office]:
    admin_key = key_form.make("admin").text.reveal()
    settings = msgspec.structs.replace(
        settings_for(tmp_path / "data", migrated_url), keys=Keys(admin=Secret(admin_key))
    )
    engine = FakeEngine(model_info(byte_tokenizer_folder(tmp_path / "model")))
    app = create_app(settings, engine)
    async with client_of(app) as http:
        yield Office(app, settings, http, admin_key)
