"""Checks of a request's values, and what they mean for the engine.

Types were checked in decoding; here are ranges, counts, and the parameters that are known but not
served yet: these may hold their default, which changes nothing.
"""

import secrets
from collections.abc import Callable, Mapping
from typing import Any

from gateway.engine.messages import Sampling
from gateway.errors import InvalidRequest
from gateway.inference.wire import GenerationRequest

STOP_MAX = 4
STOP_CHARS_MAX = 1000
GREEDY_BELOW = 1e-4
"""Temperatures below it choose the likeliest token, and would only overflow when divided by."""
SEED_BITS = 63


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(value == item and type(value) is type(item) for item in values)


def _zero(value: Any) -> bool:
    return type(value) in (int, float) and value == 0


def _empty(value: Any) -> bool:
    return value in ([], {}, "")


def _one(value: Any) -> bool:
    return type(value) in (int, float) and value == 1


def _never(_: Any) -> bool:
    return False


NOT_SERVED: Mapping[str, Callable[[Any], bool]] = {
    "audio": _never,
    "best_of": _one,
    "echo": _one_of(False),
    "frequency_penalty": _zero,
    "function_call": _one_of("none", "auto"),
    "functions": _empty,
    "logit_bias": _empty,
    "logprobs": _one_of(False),
    "modalities": _one_of(["text"]),
    "moderation": _never,
    "n": _one,
    "prediction": _never,
    "presence_penalty": _zero,
    "reasoning_effort": _one_of("none"),
    "repetition_penalty": _one,
    "response_format": _one_of({"type": "text"}),
    "service_tier": _one_of("auto", "default"),
    "suffix": _empty,
    "tool_choice": _one_of("none", "auto"),
    "tools": _empty,
    "top_logprobs": _zero,
    "verbosity": _one_of("medium"),
    "web_search_options": _never,
}
"""Parameter → whether a value that is not null means the same as leaving it out."""


def refuse_not_served(request: GenerationRequest) -> None:
    for name, harmless in NOT_SERVED.items():
        value = getattr(request, name, None)
        if value is not None and not harmless(value):
            raise InvalidRequest(
                f"The parameter '{name}' is not served here yet, except with its default value. "
                "Leave it out.",
                param=name,
                code="unsupported_parameter",
            )


def sampling(request: GenerationRequest) -> Sampling:
    """Raises InvalidRequest for what is out of range. Without a seed, a random one."""
    temperature = in_range("temperature", request.temperature, 0, 2, default=1.0)
    top_p = in_range("top_p", request.top_p, 0, 1, default=1.0)
    top_k = in_range("top_k", request.top_k, -1, 2**31, default=0)
    min_p = in_range("min_p", request.min_p, 0, 1, default=0.0)
    seed = in_range("seed", request.seed, -(2**63), 2**63 - 1, default=None)
    if top_p == 0:  # the smallest nucleus is one token
        top_p, top_k = 1.0, 1
    return Sampling(
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_p=top_p,
        top_k=max(top_k, 0),
        min_p=min_p,
        seed=secrets.randbits(SEED_BITS) if seed is None else seed & (2**SEED_BITS - 1),
    )


def max_tokens(name: str, value: int | None) -> int | None:
    checked: int | None = in_range(name, value, 1, 2**31, default=None)
    return checked


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > STOP_MAX:
        raise InvalidRequest(
            f"Invalid 'stop': array too long. Expected an array with maximum length {STOP_MAX}, "
            f"but got an array with length {len(stops)} instead.",
            param="stop",
            code="array_above_max_length",
        )
    for text in stops:
        if not 0 < len(text) <= STOP_CHARS_MAX:
            raise InvalidRequest(
                f"Invalid 'stop': each string must have 1 to {STOP_CHARS_MAX} characters, one has "
                f"{len(text)}.",
                param="stop",
                code="invalid_value",
            )
    return stops


def in_range(name: str, value: Any, low: float, high: float, *, default: Any) -> Any:
    """The value, or the default for null. Raises InvalidRequest."""
    if value is None:
        return default
    kind = "integer" if isinstance(value, int) else "decimal"
    if value < low:
        raise InvalidRequest(
            f"Invalid '{name}': {kind} below minimum value. Expected a value >= {low}, but got "
            f"{_short(value)} instead.",
            param=name,
            code=f"{kind}_below_min_value",
        )
    if value > high:
        raise InvalidRequest(
            f"Invalid '{name}': {kind} above maximum value. Expected a value <= {high}, but got "
            f"{_short(value)} instead.",
            param=name,
            code=f"{kind}_above_max_value",
        )
    return value


def _short(value: float) -> str:
    text = repr(value) if abs(value) < 1e30 else f"{value:.0e}" if abs(value) < 1e300 else "more"
    return text[:40]
