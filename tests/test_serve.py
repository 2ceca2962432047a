"""`loragate serve`: how it starts, how it fails to, and how it stops."""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import click
import httpx
import msgspec
import pytest
from click.testing import CliRunner
from litestar import get
from litestar.response import Stream

from gateway import serve
from gateway.app import create_app
from gateway.cli import main
from gateway.serve import Server
from gateway.settings import Server as ServerSettings
from gateway.settings import Settings
from tests.databases import PASSWORD, free_port
from tests.fakes import FakeEngine
from tests.serving import bearer, issue_key, settings_for

START_S = 30.0


@dataclass
class Slow:
    """A route that streams until it is told to stop, or its engine is closed."""

    engine: FakeEngine
    began: threading.Event = field(default_factory=threading.Event)
    leave: threading.Event = field(default_factory=threading.Event)

    async def chunks(self) -> AsyncIterator[bytes]:
        yield b"begin "
        self.began.set()
        while not self.leave.is_set():
            if self.engine.closed:
                yield b"cut"
                return
            await asyncio.sleep(0.01)
        yield b"end"


@dataclass
class Running:
    url: str
    server: Server
    thread: threading.Thread
    engine: FakeEngine
    slow: Slow

    def stop(self) -> None:
        self.server.should_exit = True

    def ended(self, within_s: float = START_S) -> bool:
        self.thread.join(within_s)
        return not self.thread.is_alive()


@contextmanager
def running(settings: Settings, engine: FakeEngine | None = None) -> Iterator[Running]:
    engine = engine or FakeEngine()
    slow = Slow(engine)

    @get("/probe/slow")
    async def slow_route() -> Stream:
        return Stream(slow.chunks())

    app = create_app(settings, engine)
    app.register(slow_route)
    server = Server(settings, app)
    listener = serve._listen(settings)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + START_S
    while not server.started:
        assert thread.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    try:
        yield Running(url, server, thread, engine, slow)
    finally:
        server.should_exit = server.force_exit = True
        slow.leave.set()
        thread.join(START_S)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    plain = settings_for(tmp_path)
    return msgspec.structs.replace(plain, server=ServerSettings(port=0, drain_s=5.0))


def with_drain(settings: Settings, drain_s: float) -> Settings:
    return msgspec.structs.replace(settings, server=ServerSettings(port=0, drain_s=drain_s))


class Reader:
    """A client in a thread that reads the slow route to its end."""

    def __init__(self, url: str) -> None:
        self.text = ""
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._read, args=(url,), daemon=True)
        self._thread.start()

    def _read(self, url: str) -> None:
        try:
            with httpx.stream("GET", f"{url}/probe/slow", timeout=START_S) as response:
                for part in response.iter_text():
                    self.text += part
        except httpx.HTTPError as error:
            self.error = error

    def finish(self) -> str:
        self._thread.join(START_S)
        assert self.error is None
        return self.text


# --- stopping -------------------------------------------------------------------------------------


def test_f23_a_stop_lets_streams_finish_and_sends_new_requests_elsewhere(
    settings: Settings,
) -> None:
    with running(settings) as it:
        reader = Reader(it.url)
        assert it.slow.began.wait(START_S)
        it.stop()
        deadline = time.monotonic() + START_S
        while (response := httpx.get(f"{it.url}/v1/models")).status_code != 503:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert response.json()["error"]["code"] == "overloaded"
        assert response.headers["retry-after"]
        assert response.headers["connection"] == "close"
        assert httpx.get(f"{it.url}/health/ready").json()["server"] == "draining"
        assert httpx.get(f"{it.url}/health/live").status_code == 200
        assert not it.engine.closed
        it.slow.leave.set()
        assert reader.finish() == "begin end"
        assert it.ended()
        assert it.engine.closed


def test_f23_at_the_deadline_the_engine_ends_what_still_runs(settings: Settings) -> None:
    with running(with_drain(settings, 0.3)) as it:
        reader = Reader(it.url)
        assert it.slow.began.wait(START_S)
        began = time.monotonic()
        it.stop()
        assert reader.finish() == "begin cut"  # ended by its own handler, not by the socket
        assert it.ended()
        assert 0.3 <= time.monotonic() - began < 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_of_either_kind_ends_what_runs_with_an_error(
    settings: Settings, number: int
) -> None:
    with running(with_drain(settings, START_S)) as it:
        reader = Reader(it.url)
        assert it.slow.began.wait(START_S)
        it.server.handle_exit(number, None)
        it.server.handle_exit(number, None)
        assert reader.finish() == "begin cut"  # ended by its own handler, not by the socket
        assert it.ended(within_s=5)


