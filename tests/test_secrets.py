"""f13: no secret is in what a gateway says or writes. `planted.py` looks for keys in all the other
tests."""

import io
import json
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import redis

from gateway import telemetry
from gateway.settings import Database, Keys, Redis, Secret, Settings, load
from gateway.tenants import key_form
from tests.databases import PASSWORD
from tests.live import Live, live
from tests.planted import PLANTED, secret_part
from tests.redis_server import OwnRedis

REDIS_PASSWORD = "planted-redis-password"
PEPPER = "planted-pepper-of-at-least-32-characters"
BASE = "smollm2-135m-instruct"
A_KEY = re.compile(r"lg_sk_[0-9A-Za-z]{10}_[0-9A-Za-z]{8}")


class Run:
    """A gateway that logs all it can, and everything that came out of it."""

    def __init__(self, running: Live, log: io.StringIO) -> None:
        self.live, self._log = running, log
        self.secrets = {"database": PASSWORD, "redis": REDIS_PASSWORD, "pepper": PEPPER}
        self._answers: list[str] = []

    def key(self, tenant: str, **options: Any) -> str:
        key = self.live.key(tenant, **options)
        self.plant(f"key of {tenant}", key)
        return key

    def plant(self, name: str, key: str) -> str:
        self.secrets[name] = secret_part(key)
        return key

    def ask(self, method: str, path: str, key: str | None = None, **options: Any) -> None:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        headers |= options.pop("headers", {})
        response = httpx.request(
            method, self.live.url + path, headers=headers, timeout=30.0, **options
        )
        self._answers += [f"{response.headers!r}", response.text]

    def shown(self) -> str:
        return "\n".join([self._log.getvalue(), *self._answers])

    def leaks(self) -> list[str]:
        text = self.shown()
        return [f"{name}: {_around(text, it)}" for name, it in self.secrets.items() if it in text]


def _around(text: str, secret: str) -> str:
    place = text.index(secret)
    return text[max(0, place - 300) : place]


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    written = io.StringIO()
    telemetry.configure_logging(written, logging.DEBUG)
    yield written
    root.handlers[:], root.level = before
    logging.captureWarnings(False)


@pytest.fixture
def locked_redis() -> Iterator[str]:
    """The URL, with its password, of a Redis that wants one."""
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        pytest.skip("no redis-server here")
    server = OwnRedis(binary)
    try:
        with redis.Redis.from_url(server.url) as client:
            client.config_set("requirepass", REDIS_PASSWORD)
        yield server.url.replace("redis://", f"redis://:{REDIS_PASSWORD}@")
    finally:
        server.remove()


@pytest.fixture(params=["right", "wrong"])
def run(
    request: pytest.FixtureRequest,
    log: io.StringIO,
    migrated_postgres_url: str,
    locked_redis: str,
    tmp_path: Path,
) -> Iterator[Run]:
    """Once with a Redis that answers, once with one that refuses the password."""
    if request.param == "wrong":
        locked_redis = locked_redis.replace(f":{REDIS_PASSWORD}@", f":{REDIS_PASSWORD}-not@")
    parts = {
        "database": Database(url=Secret(migrated_postgres_url)),
        "redis": Redis(url=Secret(locked_redis)),
        "keys": Keys(pepper=Secret(PEPPER)),
    }
    with live(tmp_path, **parts) as running:
        yield Run(running, log)


