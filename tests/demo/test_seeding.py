import asyncio
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest
import uvicorn

from gateway.app import create_app
from gateway.demo.client import Client
from gateway.demo.content import TENANTS, adapters_folder
from gateway.demo.progress import StepFailed
from gateway.demo.seeding import KEYS_FILE, seed
from gateway.settings import Settings
from tests.fakes import FakeEngine, byte_tokenizer_folder, model_info
from tests.serving import settings_for


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_for(tmp_path / "data")


@pytest.fixture
def engine(tmp_path: Path) -> FakeEngine:
    return FakeEngine(model_info(byte_tokenizer_folder(tmp_path / "model")))


@pytest.fixture
async def url(settings: Settings, engine: FakeEngine) -> AsyncIterator[str]:
    """The real app over a fake engine, on a port of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(create_app(settings, engine), lifespan="on", log_config=None)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            assert not serving.done()
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        await serving


async def names(url: str, key: str) -> list[str]:
    async with Client(url, key) as client:
        return sorted(await client.adapters())


async def test_each_tenant_gets_its_own_adapters(settings: Settings, url: str) -> None:
    keys = await seed(settings, url)
    for tenant in TENANTS:
        assert await names(url, keys[tenant.slug]) == sorted(tenant.adapters)


async def test_a_second_seeding_changes_nothing(
    settings: Settings, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = await seed(settings, url)
    capsys.readouterr()
    assert await seed(settings, url) == keys
    assert capsys.readouterr().out == ""


async def test_the_keys_are_kept_where_only_this_user_reads_them(
    settings: Settings, url: str
) -> None:
    await seed(settings, url)
    assert stat.S_IMODE((settings.data_dir / KEYS_FILE).stat().st_mode) == 0o600


@pytest.mark.parametrize("content", ["", "no json", "[]", '{"acme": "lg_sk_of_another_database"}'])
async def test_keys_that_cannot_be_used_are_made_anew(
    settings: Settings, url: str, content: str
) -> None:
    (settings.data_dir / KEYS_FILE).write_text(content)
    keys = await seed(settings, url)
    assert await names(url, keys["acme"]) == ["json", "pirate"]


async def test_an_adapter_that_a_user_put_under_a_demo_name_stays(
    settings: Settings, url: str
) -> None:
    keys = await seed(settings, url)
    async with Client(url, keys["acme"]) as client:
        await client.upload("pirate", adapters_folder() / "legal")
        mine = await client.adapter("pirate")
        await seed(settings, url)
        assert await client.adapter("pirate") == mine


async def test_an_adapter_that_was_deleted_comes_back(settings: Settings, url: str) -> None:
    keys = await seed(settings, url)
    async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
        headers = {"authorization": f"Bearer {keys['globex']}"}
        (await client.delete("/v1/adapters/legal", headers=headers)).raise_for_status()
    await seed(settings, url)
    assert await names(url, keys["globex"]) == ["legal"]


async def test_another_base_model_is_explained(
    settings: Settings, url: str, engine: FakeEngine
) -> None:
    wider = {
        name: (2 * rows, columns) for name, (rows, columns) in engine.model.projections.items()
    }
    engine.model = msgspec.structs.replace(engine.model, projections=wider)
    with pytest.raises(StepFailed, match="belong to SmolLM2-135M-Instruct"):
        await seed(settings, url)
