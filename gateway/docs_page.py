"""The API's page at /docs, made here from the OpenAPI document.

Litestar's own pages load their scripts from a CDN: they show nothing on a machine without one, and
tell it who reads what. This one is plain HTML.
"""

import json
from collections.abc import Iterator
from html import escape
from typing import Any

from litestar import Request
from litestar.exceptions import NotFoundException
from litestar.openapi.plugins import OpenAPIRenderPlugin

Json = dict[str, Any]

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
       color-scheme: light dark; }
code, pre { font: 14px/1.5 ui-monospace, monospace; }
pre { overflow-x: auto; padding: .7rem; background: #8881; }
table { border-collapse: collapse; width: 100%; }
td { border-top: 1px solid #8884; padding: .25rem .5rem; vertical-align: top; }
h2 { margin-top: 2.5rem; }
"""


class DocsPage(OpenAPIRenderPlugin):
    def __init__(self) -> None:
        super().__init__(path="/")

    def render(self, request: Request[Any, Any, Any], openapi_schema: Json) -> bytes:
        return page(openapi_schema, str(request.base_url).rstrip("/")).encode()


async def only_the_page(request: Request[Any, Any, Any]) -> None:
    """Litestar answers unknown paths below its own routes in HTML; ours have one error shape."""
    if "path" in request.path_params:
        raise NotFoundException


def page(schema: Json, base_url: str) -> str:
    info = schema["info"]
    title = f"{escape(info['title'])} {escape(info['version'])}"
    return "\n".join(
        [
            f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>",
            "<meta name=viewport content='width=device-width'>",
            f"<style>{STYLE}</style><h1>{title}</h1><p>{escape(info.get('description', ''))}",
            "<p>As a document for tools: <a href='/openapi.json'>openapi.json</a>",
            *_operations(schema, base_url),
            "<h1>Objects</h1>",
            *_objects(schema.get("components", {}).get("schemas", {})),
        ]
    )


def _operations(schema: Json, base_url: str) -> Iterator[str]:
    for path, item in schema["paths"].items():
        for method, operation in item.items():
            if not isinstance(operation, dict) or "responses" not in operation:
                continue
            yield f"<h2 id='{escape(operation.get('operationId', ''))}'><code>"
            yield f"{method.upper()} {escape(path)}</code></h2>"
            yield f"<p><b>{escape(operation.get('summary', ''))}</b>"
            yield f"<p>{escape(operation.get('description', ''))}"
            yield f"<pre>{escape(_curl(method, base_url + path, operation))}</pre>"
            yield _table(
                (parameter["name"], _type(parameter.get("schema", {})), _text(parameter))
                for parameter in operation.get("parameters", [])
            )
            yield from _body(operation)
            yield _table(
                (status, " ".join(map(_type, _schemas(answer))), _text(answer))
                for status, answer in operation["responses"].items()
            )


def _curl(method: str, url: str, operation: Json) -> str:
    parts = ["curl"] if method == "get" else [f"curl -X {method.upper()}"]
    if operation.get("security") != [{}]:
        parts.append('-H "Authorization: Bearer $LORAGATE_API_KEY"')
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        if media == "multipart/form-data":
            parts += [
                f"-F {name}={'@FILE' if field.get('format') == 'binary' else '…'}"
                for name, field in content["schema"].get("properties", {}).items()
            ]
        else:
            parts += [f'-H "Content-Type: {media}"', "-d @body.json"]
    return " \\\n  ".join([*parts, url])


def _body(operation: Json) -> Iterator[str]:
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        yield f"<p>Body, {escape(media)}: {_type(content.get('schema', {}))}"


def _schemas(answer: Json) -> list[Json]:
    return [content.get("schema", {}) for content in answer.get("content", {}).values()]


def _objects(schemas: Json) -> Iterator[str]:
    for name, schema in sorted(schemas.items()):
        required = schema.get("required", [])
        title = escape(schema.get("title", name))
        yield f"<h2 id='object-{escape(name)}'><code>{title}</code></h2>"
        yield f"<p>{escape(schema.get('description', ''))}"
        yield _table(
            (field + (" *" if field in required else ""), _type(of), _text(of))
            for field, of in schema.get("properties", {}).items()
        )
    yield "<p>* always there"


def _type(schema: Json) -> str:
    """A schema in a few words of HTML, its objects as links."""
    if reference := schema.get("$ref"):
        name = reference.rsplit("/", 1)[-1]
        return f"<a href='#object-{escape(name)}'>{escape(name.rsplit('_', 1)[-1])}</a>"
    for union in ("oneOf", "anyOf"):
        if union in schema:
            return " or ".join(map(_type, schema[union]))
    if "enum" in schema:
        return escape(" | ".join(json.dumps(value) for value in schema["enum"]))
    kind = schema.get("type", "anything")
    if kind == "array":
        return f"array of {_type(schema.get('items', {}))}"
    return escape(" or ".join(kind) if isinstance(kind, list) else str(kind))


def _text(item: Json) -> str:
    return escape(str(item.get("description") or ""))


def _table(rows: Iterator[tuple[str, str, str]]) -> str:
    """The first column is text, the others HTML already."""
    lines = [f"<tr><td><code>{escape(name)}</code><td>{a}<td>{b}" for name, a, b in rows]
    return f"<table>{''.join(lines)}</table>" if lines else ""
