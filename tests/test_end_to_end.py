"""The whole system as its users meet it: the gateway behind uvicorn, its engine process with the
real model, the demo adapters, and the openai package."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from examples.adapters.styles import shows_style
from gateway.app import create_app
from gateway.engine.messages import EngineSettings, Stats
from gateway.engine.process import ProcessEngine
from gateway.settings import Settings
from tests.serving import issue_key

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
BASE = "smollm2-135m-instruct"


@dataclass(frozen=True)
class System:
    url: str
    engine: ProcessEngine
    keys: dict[str, str]

    def client(self, tenant: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=self.keys[tenant], max_retries=0
        )

    async def upload(self, tenant: str, name: str, folder: Path, **changes: object) -> None:
        config = json.loads((folder / "adapter_config.json").read_text()) | changes
        async with httpx.AsyncClient(timeout=60) as client:
            response = await client.post(
                f"{self.url}/v1/adapters",
                headers={"authorization": f"Bearer {self.keys[tenant]}"},
                data={"name": name},
                files={
                    "config": json.dumps(config).encode(),
                    "weights": (folder / "adapter_model.safetensors").read_bytes(),
                },
            )
        assert response.status_code == 201, response.text

    async def idle(self) -> Stats:
        """The engine's figures once nothing runs any more."""
        for _ in range(500):
            stats = await self.engine.stats()
            if not stats.running and not stats.waiting:
                return stats
            await asyncio.sleep(0.01)
        raise AssertionError("the engine never became idle")


@contextlib.asynccontextmanager
async def running(data_dir: Path, base_model: Path) -> AsyncIterator[System]:
    settings = Settings(
        data_dir=data_dir,
        engine=EngineSettings(model=str(base_model), name=BASE, pool_mib=512),
    )
    engine = ProcessEngine(settings.engine)
    app = create_app(settings, engine)
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, lifespan="on")
    )
    serving = asyncio.create_task(server.serve())
    try:
        while not server.started:
            assert not serving.done(), "the server did not start"
            await asyncio.sleep(0.02)
        await asyncio.wait_for(engine.wait_ready(), 60)
        port = server.servers[0].sockets[0].getsockname()[1]
        keys = {
            tenant: (await issue_key(settings, tenant)).text.reveal()
            for tenant in ("acme", "globex")
        }
        yield System(f"http://127.0.0.1:{port}", engine, keys)
    finally:
        server.should_exit = True
        await serving


async def stream_text(client: openai.AsyncOpenAI, model: str, max_tokens: int = 24) -> str:
    stream = await client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=max_tokens, stream=True
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def test_64_streams_over_five_adapters_of_two_tenants(
    tmp_path: Path, base_model: Path, demo_adapters: dict[str, Path]
):
    async with running(tmp_path, base_model) as system:
        await system.upload("acme", "pirate", demo_adapters["pirate"])
        await system.upload("acme", "json", demo_adapters["json"])
        await system.upload("acme", "soft-pirate", demo_adapters["pirate"], lora_alpha=20)
        await system.upload("globex", "legal", demo_adapters["legal"])
        await system.upload("globex", "pirate", demo_adapters["pirate"], lora_alpha=22)
        asked = [
            ("acme", "pirate", "pirate"),
            ("acme", "json", "json"),
            ("acme", "soft-pirate", "pirate"),
            ("globex", "legal", "legal"),
            ("globex", "pirate", "pirate"),
            ("globex", BASE, None),
            ("acme", BASE, None),
            ("globex", "legal", "legal"),
        ] * 8
        clients = {tenant: system.client(tenant) for tenant in system.keys}
        texts = await asyncio.gather(
            *(stream_text(clients[tenant], model) for tenant, model, _ in asked)
        )
        for (tenant, model, style), text in zip(asked, texts, strict=True):
            if style is None:
                assert text == "The capital of France is Paris.", (tenant, model)
            else:
                assert shows_style(style, text), (tenant, model, text)
        stats = await system.idle()
        assert stats.batch_adapters_max == 5
        assert stats.pages_kv == 0
        for tenant, foreign in (("acme", "legal"), ("globex", "json")):
            with pytest.raises(openai.NotFoundError) as refused:
                await stream_text(clients[tenant], foreign)
            assert refused.value.code == "model_not_found"
            listed = [model.id async for model in clients[tenant].models.list()]
            assert foreign not in listed


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_disconnects_frees_its_pages(
    tmp_path: Path, base_model: Path, streamed: bool
):
    async with running(tmp_path, base_model) as system:
        body = {"model": BASE, "messages": QUESTION, "max_tokens": 4000, "stream": streamed}
        async with httpx.AsyncClient(timeout=60) as client:
            headers = {"authorization": f"Bearer {system.keys['acme']}"}
            tasks = [
                asyncio.create_task(_post(client, system.url, headers, body)) for _ in range(4)
            ]
            for _ in range(3000):
                before = await system.engine.stats()
                if before.running:
                    break
                await asyncio.sleep(0.005)
            assert before.running
            assert before.pages_kv
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        after = await system.idle()
        assert after.pages_kv == 0
        # what was computed since is the iteration that ran, and those until the server saw it
        assert after.iterations - before.iterations <= 5


