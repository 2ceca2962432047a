"""The compiled step is right on processors without AVX-512, or without its bfloat16."""

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from llvmlite import binding

ROOT = Path(__file__).parents[3]
HERE = "tests/engine/kernels/narrow.py"


class Processor(NamedTuple):
    name: str
    features: str
    """Those that the code asks for."""
    needs: str
    """Of this machine, to run it."""


AVX2 = Processor("x86-64-v3", "", "avx2")
AVX512 = Processor("x86-64-v4", "+avx512f", "avx512bw")
RUNS = [(AVX2, "float32"), (AVX2, "bfloat16"), (AVX512, "bfloat16")]
pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="these are x86 processors")


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[tuple[Processor, str], "subprocess.Popen[str]"]]:
    """All at once, as each compiles on one core."""
    features = binding.get_host_cpu_features()
    started = {}
    for processor, dtype in RUNS:
        if features.get(processor.needs):
            named = {"NUMBA_CPU_NAME": processor.name, "NUMBA_CPU_FEATURES": processor.features}
            started[processor, dtype] = subprocess.Popen(
                [sys.executable, "-m", "pytest", "-q", HERE, "-k", dtype],
                cwd=ROOT,
                env=os.environ | named,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
    yield started
    for process in started.values():
        process.kill()


@pytest.mark.parametrize(
    ("processor", "dtype"), [pytest.param(*run, id=f"{run[0].name}-{run[1]}") for run in RUNS]
)
def test_logits_are_right_without_the_wide_instructions(
    runs: dict[tuple[Processor, str], "subprocess.Popen[str]"], processor: Processor, dtype: str
):
    if (processor, dtype) not in runs:
        pytest.skip(f"this machine has no {processor.needs}")
    process = runs[processor, dtype]
    output, _ = process.communicate()
    assert process.returncode == 0, output[-8000:]
    assert "1 passed" in output
