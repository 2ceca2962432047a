"""The reference's ops in Triton. Same names, arguments and meaning; see `reference` for those.

No kernel depends on how many sequences, adapters or ranks a batch has: those lie in tables on the
device, so a new rank or mix compiles nothing, and a row is always summed in the same order.
"""

from torch import Tensor

from gateway.engine.kernels.gpu_attention import paged_attention, write_kv
from gateway.engine.kernels.gpu_lora import lora_expand, lora_shrink
from gateway.engine.kernels.gpu_rows import rms_norm, rotate

__all__ = [
    "lora_expand",
    "lora_shrink",
    "paged_attention",
    "rms_norm",
    "rotate",
    "warm_up",
    "write_kv",
]


def warm_up(pages_NP: Tensor, threads: int) -> None:
    """Nothing: Triton compiles for the shapes of a model, so `model/warm_up.py` runs a batch."""
