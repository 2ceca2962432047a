#!/usr/bin/env python3
"""Set-up for `make demo` and `make test`: .venv with all packages, and the base model.

    python3 scripts/bootstrap.py

Runs under whatever `python3` is (so its own syntax is old), finds a Python that Loragate can use,
and works through the steps below. A finished set-up leaves a stamp in .venv, written last: while
the stamp fits, a run ends at once; when pyproject.toml or constraints.txt have changed, packages
are updated in place; a set-up that was interrupted is begun again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".loragate-setup"
LOG = ROOT / ".cache" / "setup.log"
LOCK = ROOT / ".cache" / "setup.lock"

VERSIONS = [(3, 12), (3, 11)]
"""What Loragate is tested with, newest first."""
TORCH = "2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
BEGUN = "begun"

AGAIN = (
    "Check the network (`pip config list` shows which package index is used) and free disk space "
    "(about 3 GB on CPU, 8 GB with CUDA), then run the same command again: it goes on from here. "
    f"The full output is in {LOG.relative_to(ROOT)}."
)


def main() -> int:
    wanted = fingerprint()
    if is_done(wanted):
        return 0
    python = find_python()
    if python is None:
        return 1
    if Path(sys.executable).resolve() != Path(python).resolve():
        return subprocess.call([python, str(Path(__file__))])

    # from here on a known Python runs, and the package's own modules can be imported
    sys.path.insert(0, str(ROOT))
    from gateway.demo.progress import StepFailed

    try:
        with only_one():
            if not is_done(wanted):
                set_up(wanted)
    except StepFailed as failure:
        print(f"\nSet-up did not finish.\n{failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped. The same command begins again from here.", file=sys.stderr)
        return 130
    return 0


# --- is there anything to do ----------------------------------------------------------------------


def fingerprint() -> dict[str, str]:
    """All that the set-up depends on."""
    packages = hashlib.sha256()
    for name in ("pyproject.toml", "constraints.txt"):
        packages.update((ROOT / name).read_bytes())
    return {
        "root": str(ROOT),
        "packages": packages.hexdigest(),
        "torch": "cuda" if has_nvidia_gpu() else "cpu",
    }


def is_done(wanted: dict[str, str]) -> bool:
    return read_stamp() == wanted and PYTHON.exists() and has_model()


def read_stamp() -> object:
    try:
        return json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return None


def has_nvidia_gpu() -> bool:
    if Path("/proc/driver/nvidia/version").exists():
        return True
    tool = shutil.which("nvidia-smi")
    return tool is not None and answers([tool, "-L"])


def has_model() -> bool:
    """Whether a base model is configured, or the demo's lies where `gateway.demo` looks for it."""
    folder = ROOT / os.environ.get("LORAGATE_DATA_DIR", ".loragate") / "models"
    return bool(os.environ.get("LORAGATE_MODEL")) or any(folder.glob("*.gguf"))


# --- which Python ---------------------------------------------------------------------------------

PROBE = "import sys, venv, ensurepip; print(*sys.version_info[:2])"


def find_python() -> str | None:
    """This Python if it will do, else the newest that will. Says what to do if there is none."""
    names = [f"python{major}.{minor}" for major, minor in VERSIONS] + ["python3", "python"]
    found = [sys.executable] + [path for path in map(shutil.which, names) if path]
    for major, minor in VERSIONS:
        found += map(str, Path.home().glob(f".pyenv/versions/{major}.{minor}.*/bin/python"))
    for path in found:
        if usable(path):
            return path
    wanted = " or ".join(f"{major}.{minor}" for major, minor in reversed(VERSIONS))
    print(
        f"Loragate needs Python {wanted} with its venv module, and found none "
        f"(this is {sys.version.split()[0]} at {sys.executable}).\n"
        "  Debian, Ubuntu:  sudo apt install python3.11 python3.11-venv\n"
        "  Fedora:          sudo dnf install python3.12\n"
        "  macOS:           brew install python@3.12\n"
        "Another place: make PYTHON=/path/to/python3.12 …",
        file=sys.stderr,
    )
    return None


def usable(path: str) -> bool:
    probe = subprocess.run(
        [path, "-c", PROBE], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False
    )
    return probe.stdout.decode().split() in [[str(a), str(b)] for a, b in VERSIONS]


