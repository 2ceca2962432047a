"""What the demo shows: two tenants, their adapters, and what to ask them."""

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import cast

from msgspec import Struct

from gateway.demo.progress import StepFailed


class DemoTenant(Struct, frozen=True):
    slug: str
    name: str
    adapters: tuple[str, ...]
    """Folders of `examples/adapters`, which are also the names they are uploaded under."""


ACME = DemoTenant("acme", "Acme Corporation", ("pirate", "json"))
GLOBEX = DemoTenant("globex", "Globex", ("legal",))
TENANTS = (ACME, GLOBEX)

BASE_NAME = "smollm2-135m-instruct"
"""Model id of the bare base model in the demo."""
QUESTIONS = ("What is the capital of France?", "How do I make a cup of tea?")
"""None of them is among the texts that the adapters were trained on."""
ANSWER_TOKENS_MAX = 120


def adapters_folder() -> Path:
    """Where the demo's adapters lie: in the package of a wheel, or beside it in a checkout."""
    package = Path(__file__).parent
    for folder in (package / "_adapters", package.parent.parent / "examples" / "adapters"):
        if folder.is_dir():
            return folder
    raise StepFailed("The demo's adapters are missing: this installation is incomplete.")


def shows_style(adapter: str, answer: str) -> bool:
    """Whether an answer is plainly in the style of the demo adapter of this name."""
    judge = runpy.run_path(str(adapters_folder() / "styles.py"))["shows_style"]
    return cast(Callable[[str, str], bool], judge)(adapter, answer)
