"""Tables that can be had as files: their media types, and these in the OpenAPI document."""

from dataclasses import dataclass
from typing import Literal

from litestar.openapi.spec import OpenAPIMediaType, OpenAPIResponse, Operation, Schema
from litestar.openapi.spec.enums import OpenAPIType

Format = Literal["csv", "jsonl"]

MEDIA_TYPES: dict[Format, str] = {
    "csv": "text/csv",
    "jsonl": "application/jsonl",
}


@dataclass
class ExportOperation(Operation):
    """A route that answers in one of `MEDIA_TYPES`, whatever else it may answer in."""

    def __post_init__(self) -> None:
        answer = (self.responses or {})["200"]
        assert isinstance(answer, OpenAPIResponse)
        text = OpenAPIMediaType(schema=Schema(type=OpenAPIType.STRING))
        answer.content = dict(answer.content or {}) | dict.fromkeys(MEDIA_TYPES.values(), text)