def test_f13_no_secret_is_in_logs_and_answers_wherever_a_client_puts_its_key(run: Run) -> None:
    key = run.key("acme")
    unknown = run.plant("unknown key", key_form.make().text.reveal())
    chat = {"model": BASE, "messages": [{"role": "user", "content": "hi"}]}
    for each in (key, unknown, run.key("beta", scopes=("usage:read",))):
        for path in _plain_paths(run.live):
            run.ask("GET", path, each)
        run.ask("GET", f"/v1/models/{each}", key)
        run.ask("GET", f"/v1/adapters/{each}", key)
        run.ask("DELETE", f"/v1/adapters/{each}", key)
        run.ask("GET", f"/{each}", key)
        run.ask("PUT", f"/v1/models?key={each}", each)
        run.ask("GET", "/v1/models", headers={"authorization": f"Basic {each}"})
        run.ask("GET", "/v1/models", headers={"authorization": f"Bearer {each}x"})
        run.ask("GET", "/v1/models", key, headers={"x-request-id": each})
        run.ask("POST", "/v1/chat/completions", each, json=chat)
        run.ask("POST", "/v1/chat/completions", each, json=chat | {"stream": True})
        for part in ("model", "user", "stop", "seed", each, "temperature", "response_format"):
            run.ask("POST", "/v1/chat/completions", key, json=chat | {part: each})
        run.ask("POST", "/v1/chat/completions", key, json=chat | {"messages": [{"role": each}]})
        run.ask("POST", "/v1/chat/completions", key, json=chat | {"messages": [{each: each}]})
        run.ask("POST", "/v1/completions", key, json={"model": each, "prompt": "hi"})
        run.ask("POST", "/v1/completions", key, content=f'{{"model": {each}')
        files = {name: (each, each.encode()) for name in ("config", "weights", each)}
        run.ask("POST", "/v1/adapters", key, files=files | {"name": (None, each)})
    assert "gateway.access" in run.shown()
    assert run.leaks() == []


def test_f13_no_secret_is_in_the_settings_or_in_what_holds_them(run: Run) -> None:
    settings, app = run.live.settings, run.live.app
    shown = [repr(settings), str(settings), f"{settings}", repr(app.state)]
    shown += [repr(msgspec.structs.asdict(part)) for part in _sections(settings)]
    shown.append(json.dumps(msgspec.to_builtins(settings, enc_hook=repr)))
    for text in shown:
        assert [name for name, secret in run.secrets.items() if secret in text] == []
    with pytest.raises(TypeError):
        msgspec.json.encode(settings)  # nobody writes them by mistake


def test_f13_no_example_in_the_document_is_a_key(run: Run) -> None:
    for path in ("/openapi.json", "/docs"):
        assert A_KEY.search(httpx.get(run.live.url + path).text) is None


@pytest.mark.parametrize(
    "environ",
    [
        {"DATABASE_URL": f"mysql://u:{PASSWORD}@h/d"},
        {"DATABASE_URL": f"postgresql://u:{PASSWORD}@h/d", "LORAGATE_SERVER__PORT": PASSWORD},
        {"LORAGATE_KEYS__PEPPER": PASSWORD, "LORAGATE_REDIS__POOL_SIZE": "0"},
        {"REDIS_URL": f"redis://:{PASSWORD}@h:x/0"},
    ],
)
def test_f13_settings_that_cannot_be_used_are_not_repeated(
    environ: dict[str, str], tmp_path: Path
) -> None:
    empty = tmp_path / "loragate.toml"
    empty.touch()
    try:
        shown = repr(load(empty, environ))
    except Exception as error:
        shown = f"{error!r} {error.__cause__!r} {error.__context__!r}"
    if "LORAGATE_SERVER__PORT" not in environ:  # a number is no secret
        assert PASSWORD not in shown


def test_f13_the_session_knows_its_keys_and_sees_what_is_logged(
    pytestconfig: pytest.Config,
) -> None:
    planted = pytestconfig.stash[PLANTED]
    key = key_form.make().text.reveal()
    assert secret_part(key) in planted.secrets
    logging.getLogger("careless").error("the key is %s", key)
    assert secret_part(key) not in planted.seen, "the formatter cut it"
    other = type(planted)()
    other.secrets.add(secret_part(key))
    other.see(f"as it is: {key}.")
    assert other.seen == {secret_part(key)}


def _plain_paths(running: Live) -> list[str]:
    """Of all routes that can be read without naming a thing."""
    return [
        route.path_format
        for route in running.app.routes
        if "GET" in route.methods and "{" not in route.path_format
    ]


def _sections(settings: Settings) -> Iterator[msgspec.Struct]:
    for name in settings.__struct_fields__:
        part = getattr(settings, name)
        if isinstance(part, msgspec.Struct):
            yield part
