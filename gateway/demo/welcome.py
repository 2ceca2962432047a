"""What `loragate demo` prints when it is ready: lines to paste."""

import json
import os
import shlex
import sys
from pathlib import Path

from gateway.demo.content import ACME, BASE_NAME, GLOBEX, QUESTIONS

SCRIPT = Path("examples/chat.py")


def welcome(base_url: str, keys: dict[str, str], log: Path) -> str:
    """Two tenants, each with its adapter, by curl and (in a checkout) by the OpenAI SDK."""
    lines = ["", f"Loragate serves {BASE_NAME} with the adapters of two tenants on {base_url}"]
    for tenant in (ACME, GLOBEX):
        key, model = keys[tenant.slug], tenant.adapters[0]
        lines += ["", f"Tenant {tenant.slug}, adapter {model}:", "", curl(base_url, key, model)]
        if SCRIPT.exists():
            lines += ["", sdk(base_url, key, model)]
    others = ", ".join(
        f"{tenant.slug}: {name}" for tenant in (ACME, GLOBEX) for name in tenant.adapters[1:]
    )
    return "\n".join(
        [
            *lines,
            "",
            f"More to try as the model: {others}; everybody: {BASE_NAME}",
            f"API page {base_url}/docs   server log {log}   stop with Ctrl-C",
            "",
        ]
    )


def curl(base_url: str, key: str, model: str) -> str:
    """One streaming request, safe to paste into a shell."""
    request = {
        "model": model,
        "stream": True,
        "temperature": 0,
        "messages": [{"role": "user", "content": QUESTIONS[0]}],
    }
    return f"""curl -N {base_url}/v1/chat/completions \\
  -H 'Authorization: Bearer {key}' \\
  -H 'Content-Type: application/json' \\
  -d {shlex.quote(json.dumps(request))}"""


def sdk(base_url: str, key: str, model: str) -> str:
    """The same through `examples/chat.py`, with the Python that has the SDK."""
    python = shlex.quote(os.path.relpath(sys.executable))
    return f"""OPENAI_BASE_URL={base_url}/v1 \\
OPENAI_API_KEY={key} \\
{python} {SCRIPT} {model}"""
