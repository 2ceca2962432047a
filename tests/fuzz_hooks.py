"""For schemathesis: most of the bodies that it makes name a model that is there."""

from typing import Any

import schemathesis

from tests.fakes import model_info

BASE = model_info().name


@schemathesis.hook
def map_body(_context: Any, body: Any) -> Any:
    if isinstance(body, dict) and isinstance(body.get("model"), str) and body["model"]:
        return body | {"model": BASE}
    return body
