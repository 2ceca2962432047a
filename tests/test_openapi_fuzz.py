"""The OpenAPI document beside what the server does: schemathesis makes requests from it, legal and
illegal ones. None may come to a 500, and none to an answer that the document doesn't foresee."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.tenants.keys import ADMIN, TENANT_SCOPES
from tests.live import Live, live

ROOT = Path(__file__).resolve().parent.parent
RUN = "from schemathesis.cli import schemathesis; schemathesis()"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "ignored_auth",
)
EXAMPLES = 15
"""Of each route, beside those of the coverage phase."""
TIME_S_MAX = 45
"""After which it makes no more of them; the coverage phase alone takes seconds."""
RUN_S_MAX = 240.0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(tmp_path_factory.mktemp("fuzz")) as running:
        yield running


@pytest.mark.parametrize("scopes", [TENANT_SCOPES, (ADMIN,)], ids=["tenant", "admin"])
def test_the_document_foresees_every_answer(
    scopes: tuple[str, ...], running: Live, tmp_path: Path
) -> None:
    key = running.key(None if scopes == (ADMIN,) else "acme", scopes=scopes)
    command = [
        *(sys.executable, "-c", RUN, "run", f"{running.url}/openapi.json"),
        *("--header", f"Authorization: Bearer {key}"),
        *("--phases", "examples,coverage,fuzzing", "--checks", ",".join(CHECKS)),
        *("--max-examples", str(EXAMPLES), "--max-time", str(TIME_S_MAX), "--seed", "1"),
        *("--no-color", "--continue-on-failure"),
    ]
    environ = os.environ | {"SCHEMATHESIS_HOOKS": "tests.fuzz_hooks"}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        command,
        cwd=tmp_path,
        env=environ,
        timeout=RUN_S_MAX,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2000:]
    assert "Tested: " in run.stdout
