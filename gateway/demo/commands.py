"""`loragate demo`: the real server, two tenants, three adapters, and lines to paste."""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import httpx

from gateway.demo import base_model
from gateway.demo.check import check_borders, converse, judge, report, table
from gateway.demo.content import BASE_NAME
from gateway.demo.progress import Status, StepFailed
from gateway.demo.seeding import seed
from gateway.demo.server import ServerProcess, free_port
from gateway.demo.welcome import welcome
from gateway.settings import PREFIX, SHORT_NAMES, Settings, load

HOST = "127.0.0.1"


@click.command()
@click.option("--check", "checking", is_flag=True, help="Check the demo, and stop.")
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    help="Default: the configured one; with --check one that is free.",
)
@click.pass_context
def demo(ctx: click.Context, checking: bool, port: int | None) -> None:
    """Serve a small model with the adapters of two tenants, ready to be called.

    A second start changes nothing that it finds. With --check nothing is kept but the
    downloaded base model: the demo runs in a folder of its own, its conversation is checked, and
    the exit status is 0 if all was right.
    """
    config: Path | None = ctx.parent.params["config"] if ctx.parent else None
    try:
        with _stop_signals_raise():
            if checking:
                sys.exit(_check(config, port or free_port(HOST)))
            _serve(config, port)
    except StepFailed as failure:
        raise click.ClickException(f"The demo did not work. {failure}") from None
    except KeyboardInterrupt:
        click.echo("\nStopped.")


commands: list[click.Command] = [demo]


def _serve(config: Path | None, port: int | None) -> None:
    settings = load(config)
    settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    environ = dict(os.environ) | _model(settings)
    log = settings.data_dir / "demo-server.log"
    with ServerProcess(HOST, port or settings.server.port, environ, log, config) as server:
        server.wait_ready()
        keys = asyncio.run(seed(settings, server.base_url))
        click.echo(welcome(server.base_url, keys, log))
        code = server.wait()
        raise StepFailed(f"The server stopped with exit status {code}.\n{server.log_tail()}")


def _check(config: Path | None, port: int) -> int:
    with tempfile.TemporaryDirectory(prefix="loragate-check-") as folder:
        environ = _throw_away(Path(folder), _model(load(config)))
        settings = load(config, environ)
        with ServerProcess(HOST, port, environ, Path(folder) / "server.log", config) as server:
            server.wait_ready()
            keys = asyncio.run(seed(settings, server.base_url))
            try:
                with Status("Asking every adapter of both tenants at the same time"):
                    answers = asyncio.run(converse(server.base_url, keys))
                click.echo(table(answers))
                findings = judge(answers) + asyncio.run(check_borders(server.base_url, keys))
            except (httpx.HTTPError, ValueError) as error:
                raise StepFailed(f"A request failed: {error}\n{server.log_tail()}") from None
    click.echo(report(findings))
    return 0 if all(finding.holds for finding in findings) else 1


def _model(settings: Settings) -> dict[str, str]:
    """The variables that give a server the configured base model, or else the demo's own."""
    path = settings.engine.model or str(base_model.ensure(settings.data_dir).resolve())
    return {"LORAGATE_MODEL": path, "LORAGATE_ENGINE__NAME": BASE_NAME}


def _throw_away(folder: Path, model: dict[str, str]) -> dict[str, str]:
    """The environment of a server that keeps everything in `folder`, whatever is configured."""
    mine = {
        name: value
        for name, value in os.environ.items()
        if name not in SHORT_NAMES
        and (not name.startswith(PREFIX) or name.startswith(f"{PREFIX}ENGINE__"))
    }
    return (
        mine
        | model
        | {
            "LORAGATE_DATA_DIR": str(folder),
            "LORAGATE_DATABASE__URL": "",
            "LORAGATE_ADAPTERS__STORE": "",
            "LORAGATE_KEYS__PEPPER": "",
        }
    )


@contextmanager
def _stop_signals_raise() -> Iterator[None]:
    """Let SIGTERM and a closed terminal stop the demo as Ctrl-C does, so that its server stops."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
