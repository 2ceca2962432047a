"""LiteLLM's proxy before the same stub, in a virtual environment of its own.

With a master key and rate limits in memory: keys and budgets of tenants need its database, and the
engine of its database client (Prisma) is a program that PyPI does not have.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.peers.child import Child, answers, child, local_url
from gateway.demo.progress import StepFailed, run

PACKAGE = "litellm[proxy]"
MODEL = "stub"
KEY = "sk-a-key-of-this-run-alone-4f1d9c7b2e"
START_S = 120.0
PLENTY = 10**9
WITHOUT = "a master key and rate limits in memory, no database: Prisma's engine is not on PyPI"


class NotToBeHad(Exception):
    """The message says why there is no LiteLLM to measure."""


def prepare(folder: Path) -> Path:
    """Its environment, made once. Raises NotToBeHad."""
    environment = folder / "venv"
    if (environment / "bin" / "litellm").exists():
        return environment
    quiet = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_PROGRESS_BAR": "off"}
    try:
        log = folder / "prepare.log"
        make = [sys.executable, "-m", "venv", "--clear", str(environment)]
        run(make, "LiteLLM: a virtual environment", log)
        pip = [str(environment / "bin" / "python"), "-m", "pip", "install"]
        run([*pip, PACKAGE], f"LiteLLM: {PACKAGE} from PyPI", log, quiet)
    except StepFailed as failure:
        raise NotToBeHad(f"{PACKAGE} cannot be installed: {str(failure).splitlines()[0]}") from None
    return environment


@contextmanager
def running(environment: Path, folder: Path, port: int, stub_port: int) -> Iterator[Child]:
    """Raises peers.child.Failed."""
    config = folder / "litellm.json"  # JSON is YAML
    config.write_text(json.dumps(_config(stub_port)))
    url = local_url(port)
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith("LORAGATE_")
    } | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MODE": "PRODUCTION", "PYTHONPATH": ""}
    command = [
        *(str(environment / "bin" / "litellm"), "--config", str(config)),
        *("--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"),
    ]
    with child(command, environ, folder / "litellm.log") as running:
        running.wait_for(lambda: answers(f"{url}/health/liveliness"), START_S)
        yield running


def _config(stub_port: int) -> dict[str, object]:
    parameters = {
        "model": "openai/stub",
        "api_base": f"http://127.0.0.1:{stub_port}/v1",
        "api_key": "none",
        "rpm": PLENTY,
        "tpm": PLENTY,
    }
    return {
        "model_list": [{"model_name": MODEL, "litellm_params": parameters}],
        "router_settings": {"optional_pre_call_checks": ["enforce_model_rate_limits"]},
        "litellm_settings": {"telemetry": False, "set_verbose": False},
        "general_settings": {"master_key": KEY, "global_max_parallel_requests": 10**6},
    }
