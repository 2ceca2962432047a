"""The ops of a forward pass, over the page pool. `reference` is their definition."""

from types import ModuleType


def choose(device: str) -> ModuleType:
    """The module whose ops run on this device: functions of the reference's names and arguments.

    Triton is imported only where it is used, so that a machine without it can serve on its CPU.
    """
    if device == "cuda":
        from gateway.engine.kernels import gpu

        return gpu
    from gateway.engine.kernels import cpu

    return cpu
