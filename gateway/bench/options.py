"""Kinds of options of `loragate bench`."""

import json
import math
from typing import Any

import click

from gateway.bench.shape import Range, SharedPrefix

COUNT_MAX = 2**31 - 1


class Lengths(click.ParamType[Range]):
    """LOW:HIGH, both included."""

    name = "LOW:HIGH"

    def __init__(self, least: int) -> None:
        self._least = least

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> Range:
        if isinstance(value, Range):
            return value
        low, high = _pair(self, value, param, ctx)
        if not self._least <= low <= high <= COUNT_MAX:
            self.fail(
                f"{value!r}: LOW must be at least {self._least}, and HIGH no less than LOW.",
                param,
                ctx,
            )
        return Range(low, high)


class Prefix(click.ParamType[SharedPrefix]):
    name = "TOKENS:GROUPS"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> SharedPrefix:
        if isinstance(value, SharedPrefix):
            return value
        tokens, groups = _pair(self, value, param, ctx)
        if not (1 <= tokens <= COUNT_MAX and 1 <= groups <= COUNT_MAX):
            self.fail(f"{value!r}: both must be at least 1.", param, ctx)
        return SharedPrefix(tokens, groups)


class JsonObject(click.ParamType[dict[str, Any]]):
    name = "JSON"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, Any]:
        try:
            decoded = value if isinstance(value, dict) else json.loads(value)
        except ValueError as error:
            self.fail(f"this is not JSON: {error}.", param, ctx)
        if not isinstance(decoded, dict):
            self.fail("it must be a JSON object, like '{\"top_k\": 1}'.", param, ctx)
        return decoded


class Finite(click.FloatRange):
    """A range without NaN, which is neither below nor above any limit, and without infinity."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


def _pair(
    kind: click.ParamType[Any], value: Any, param: click.Parameter | None, ctx: click.Context | None
) -> tuple[int, int]:
    parts = str(value).split(":")
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() for part in parts):
        kind.fail(f"{value!r} is not {kind.name}, two whole numbers like 64:256.", param, ctx)
    return int(parts[0]), int(parts[1])
