"""The reference's ops in Triton. Same names, arguments and meaning; see `reference` for those.

No kernel depends on how many sequences, adapters or ranks a batch has: those lie in tables on the
device, so a new rank or mix compiles nothing, and a row is always summed in the same order.
"""

from gateway.engine.kernels.gpu_attention import paged_attention, write_kv
from gateway.engine.kernels.gpu_lora import lora_expand, lora_gather, lora_shrink
from gateway.engine.kernels.gpu_rows import rms_norm, rotate
from gateway.engine.kernels.reference import linear, silu_times_up

__all__ = [
    "linear",
    "lora_expand",
    "lora_gather",
    "lora_shrink",
    "paged_attention",
    "rms_norm",
    "rotate",
    "silu_times_up",
    "write_kv",
]
