"""Writes docs/configuration.md from the settings: `python -m scripts.docs_configuration`.

Names, types and defaults come from the structs, the meaning from the string below each field.
"""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args, get_origin

import msgspec
from msgspec import NODEFAULT, Struct

from gateway.settings import PREFIX, SHORT_NAMES, Secret, Settings

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

HEAD = """# Configuration

<!-- Made from gateway/settings.py by `make docs`; changes here are lost. -->

Everything has a default that works on one machine. To change something, put it into a file
`loragate.toml` in the folder that Loragate is started in, or into an environment variable; the
environment wins.

```toml
# loragate.toml
[server]
port = 9000

[engine]
model = "/models/Llama-3.2-1B-Instruct"
pool_mib = 8192
```

```sh
LORAGATE_SERVER__PORT=9000 LORAGATE_MODEL=/models/Llama-3.2-1B-Instruct loragate serve
```

A value that cannot be used stops the start with a message that names it, and so does a setting
that does not exist, in the file or as a variable with a double underscore (`LORAGATE_SERVER__PRT`).
Other unknown variables that begin with `LORAGATE_` are ignored: Kubernetes makes such ones for a
service named loragate. Secrets are never shown in a log, an error or a `repr`.
"""

SECTIONS = {
    "": "Where data is kept",
    "server": "The HTTP server",
    "database": "The database",
    "redis": "Redis",
    "limits": "Limits",
    "adapters": "Adapters",
    "keys": "API keys",
    "usage": "Usage and budgets",
    "engine": "The engine",
}


class Row(Struct, frozen=True):
    path: tuple[str, ...]
    kind: str
    default: str
    meaning: str


def main() -> None:
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(PAGE.parent.parent)}")


def page() -> str:
    return HEAD + "".join(_section(name, rows) for name, rows in sections().items())


def sections() -> dict[str, list[Row]]:
    """Rows by the name of their table in `loragate.toml`; "" is the top."""
    found: dict[str, list[Row]] = {"": []}
    for row in rows(Settings):
        found.setdefault(row.path[0] if len(row.path) > 1 else "", []).append(row)
    return found


def rows(struct: type[Struct], parents: tuple[str, ...] = ()) -> Iterator[Row]:
    meanings = field_docstrings(struct)
    for field in msgspec.structs.fields(struct):
        path = (*parents, field.name)
        if isinstance(field.type, type) and issubclass(field.type, Struct):
            yield from rows(field.type, path)
        else:
            default = field.default if field.default is not NODEFAULT else field.default_factory()
            yield Row(path, _kind(field.type), _shown(default), meanings.get(field.name, ""))


def field_docstrings(struct: type[Struct]) -> dict[str, str]:
    """The string literal below each field, as one line."""
    (definition,) = ast.parse(inspect.getsource(struct)).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = " ".join(text.split())
    return found


def _section(name: str, rows: list[Row]) -> str:
    title = SECTIONS[name] + (f": `[{name}]`" if name else "")
    lines = [
        f"\n## {title}\n",
        "| setting | environment | type | default | meaning |",
        "|---|---|---|---|---|",
        *(
            f"| `{row.path[-1]}` | {_variables(row.path)} | {row.kind} | {row.default} "
            f"| {row.meaning} |"
            for row in rows
        ),
    ]
    return "\n".join(lines) + "\n"


def _variables(path: tuple[str, ...]) -> str:
    names = [PREFIX + "__".join(path).upper()]
    names += [short for short, meant in SHORT_NAMES.items() if meant == path]
    return ", ".join(f"`{name}`" for name in names)


def _kind(kind: object) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(kind))
    names = {bool: "yes/no", int: "whole number", float: "number", str: "text", Path: "path"}
    return "secret" if kind is Secret else names[kind]  # type: ignore[index] # settings have these


def _shown(value: object) -> str:
    shown = "" if isinstance(value, Secret) else str(value)
    return f"`{shown}`" if shown else "empty"


if __name__ == "__main__":
    main()