def test_an_idle_server_stops_at_once(settings: Settings) -> None:
    with running(settings) as it:
        with httpx.Client() as kept_alive:
            assert kept_alive.get(f"{it.url}/health/live").status_code == 200
            began = time.monotonic()
            it.stop()
            assert it.ended()
        assert time.monotonic() - began < 2
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{it.url}/health/live")


def test_a_server_whose_engine_never_will_be_ready_ends_and_says_why(settings: Settings) -> None:
    engine = FakeEngine(ready=False, load_failure="model.gguf: no GGUF file")
    with running(settings, engine) as it:
        assert it.ended()
        assert it.server.failure == "model.gguf: no GGUF file"


# --- what only a real connection shows ------------------------------------------------------------


def test_f39_a_client_that_sends_too_much_gets_its_413(settings: Settings) -> None:
    limits = ServerSettings(port=0, body_bytes_max=10_000)
    with running(msgspec.structs.replace(settings, server=limits)) as it:
        for content in (b"x" * 10 * 2**20, iter([b"x" * 2**20] * 10)):
            response = httpx.post(f"{it.url}/v1/adapters", content=content)
            assert response.status_code == 401  # who has no key is not read at all
        response = httpx.post(f"{it.url}/v1/models", content=b"x" * 10 * 2**20)
        assert response.status_code == 405


def test_answers_do_not_name_the_server(settings: Settings) -> None:
    with running(settings) as it:
        response = httpx.get(f"{it.url}/health/live")
    assert "server" not in response.headers
    assert response.headers["x-request-id"]


# --- starting -------------------------------------------------------------------------------------


@dataclass
class Run:
    code: int
    out: str
    err: str


Loragate = Callable[..., Run]


