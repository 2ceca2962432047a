"""The app behind uvicorn in a thread, for what only a real connection shows: streams, disconnects,
and clients that are not ours."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import uvicorn
from litestar import Litestar

from gateway.app import create_app
from gateway.http_protocol import HttpProtocol
from gateway.settings import Settings
from tests.fakes import FakeEngine, byte_tokenizer_folder, model_info
from tests.serving import issue_key, settings_for

PORTS = range(9100, 9200)
START_S = 30.0


@dataclass
class Live:
    """A running gateway with a fake engine and a byte tokenizer."""

    url: str
    settings: Settings
    engine: FakeEngine
    app: Litestar
    _keys: dict[str, str] = field(default_factory=dict)

    def key(self, tenant: str | None = "acme", **options: Any) -> str:
        """A key of a tenant; the same one when asked again, unless it has options. None: an admin
        key."""
        if options or tenant is None:
            return asyncio.run(issue_key(self.settings, tenant, **options)).text.reveal()
        if tenant not in self._keys:
            self._keys[tenant] = asyncio.run(issue_key(self.settings, tenant)).text.reveal()
        return self._keys[tenant]

    def client(self, tenant: str | None = "acme", **options: Any) -> httpx.Client:
        """An HTTP client with a key of the tenant; None: with an admin key."""
        return httpx.Client(
            base_url=self.url,
            headers={"authorization": f"Bearer {self.key(tenant, **options)}"},
            timeout=30.0,
        )


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object of a response; asserts its status and OpenAI's shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@contextmanager
def live(folder: Path, **changes: Any) -> Iterator[Live]:
    """`changes`: what to replace in the settings."""
    settings = msgspec.structs.replace(settings_for(folder / "data"), **changes)
    engine = FakeEngine(model_info(byte_tokenizer_folder(folder / "model")))
    listener = _listen()
    app = create_app(settings, engine)
    server = uvicorn.Server(uvicorn.Config(app, http=HttpProtocol, log_config=None, lifespan="on"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        _wait(server, thread)
        yield Live(url, settings, engine, app)
    finally:
        server.should_exit = True
        thread.join(START_S)
        listener.close()


def _listen() -> socket.socket:
    for port in PORTS:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            listener.close()
        else:
            return listener
    raise AssertionError("all ports of the tests are taken")


def _wait(server: uvicorn.Server, thread: threading.Thread) -> None:
    for _ in range(int(START_S / 0.02)):
        if server.started:
            return
        assert thread.is_alive(), "the server did not start"
        threading.Event().wait(0.02)
    raise AssertionError("the server did not start in time")
