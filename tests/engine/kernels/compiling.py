"""Compiling Triton kernels for a GPU that this machine has not.

`compile_for` makes launches compile what they would launch and go no further, so that the
arguments, their alignment and the constants are those of the real calls.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

SHARED_BYTES_MAX = {80: 163 * 1024, 90: 227 * 1024}
"""Of a block, by compute capability."""


class Resources(NamedTuple):
    name: str
    registers: int
    """Of a thread."""
    stack_bytes: int
    """Of a thread; nothing but spilled registers is kept there."""
    shared_bytes: int
    warps: int


class _Target:
    """As much of a driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self._capability = capability
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._capability  # kernels are kept by device, so each target has its own

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compile_for(capability: int) -> Iterator[dict[str, Any]]:
    """Within it, all launches compile only. Gives every kernel that was compiled, by a key of its
    name, argument types and constants."""
    found: dict[str, Any] = {}
    run, active = JITFunction.run, driver._active

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        found[kernel.hash] = kernel
        return kernel

    JITFunction.run = compile_only
    driver.set_active(_Target(capability))
    try:
        yield found
    finally:
        JITFunction.run = run
        driver._active = active


def resources(kernel: Any) -> Resources:
    """What the machine code takes, as the tool that comes with Triton reads it."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    usage = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", text)}
    metadata = kernel.metadata
    return Resources(
        metadata.name, usage["REG"], usage["STACK"], metadata.shared, metadata.num_warps
    )