@pytest.fixture
def loragate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loragate:
    """The command in this process and an empty folder; its logs are left alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(serve, "configure_logging", lambda: None)

    def run(*arguments: str, **environ: str) -> Run:
        result = CliRunner().invoke(main, arguments, env=environ)
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return Run(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A file that is there; nobody comes to reading it."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    return str(path)


def test_without_a_model_the_setting_is_named(loragate: Loragate) -> None:
    run = loragate("serve")
    assert run.code == 1
    assert run.err.startswith("Error: engine.model is not set")
    assert len(run.err.splitlines()) == 1


def test_a_model_that_is_not_there_is_named(loragate: Loragate) -> None:
    run = loragate("serve", LORAGATE_MODEL="/no/such/model.gguf")
    assert run.code == 1
    assert run.err == "Error: engine.model: there is no /no/such/model.gguf.\n"


def test_a_port_in_use_is_named_before_anything_is_started(
    loragate: Loragate, tmp_path: Path, model: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        run = loragate("serve", LORAGATE_MODEL=model, LORAGATE_SERVER__PORT=port)
    assert run.code == 1
    assert run.err.startswith(f"Error: server.port: {port} on 127.0.0.1 is in use")
    assert len(run.err.splitlines()) == 1
    assert not (tmp_path / ".loragate").exists()


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_that_is_not_ours_is_named(host: str, loragate: Loragate, model: str) -> None:
    run = loragate("serve", LORAGATE_MODEL=model, LORAGATE_SERVER__HOST=host)
    assert run.code == 1
    assert run.err.startswith("Error: server.host:")
    assert host in run.err


def test_settings_that_cannot_be_used_are_named(loragate: Loragate) -> None:
    run = loragate("serve", LORAGATE_SERVER__PRT="1")
    assert run.code == 1
    assert "`prt`" in run.err
    assert len(run.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({"LORAGATE_KEYS__PEPPER": "short"}, "keys.pepper: needs at least"),
        ({"ADAPTER_STORE": "/proc/x"}, "adapters.store: "),
    ],
)
def test_what_only_opening_shows_to_be_wrong_is_one_line(
    environ: dict[str, str], reason: str, loragate: Loragate, model: str
) -> None:
    run = loragate("serve", LORAGATE_MODEL=model, LORAGATE_SERVER__PORT="0", **environ)
    assert run.code == 1
    assert run.err.startswith(f"Error: {reason}")
    assert len(run.err.splitlines()) == 1


def test_a_data_dir_that_cannot_keep_usage_is_one_line(
    loragate: Loragate, model: str, tmp_path: Path
) -> None:
    (tmp_path / "usage").touch()  # where a folder should be
    environ = {"LORAGATE_DATA_DIR": str(tmp_path), "LORAGATE_SERVER__PORT": "0"}
    run = loragate("serve", LORAGATE_MODEL=model, **environ)
    assert run.code == 1
    assert run.err.splitlines()[-1].startswith("Error: data_dir: usage cannot be kept there: ")
    assert "Traceback" not in run.err


def test_help_is_there_even_if_the_settings_cannot_be_used(loragate: Loragate) -> None:
    for arguments in (["--help"], ["serve", "--help"], ["keys", "create", "--help"]):
        run = loragate(*arguments, LORAGATE_SERVER__PRT="1")
        assert run.code == 0, run.err
        assert "Usage:" in run.out


def test_f13_a_database_that_is_away_is_one_line_without_its_password(
    loragate: Loragate, model: str
) -> None:
    url = f"postgresql://u:{PASSWORD}@127.0.0.1:{free_port()}/d"
    run = loragate("serve", LORAGATE_MODEL=model, DATABASE_URL=url, LORAGATE_SERVER__PORT="0")
    assert run.code == 1
    assert "database.url" in run.err
    assert PASSWORD not in run.out + run.err
    assert "Traceback" not in run.err


@contextmanager
def process(folder: Path, model: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """The command as users start it, with its real engine."""
    root = Path(__file__).resolve().parent.parent
    environ = {"LORAGATE_MODEL": str(model), "LORAGATE_SERVER__PORT": "0"}
    with subprocess.Popen(
        [sys.executable, "-m", "gateway", "serve", *options],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(root), **environ},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as started:
        try:
            yield started
        finally:
            started.kill()


def test_a_model_that_cannot_be_loaded_ends_the_server_with_the_reason(
    tmp_path: Path, model: str
) -> None:
    with process(tmp_path, Path(model)) as server:
        _, told = server.communicate(timeout=60)
    assert server.returncode == 1, told
    assert told.splitlines()[-1].startswith("Error: The engine cannot start: ")
    assert "model.gguf" in told.splitlines()[-1]


def test_a_signal_while_the_model_loads_stops_it_well(tmp_path: Path, base_model: Path) -> None:
    with process(tmp_path, base_model) as server:
        assert server.stderr is not None
        assert any("startup complete" in line for line in server.stderr)
        server.send_signal(signal.SIGTERM)
        _, rest = server.communicate(timeout=60)
    assert "Traceback" not in rest
    assert server.returncode in (0, -signal.SIGTERM)


def test_a_server_told_to_stops_when_its_stdin_ends(tmp_path: Path, base_model: Path) -> None:
    with process(tmp_path, base_model, "--until-stdin-ends") as server:
        assert server.stderr is not None
        assert any("startup complete" in line for line in server.stderr)
        _, rest = server.communicate(timeout=60)  # which closes stdin
    assert "Traceback" not in rest
    assert "Shutting down" in rest
    assert server.returncode in (0, -signal.SIGTERM)


def test_the_command_fails_where_the_server_says_why(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"")
    engine = FakeEngine(ready=False, load_failure="planned")
    monkeypatch.setattr(serve, "configure_logging", lambda: None)
    named = msgspec.structs.replace(
        settings, engine=msgspec.structs.replace(settings.engine, model=str(model))
    )
    logging.getLogger("uvicorn.error").setLevel(logging.INFO)
    with pytest.raises(click.ClickException, match="planned"):
        serve.serve(named, engine)


def test_f15_nobody_but_a_trusted_proxy_says_where_a_request_comes_from(tmp_path: Path) -> None:
    """uvicorn by itself believes every process of this machine."""
    asked = {"x-forwarded-for": "203.0.113.9", "x-forwarded-proto": "https"}
    for trusted, status in (("", 200), ("127.0.0.0/8", 403)):
        folder = tmp_path / f"data{status}"
        settings = msgspec.structs.replace(
            settings_for(folder), server=ServerSettings(port=0, trusted_proxies=trusted)
        )
        with running(settings) as gateway:
            issued = asyncio.run(issue_key(settings, allowed_networks=["127.0.0.1"]))
            answer = httpx.get(f"{gateway.url}/v1/models", headers=bearer(issued) | asked)
            assert answer.status_code == status, answer.text
