"""A gateway of its own process that kills itself at a named step, for the tests of crashes.

    python -m tests.adapters.crashing FOLDER PORT [STEP]

The process ends as with `kill -9` before the step, or after it if its name ends with "+".
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import uvicorn

from gateway.adapters import catalog
from gateway.adapters.resumable import rows
from gateway.adapters.resumable.spool import Spool, _Writing
from gateway.adapters.resumable.uploads import Uploads
from gateway.adapters.sandbox import Sandbox
from gateway.adapters.store import AdapterStore
from gateway.app import create_app
from gateway.settings import Adapters
from tests.adapters.conftest import ADAPTERS_MAX, UPLOAD_BYTES_MAX
from tests.fakes import FakeEngine, byte_tokenizer_folder, model_info
from tests.serving import settings_for

STEPS: dict[str, tuple[Any, str]] = {
    "rows.create": (rows, "create"),
    "spool.begin": (Spool, "_begin"),
    "spool.write": (_Writing, "write"),
    "spool.keep": (_Writing, "keep"),
    "rows.add_part": (rows, "add_part"),
    "spool.assemble": (Spool, "assemble"),
    "check": (Sandbox, "check"),
    "store.put": (AdapterStore, "put"),
    "place": (catalog, "place"),
    "end": (Uploads, "_end"),
    "rows.end": (rows, "end"),
    "spool.remove": (Spool, "remove"),
}


def settings_of(folder: Path) -> Any:
    limits = Adapters(upload_bytes_max=UPLOAD_BYTES_MAX, tenant_adapters_max=ADAPTERS_MAX)
    return msgspec.structs.replace(settings_for(folder / "data"), adapters=limits)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(step: str) -> None:
    place, name = STEPS[step.rstrip("+")]
    original: Callable[..., Any] = getattr(place, name)
    if not step.endswith("+"):
        setattr(place, name, lambda *_, **__: die())
        return

    def then_die(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        if not hasattr(result, "__await__"):
            return die()

        async def wait() -> None:
            await result
            die()

        return wait()

    setattr(place, name, then_die)


def main() -> None:
    folder, port = Path(sys.argv[1]), int(sys.argv[2])
    app = create_app(
        settings_of(folder), FakeEngine(model_info(byte_tokenizer_folder(folder / "model")))
    )
    if len(sys.argv) > 3:
        arm(sys.argv[3])
    uvicorn.run(app, port=port, log_config=None, lifespan="on")


if __name__ == "__main__":
    main()
