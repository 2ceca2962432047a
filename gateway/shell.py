"""What commands of the shell share."""

from collections.abc import Callable
from functools import update_wrapper
from typing import Concatenate, ParamSpec, TypeVar

import click

from gateway import settings
from gateway.settings import Settings

P = ParamSpec("P")
T = TypeVar("T")


def pass_settings(command: Callable[Concatenate[Settings, P], T]) -> Callable[P, T]:
    """Give the settings as the first argument. They are read only when the command runs: its
    --help, and commands that need none, work without."""

    def run(*arguments: P.args, **options: P.kwargs) -> T:
        file = click.get_current_context().find_root().params.get("config")
        return command(settings.load(file), *arguments, **options)

    return update_wrapper(run, command)
