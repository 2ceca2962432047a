"""The import picture of docs/architecture.md, and that packages and declarations agree."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GATEWAY = ROOT / "gateway"

BORDER = {"messages", "client", "tokenizer", "process"}
"""The modules of the engine that the HTTP side may import: none of them needs torch."""
SIBLINGS = ("tenants", "adapters", "safety")
PRINCIPAL = "gateway.tenants.keys"
"""A route says who calls it with tenants' Principal, whatever package it is in."""
FIXED = {"torch", "triton", "peft", "redis"}
"""What every installation has, whether this version already imports it in `gateway` or not."""
ENGINE_PACKAGES = {
    "gguf",
    "jinja2",
    "llvmlite",
    "msgspec",
    "numba",
    "numpy",
    "redis",
    "safetensors",
    "tokenizers",
    "torch",
    "triton",
    "zmq",
}


def imports(file: Path) -> Iterator[str]:
    """Every module that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_below(*folders: Path) -> set[tuple[str, str]]:
    """(file, imported module) of all Python files in these folders."""
    return {
        (str(file.relative_to(ROOT)), module)
        for folder in folders
        for file in folder.rglob("*.py")
        for module in imports(file)
    }


def third_party(*folders: Path) -> set[str]:
    tops = {module.split(".")[0] for _, module in imports_below(*folders)}
    return tops - set(sys.stdlib_module_names) - {"gateway"}


def test_the_http_side_runs_without_torch() -> None:
    program = (
        "import sys, gateway.app, gateway.cli\n"
        "heavy = {'torch', 'transformers', 'peft', 'triton'} & set(sys.modules)\n"
        "print(*heavy)"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [], "imported by gateway.app or gateway.cli"


def test_the_http_side_imports_only_the_border_of_the_engine() -> None:
    outside = [
        folder for folder in GATEWAY.iterdir() if folder.name not in ("engine", "__pycache__")
    ]
    files = {
        file for path in outside for file in ([path] if path.is_file() else path.rglob("*.py"))
    }
    beyond = {
        (str(file.relative_to(ROOT)), module)
        for file in files
        for module in imports(file)
        if module.startswith("gateway.engine.") and module.split(".")[2] not in BORDER
    }
    assert beyond == set()


def test_the_engine_needs_nothing_of_the_gateway() -> None:
    ours = {
        (file, module)
        for file, module in imports_below(GATEWAY / "engine")
        if module.startswith("gateway") and not module.startswith("gateway.engine")
    }
    assert ours == set()
    assert third_party(GATEWAY / "engine") <= ENGINE_PACKAGES


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("engine/scheduling", ("torch", "gateway.engine.model", "gateway.engine.kernels")),
        ("engine/memory", ("gateway.engine.model", "gateway.engine.scheduling")),
        (
            "engine/kernels",
            # how rows lie in the pool they must know, but not who owns its pages
            (
                "gateway.engine.model",
                "gateway.engine.scheduling",
                "gateway.engine.memory.pages",
                "gateway.engine.memory.pager",
            ),
        ),
    ],
)
def test_imports_inside_the_engine_point_one_way(folder: str, forbidden: tuple[str, ...]) -> None:
    found = {
        (file, module)
        for file, module in imports_below(GATEWAY / folder)
        if module.startswith(forbidden)
    }
    assert found == set()


@pytest.mark.parametrize("package", SIBLINGS)
def test_siblings_do_not_import_each_other(package: str) -> None:
    others = tuple(f"gateway.{name}" for name in SIBLINGS if name != package)
    found = {
        (file, module)
        for file, module in imports_below(GATEWAY / package)
        if module.startswith((*others, "gateway.inference"))
        and not (file.endswith("routes.py") and module.startswith(PRINCIPAL))
    }
    assert found == set()


def test_every_import_is_declared_and_every_declaration_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["dependencies"] + project["optional-dependencies"]["bench"]
    declared = {distribution(line) for line in lines}
    by_module = packages_distributions()
    imported = {
        # one module name may come from several distributions, of which one is meant
        next((name for name in names if name in declared), names[0])
        for module in third_party(GATEWAY, ROOT / "migrations")
        if (names := [canonical(name) for name in by_module.get(module, [])])
    }
    # named in a URL or chosen by another package by name, and imported nowhere
    by_name = {"aiosqlite", "asyncpg", "httptools", "uvloop"}
    assert imported - declared == set()
    assert declared - imported - FIXED - by_name == set()


def test_what_is_declared_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = project["dependencies"] + extras["bench"] + extras["dev"]
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonical(line.split("==")[0]) for line in pins if "==" in line}
    assert {distribution(line) for line in lines} - pinned == {project["name"]}  # dev has bench


def test_pins_are_versions_only() -> None:
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    odd = [pin for pin in pins if not re.fullmatch(r"(#.*|[\w.-]+==[\w.]+)?", pin)]
    assert odd == []


def distribution(requirement: str) -> str:
    """`sqlalchemy[asyncio]>=2` → `sqlalchemy`."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name is not None
    return canonical(name[0])


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