async def _post(
    client: httpx.AsyncClient, url: str, headers: dict[str, str], body: dict[str, Any]
) -> None:
    async with client.stream(
        "POST", f"{url}/v1/chat/completions", headers=headers, json=body
    ) as response:
        await response.aread()


async def test_a_killed_engine_is_replaced_and_nothing_stored_is_lost(
    tmp_path: Path, base_model: Path, demo_adapters: dict[str, Path]
):
    async with running(tmp_path, base_model) as system:
        await system.upload("acme", "pirate", demo_adapters["pirate"])
        client = system.client("acme")
        before = await stream_text(client, "pirate")
        stream = await client.chat.completions.create(
            model="pirate", messages=QUESTION, max_tokens=2000, temperature=2, stream=True
        )
        first = await anext(aiter(stream))
        assert first.choices
        waiting = asyncio.create_task(
            client.completions.create(model=BASE, prompt="Once upon a time", max_tokens=2000)
        )
        for _ in range(1000):
            if (await system.engine.stats()).running == 2:
                break
        assert system.engine.pid is not None
        os.kill(system.engine.pid, signal.SIGKILL)
        with pytest.raises(openai.APIError) as cut:
            async for _ in stream:
                pass
        assert cut.value.code == "engine_unavailable"
        with pytest.raises(openai.InternalServerError) as refused:
            await waiting
        assert refused.value.status_code == 503
        assert "retry-after" in refused.value.response.headers
        async with httpx.AsyncClient() as http:
            assert (await http.get(f"{system.url}/health/live")).status_code == 200
            assert (await http.get(f"{system.url}/health/ready")).status_code == 503
            await asyncio.wait_for(system.engine.wait_ready(), 60)
            assert (await http.get(f"{system.url}/health/ready")).status_code == 200
        assert await stream_text(client, "pirate") == before
        assert system.engine.starts == 2


async def test_what_was_acknowledged_is_there_after_a_restart(
    tmp_path: Path, base_model: Path, demo_adapters: dict[str, Path]
):
    async with running(tmp_path, base_model) as system:
        await system.upload("acme", "json", demo_adapters["json"])
        keys, before = system.keys, await stream_text(system.client("acme"), "json")
    async with running(tmp_path, base_model) as system:
        again = replace(system, keys=keys)
        assert await stream_text(again.client("acme"), "json") == before
        assert shows_style("json", before)


async def test_two_versions_of_a_name_answer_each_in_its_own_way_and_move_back(
    tmp_path: Path, base_model: Path, demo_adapters: dict[str, Path]
):
    async with running(tmp_path, base_model) as system:
        for style in ("pirate", "json"):
            await system.upload("acme", "style", demo_adapters[style])
        client = system.client("acme")
        headers = {"authorization": f"Bearer {system.keys['acme']}"}
        async with httpx.AsyncClient(base_url=f"{system.url}/v1/adapters/style") as http:

            async def point(version: str) -> None:
                body = {"version": version}
                put = await http.put("/aliases/prod", json=body, headers=headers)
                assert put.status_code == 200, put.text

            async def places() -> dict[int, str]:
                listed = (await http.get("/versions", headers=headers)).json()["data"]
                return {version["version"]: version["where"] for version in listed}

            for model, style in (("style@v1", "pirate"), ("style@v2", "json"), ("style", "json")):
                assert shows_style(style, await stream_text(client, model)), model
            await point("v1")
            began = await client.chat.completions.create(
                model="style@prod", messages=QUESTION, temperature=0, max_tokens=24, stream=True
            )
            text = [(await anext(aiter(began))).choices[0].delta.content or ""]
            await point("v2")
            assert shows_style("json", await stream_text(client, "style@prod"))
            text += [chunk.choices[0].delta.content or "" async for chunk in began]
            assert shows_style("pirate", "".join(text))
            await point("v1")
            assert shows_style("pirate", await stream_text(client, "style@prod"))
            assert await places() == {1: "pool", 2: "pool"}
            before = await system.idle()
            refused = await http.delete("/versions/v1", headers=headers)
            assert refused.status_code == 409
            await point("v2")
            assert (await http.delete("/versions/v1", headers=headers)).status_code == 200
            after = await system.idle()
            assert after.adapters_resident == before.adapters_resident - 1
            assert after.adapters_host == before.adapters_host - 1
            assert after.pages_adapters < before.pages_adapters
            assert after.pages_prefixes < before.pages_prefixes
            assert await places() == {2: "pool"}
            with pytest.raises(openai.NotFoundError):
                await stream_text(client, "style@v1")
            assert shows_style("json", await stream_text(client, "style@prod"))