def answers(command: list[str]) -> bool:
    quiet = subprocess.DEVNULL
    return subprocess.call(command, stdout=quiet, stderr=quiet) == 0


# --- the steps ------------------------------------------------------------------------------------


def set_up(wanted: dict[str, str]) -> None:
    from gateway.demo import base_model

    if read_stamp() != wanted or not PYTHON.exists():
        print(f"Setting up {VENV} with Python {sys.version.split()[0]}", flush=True)
        make_venv(wanted)
        STAMP.write_text(json.dumps(BEGUN))
        install_torch(wanted["torch"])
        install_packages()
    if not has_model():
        base_model.ensure(ROOT / os.environ.get("LORAGATE_DATA_DIR", ".loragate"), PYTHON)
    STAMP.write_text(json.dumps(wanted))


def make_venv(wanted: dict[str, str]) -> None:
    """A virtual environment with a pip that works; one that can be kept is kept."""
    from gateway.demo.progress import Status

    stamp = read_stamp()
    moved = isinstance(stamp, dict) and stamp.get("root") != wanted["root"]
    keep = stamp != BEGUN and not moved and PYTHON.exists() and usable(str(PYTHON))
    if keep and answers([str(PYTHON), "-m", "pip", "--version"]):
        return
    with Status("Making the virtual environment"):
        subprocess.check_call([sys.executable, "-m", "venv", "--clear", str(VENV)])


def install_torch(build: str) -> None:
    """The CPU build where no NVIDIA GPU is: a tenth of the size, and no CUDA to install.

    The CPU build has a version of its own, found where pip is configured to look for it, and lies
    in PyTorch's CPU index. Where neither can be reached, the common build runs on the CPU as well.
    """
    from gateway.demo.progress import StepFailed

    installed = torch_installed()
    if installed == f"{TORCH}+cpu" and build == "cuda":
        pip(["uninstall", "--yes", "torch"], "Removing the CPU build of PyTorch")
    elif installed.split("+")[0] == TORCH:
        return
    reason: Exception | None = None
    # dependencies come with everything else, from the usual index
    install = ["install", "--no-compile", "--no-deps"]
    attempts = [(f"Installing PyTorch {TORCH}", [*install, f"torch=={TORCH}"])]
    if build == "cpu" and sys.platform == "linux":
        short = ["--timeout", "15", "--retries", "1"]
        attempts[:0] = [
            ("Looking for a CPU build of PyTorch at hand", [*install, f"torch=={TORCH}+cpu"]),
            (
                f"Installing the CPU build of PyTorch {TORCH} (about 200 MB)",
                [*install, *short, "--index-url", CPU_INDEX, f"torch=={TORCH}"],
            ),
        ]
    for title, arguments in attempts:
        try:
            pip(arguments, title)
        except StepFailed as failure:
            reason = failure
        else:
            return
    raise StepFailed(f"PyTorch could not be installed:\n{reason}\n\n{AGAIN}")


def torch_installed() -> str:
    """The version of torch in the virtual environment, or nothing."""
    names = VENV.glob("lib/python*/site-packages/torch-*.dist-info")
    return next((name.name.split("-")[1].removesuffix(".dist") for name in names), "")


def install_packages() -> None:
    from gateway.demo.progress import StepFailed

    # compiling on first import is cheaper than compiling all, most of which is never imported
    arguments = ["install", "--no-compile", "--constraint", str(ROOT / "constraints.txt")]
    try:
        pip([*arguments, "--editable", f"{ROOT}[dev]"], "Installing about 100 packages")
    except StepFailed as failure:
        raise StepFailed(f"The packages could not be installed:\n{failure}\n\n{AGAIN}") from None


def pip(arguments: list[str], title: str) -> None:
    from gateway.demo.progress import run

    environ = {
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_INPUT": "1",
        "PIP_PROGRESS_BAR": "off",
        "PIP_USER": "0",
    }
    run([str(PYTHON), "-m", "pip", *arguments], title, LOG, environ)


class only_one:
    """Holds a lock, so that two set-ups in one folder do not get into each other's way."""

    def __enter__(self) -> None:
        import fcntl

        LOCK.parent.mkdir(exist_ok=True)
        self.file = LOCK.open("w")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Another set-up is running here; waiting for it …", flush=True)
            fcntl.flock(self.file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        self.file.close()


if __name__ == "__main__":
    sys.exit(main())
