"""The ops of a forward pass, over the page pool. `reference` is their definition."""

from types import ModuleType


def choose(device: str, batch_invariant: bool) -> ModuleType:
    """The module whose ops run on this device: functions of the reference's names and arguments.

    `batch_invariant`: a token's bits depend on its sequence only, not on what else is in the
    batch, nor on which of the sequence's tokens are computed together.

    Triton is imported only where it is used, so that a machine without it can serve on its CPU.
    """
    if device == "cuda":
        from gateway.engine.kernels import gpu, gpu_invariant

        return gpu_invariant if batch_invariant else gpu
    from gateway.engine.kernels import cpu, cpu_varying

    return cpu if batch_invariant else cpu_varying
