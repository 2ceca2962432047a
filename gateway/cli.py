"""`loragate`: the commands of every package; they fail with a line that says what to change."""

import asyncio
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from gateway import __version__
from gateway.errors import ApiError
from gateway.settings import Settings, SettingsError, check_model
from gateway.shell import pass_settings
from gateway.telemetry import redact

ELSEWHERE = (
    "gateway.tenants.commands",
    "gateway.tenants.usage.commands",
    "gateway.adapters.commands",
    "gateway.bench.commands",
    "gateway.demo.commands",
)
"""Modules with more commands. Imported once one of them is asked for: `serve` should not wait."""


class Loragate(click.Group):
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.commands:
            self._import_all()
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: click.Context) -> list[str]:
        self._import_all()
        return super().list_commands(ctx)

    def _import_all(self) -> None:
        for module in ELSEWHERE:
            for command in import_module(module).commands:
                self.add_command(command)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (SettingsError, ApiError) as error:
            raise click.ClickException(redact(str(error))) from error


@click.group(cls=Loragate)
@click.version_option(__version__)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="Settings; default: loragate.toml in this folder, if it is there.",
)
def main(config: Path | None) -> None:
    """Many tenants' LoRA adapters, one shared base model."""


@main.command("serve")
@click.option("--until-stdin-ends", is_flag=True, hidden=True)  # for a parent that may be killed
@pass_settings
def serve_command(current: Settings, until_stdin_ends: bool) -> None:
    """Serve the API until stopped."""
    from gateway.engine.process import ProcessEngine

    check_model(current)
    engine = ProcessEngine(current.engine)
    with engine.ahead():
        from gateway.serve import serve, stop_when_stdin_ends  # the web framework is slow to load

        if until_stdin_ends:
            stop_when_stdin_ends()
        serve(current, engine)


@main.command("migrate")
@pass_settings
def migrate_command(current: Settings) -> None:
    """Bring the database up to date. `serve` does it too; this is for a step of its own."""
    from gateway.migrate import prepare

    url = asyncio.run(prepare(current))
    click.echo(f"The database is up to date: {url.render_as_string(hide_password=True)}")
