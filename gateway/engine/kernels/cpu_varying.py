"""The ops of `cpu`, but with torch's own matrix product in float32 too. It takes other paths, and
sums in other orders, for few rows than for many, so a row's bits vary with the batch."""

from gateway.engine.kernels.cpu import (
    lora_expand,
    lora_gather,
    lora_shrink,
    paged_attention,
    rms_norm,
    rotate,
    silu_times_up,
    write_kv,
)
from gateway.engine.kernels.reference import linear

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
