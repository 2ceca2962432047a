"""The ops of a forward pass, over the page pool. `reference` is their definition.

On a CPU the whole pass is one function, `compiled_step`, and what it is made of in `pieces`; only
float16 goes op by op there.
"""

from types import ModuleType


def choose(device: str, batch_invariant: bool) -> ModuleType:
    """The module whose ops run on this device: functions of the reference's names and arguments.

    `batch_invariant`, on a GPU: a token's bits depend on its sequence only, not on what else is in
    the batch, nor on which of the sequence's tokens are computed together.

    Triton is imported only where it is used, so that a machine without it can serve on its CPU.
    """
    if device == "cuda":
        from gateway.engine.kernels import gpu, gpu_invariant

        return gpu_invariant if batch_invariant else gpu
    from gateway.engine.kernels import reference

    return reference
