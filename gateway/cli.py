"""`loragate`: the commands of every package; they fail with a line that says what to change."""

import asyncio
from pathlib import Path
from typing import Any

import click

from gateway import __version__
from gateway.adapters.commands import commands as adapter_commands
from gateway.bench.commands import commands as bench_commands
from gateway.demo.commands import commands as demo_commands
from gateway.errors import ApiError
from gateway.migrate import prepare
from gateway.settings import Settings, SettingsError
from gateway.shell import pass_settings
from gateway.telemetry import redact
from gateway.tenants.commands import commands as tenant_commands


class Loragate(click.Group):
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
    from gateway.serve import serve, stop_when_stdin_ends  # the web framework is slow to load

    if until_stdin_ends:
        stop_when_stdin_ends()
    serve(current)


@main.command("migrate")
@pass_settings
def migrate_command(current: Settings) -> None:
    """Bring the database up to date. `serve` does it too; this is for a step of its own."""
    url = asyncio.run(prepare(current))
    click.echo(f"The database is up to date: {url.render_as_string(hide_password=True)}")


for command in (*tenant_commands, *adapter_commands, *bench_commands, *demo_commands):
    main.add_command(command)
