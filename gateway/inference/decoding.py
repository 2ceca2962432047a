"""From the bytes of a body to a request struct, or a 400 that says which parameter is wrong."""

import re
from typing import TypeVar

import msgspec

from gateway.errors import InvalidRequest

T = TypeVar("T")

# What msgspec says. Its wording is a part of its interface that our tests pin.
WRONG_TYPE = re.compile(r"Expected `(?P<expected>[^`]+)`, got `(?P<got>[^`]+)`(?P<where>.*)")
UNKNOWN_FIELD = re.compile(
    r"Object contains unknown field `(?P<name>.*?)`(?P<where> - at `.*`)?", re.S
)
MISSING_FIELD = re.compile(r"Object missing required field `(?P<name>[^`]+)`(?P<where>.*)")
PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`")

WORDS = {
    "str": "a string",
    "int": "an integer",
    "float": "a decimal",
    "bool": "a boolean",
    "array": "an array",
    "object": "an object",
    "null": "null",
}


def decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Raises InvalidRequest with `param`, in the words of OpenAI's own errors."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"The request body cannot be read as JSON. {error}.") from None
    except RecursionError:
        raise InvalidRequest("The request body is nested too deeply.") from None


def _invalid(message: str) -> InvalidRequest:
    if match := UNKNOWN_FIELD.fullmatch(message):
        return _unknown(_path(match["where"] or ""), match["name"])
    if match := MISSING_FIELD.fullmatch(message):
        param = _join(_path(match["where"]), match["name"])
        return InvalidRequest(
            f"Missing required parameter: '{param}'.",
            param=param,
            code="missing_required_parameter",
        )
    if match := WRONG_TYPE.fullmatch(message):
        param = _path(match["where"])
        if not param:
            return InvalidRequest("The request body must be a JSON object.")
        return InvalidRequest(
            f"Invalid type for '{param}': expected {_words(match['expected'])}, but got "
            f"{_words(match['got'])} instead.",
            param=param,
            code="invalid_type",
        )
    param = _path(message)
    return InvalidRequest(
        f"Invalid value for '{param}': {PATH.sub('', message)}.", param=param, code="invalid_value"
    )


def _unknown(parent: str, name: str) -> InvalidRequest:
    param = _join(parent, name)[:100]
    if parent:
        return InvalidRequest(
            f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter"
        )
    return InvalidRequest(f"Unrecognized request argument supplied: {param}", param=param)


def _path(where: str) -> str:
    match = PATH.search(where)
    return match["path"] if match else ""


def _join(parent: str, name: str) -> str:
    return f"{parent}.{name}" if parent else name


def _words(kinds: str) -> str:
    words = [WORDS.get(kind, kind) for kind in kinds.split(" | ") if kind != "null"] or ["null"]
    return " or ".join(words)
