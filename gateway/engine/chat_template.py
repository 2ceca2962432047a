"""A model's chat template: messages in, prompt text out. Needs no torch.

The template comes with the model and is treated as data: it runs in Jinja's immutable sandbox, set
up as transformers sets it up so that it renders the same text, with limits on its own size and on
what it writes.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from gateway.engine.model.errors import ModelError

SOURCE_CHARS_MAX = 1 << 18
RENDERED_CHARS_MAX = 1 << 25
"""Far above what any context holds; only a runaway template writes more."""


class ChatTemplateError(Exception):
    """The template refuses these messages. The text is fit for the client that sent them."""


class ChatTemplate:
    """A compiled template with the names it may use beside `messages`."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: `bos_token`, `eos_token`, … → text. Raises ModelError."""
        if len(source) > SOURCE_CHARS_MAX:
            raise ModelError(
                f"The chat template has {len(source)} characters; at most {SOURCE_CHARS_MAX} do."
            )
        self.source = source
        try:
            self._template = _environment().from_string(source, globals=dict(special_tokens))
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(f"The chat template cannot be read: {error}.") from error

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt of a conversation, up to where the assistant's answer begins.

        Raises ChatTemplateError.
        """
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(
                messages=messages, tools=None, documents=None, add_generation_prompt=True
            ):
                pieces.append(piece)
                size += len(piece)
                if size > RENDERED_CHARS_MAX:
                    raise ChatTemplateError("The chat template makes too long a prompt of these.")
        except jinja2.TemplateError as error:
            raise ChatTemplateError(
                f"The model's chat template refuses these messages: {error.message}"
            ) from error
        # A template is a program of its own, and may fail on messages it was not written for in
        # any way that Python has; whatever it is, it is about these messages.
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ChatTemplateError(
                f"The model's chat template cannot render these messages: {error}"
            ) from error
        except (RecursionError, MemoryError) as error:
            raise ChatTemplateError(
                "The chat template makes too much of these messages."
            ) from error
        return "".join(pieces)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _make_dict
    environment.globals["namespace"] = _PlainNamespace
    return environment


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}`, which marks answers for training: just its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainNamespace(Namespace):
    """Jinja's namespace without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # All positional, so that a template may write namespace(self=…).
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace must not have the name {name!r}")


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
