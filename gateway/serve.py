"""`loragate serve`: the app on uvicorn, with a stop that cuts nobody off."""

import asyncio
import errno
import logging
import os
import signal
import socket
import threading
from types import FrameType

import click
import uvicorn
from litestar import Litestar

from gateway.adapters.store import AdapterStore, store_folder
from gateway.app import create_app
from gateway.drain import Drain
from gateway.engine.client import Engine, EngineFailure
from gateway.http_protocol import HttpProtocol
from gateway.migrate import prepare
from gateway.settings import Settings, SettingsError, check_model
from gateway.telemetry import configure_logging
from gateway.tenants.auth import bootstrap_key
from gateway.tenants.pepper import open_key_hash
from gateway.tenants.usage.journal import Journal
from gateway.tenants.usage.meter import journal_folder

log = logging.getLogger(__name__)

CUT_S = 3
"""What is left after draining gets this long to send its client an error."""
POLL_S = 0.1


def serve(settings: Settings, engine: Engine) -> None:
    """Serve until a signal. Raises SettingsError, DatabaseUnavailable, and ClickException."""
    check_model(settings)
    with _listen(settings) as listener:
        configure_logging()
        _prepare(settings)
        server = Server(settings, create_app(settings, engine))
        host, port = listener.getsockname()[:2]
        log.info("serving on http://%s:%d", f"[{host}]" if ":" in host else host, port)
        server.run(sockets=[listener])
    if server.failure:
        raise click.ClickException(f"The engine cannot start: {server.failure}")


def stop_when_stdin_ends() -> None:
    """Stop as after SIGTERM when stdin ends: it is a pipe from a parent that has ended then."""

    def watch() -> None:
        # Not sys.stdin: its lock, held by this thread, would make the interpreter's shutdown fail.
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


class Server(uvicorn.Server):
    """Drains before it closes, and ends when the engine never will be ready."""

    def __init__(self, settings: Settings, app: Litestar) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="uvloop",
                http=HttpProtocol,
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # whose word counts is `server.trusted_proxies`' to say
                timeout_graceful_shutdown=CUT_S,
            )
        )
        self.failure = ""
        """Why the engine cannot start."""
        self._engine: Engine = app.state.engine
        self._drain: Drain = app.state.drain
        self._drain_s = settings.server.drain_s

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """uvicorn's own, but a second SIGTERM counts as much as a second Ctrl-C."""
        again = self.should_exit
        super().handle_exit(sig, frame)
        self.force_exit = self.force_exit or again

    async def main_loop(self) -> None:
        watching = asyncio.create_task(self._watch_engine())
        try:
            await super().main_loop()
        finally:
            watching.cancel()

    async def _watch_engine(self) -> None:
        try:
            info = await self._engine.wait_ready()
        except EngineFailure as failure:
            self.failure = failure.detail
            self.should_exit = True
        else:
            log.info("ready: %s (%s, %s)", info.name, info.dtype, info.device)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """New requests get 503 at once; running ones may finish, and at the deadline end with an
        error. A second signal skips the wait, a third one the error as well."""
        self._drain.begin()
        if self._drain.running:
            log.info("draining: %d requests may finish", self._drain.running)
        left_s = self._drain_s
        while left_s > 0 and not self.force_exit:
            if await self._drain.finished(within_s=min(POLL_S, left_s)):
                break
            left_s -= POLL_S
        else:
            log.warning("stopping with %d requests unfinished", self._drain.running)
            self.force_exit = False  # for uvicorn it would mean: wait for nothing, close nothing
            await self._engine.close()  # ends them with an error, which their clients still get
        await super().shutdown(sockets)


def _prepare(settings: Settings) -> None:
    """What the app does again when it starts; here, its errors are a line and no traceback."""
    asyncio.run(prepare(settings))
    bootstrap_key(settings, open_key_hash(settings))
    try:
        AdapterStore(store_folder(settings)).open()
    except OSError as error:
        raise SettingsError(f"adapters.store: {error}") from None
    try:
        Journal.create(journal_folder(settings)).close()
    except OSError as error:
        raise SettingsError(f"data_dir: usage cannot be kept there: {error}") from None


def _listen(settings: Settings) -> socket.socket:
    """Before anything is started: whoever took the port keeps it."""
    host, port = settings.server.host, settings.server.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
        except OSError:
            listener.close()
            raise
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise SettingsError(
                f"server.port: {port} on {host} is in use by another program. "
                "Stop it, or choose another one, LORAGATE_SERVER__PORT=8081."
            ) from None
        raise SettingsError(f"server.host: cannot listen on {host}:{port}: {error}") from None
    return listener
