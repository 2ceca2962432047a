"""Request bodies for the OpenAPI page. The handlers read them themselves, and strictly."""

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import msgspec
from litestar.openapi.spec import OpenAPIMediaType, Operation, RequestBody, Schema

from gateway.inference.wire import ChatRequest, CompletionRequest


@dataclass
class JsonOperation(Operation):
    body: ClassVar[type[msgspec.Struct]]

    def __post_init__(self) -> None:
        # a schema as plain JSON goes through Litestar's writer unchanged
        schema = cast("Schema", json_schema(self.body))
        self.request_body = RequestBody(
            required=True, content={"application/json": OpenAPIMediaType(schema=schema)}
        )


class ChatOperation(JsonOperation):
    body = ChatRequest


class CompletionOperation(JsonOperation):
    body = CompletionRequest


def json_schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The JSON schema of a struct, self-contained, without the parameters that are not served."""
    (root,), definitions = msgspec.json.schema_components([kind], ref_template="{name}")
    schema: dict[str, Any] = _inline(root, definitions)
    properties = schema["properties"]
    # typed as anything: known, and refused unless harmless
    schema["properties"] = {
        name: value for name, value in properties.items() if value.keys() - {"default"}
    }
    return schema


def _inline(value: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_inline(item, definitions) for item in value]
    if not isinstance(value, dict):
        return value
    if "$ref" in value:
        return _inline(definitions[value["$ref"]], definitions)
    return {
        # null is left out everywhere: Litestar's writer would drop a null default, too
        key: _inline(item, definitions)
        for key, item in value.items()
        if not (key == "default" and item is None)
    }
