"""How a handler asks for a part of the app: `engine: Injected[Engine]`, by the parameter's name."""

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Annotated, TypeAlias, TypeVar

from litestar.di import Dependency, Provide
from litestar.params import SkipValidationMarker

T = TypeVar("T")

Injected: TypeAlias = Annotated[T, Dependency(), SkipValidationMarker()]
"""Named, as Litestar 3 demands; not validated, since the app made it."""


def in_turn(**parts: object) -> dict[str, Provide]:
    """Providers of parts that are there already, each in need of the one before.

    They could do without: but Litestar resolves independent dependencies in a task group, and that
    costs a request with six of them more time than all the rest of its way.
    """
    provided: dict[str, Provide] = {}
    for name, part in parts.items():
        before = next(reversed(provided), None)
        provided[name] = Provide(_giver(part, before), use_cache=True, sync_to_thread=False)
    return provided


def _giver(part: object, before: str | None) -> Callable[..., object]:
    def give(**_: object) -> object:
        return part

    names = [before] if before else []
    parameters = [
        Parameter(name, Parameter.KEYWORD_ONLY, annotation=Injected[object]) for name in names
    ]
    give.__signature__ = Signature(parameters, return_annotation=object)  # type: ignore[attr-defined]  # inspect reads it
    give.__annotations__ = dict.fromkeys(names, Injected[object]) | {"return": object}
    return give
