"""Fixtures for what is costly: the base model and what transformers makes of it."""

import os
from pathlib import Path
from typing import Any

import pytest

from gateway.engine.tokenizer import Tokenizer
from tests.reference import (
    AS_CONVERTED,
    DEMO_ADAPTERS,
    REPOSITORY,
    load_reference,
    load_tokenizer,
    make_reference,
)

pytest_plugins = ["tests.databases", "tests.planted", "tests.redis_server"]

BASE_MODEL = "smollm2-135m-instruct-q4_1.gguf"


@pytest.fixture(scope="session")
def base_model() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct that the set-up fetches."""
    named = os.environ.get("LORAGATE_BASE_MODEL")
    path = Path(named) if named else REPOSITORY / ".loragate" / "models" / BASE_MODEL
    if not path.is_file():
        pytest.fail(f"There is no base model at {path}. `make test` fetches it.")
    return path


@pytest.fixture(scope="session")
def reference_folder(base_model: Path) -> Path:
    """The base model as a Hugging Face folder in float32; half a minute the first time."""
    return make_reference(base_model)


@pytest.fixture(scope="session")
def reference_model(reference_folder: Path) -> Any:
    """transformers' LlamaForCausalLM in float32 on CPU. Do not change it."""
    return load_reference(reference_folder)


@pytest.fixture(scope="session")
def ours(base_model: Path) -> Tokenizer:
    """The base model's tokenizer."""
    return Tokenizer.load(base_model)


@pytest.fixture(scope="session")
def theirs(reference_folder: Path) -> Any:
    """transformers' tokenizer of the base model. Do not change it."""
    return load_tokenizer(reference_folder)


@pytest.fixture(scope="session")
def as_converted(reference_folder: Path) -> Any:
    """The same without the correction of `tests/reference.py`, which concerns digits only."""
    return load_tokenizer(reference_folder / AS_CONVERTED)


@pytest.fixture(scope="session")
def demo_adapters() -> dict[str, Path]:
    """Name → PEFT folder of every adapter in examples/adapters."""
    return {
        config.parent.name: config.parent
        for config in sorted(DEMO_ADAPTERS.glob("*/adapter_config.json"))
    }
