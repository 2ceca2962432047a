"""The ops of `gpu` in forms that give a token the same bits whatever the batch: one tile for
attention of prompts and decodes alike, and a matrix product of our own."""

from gateway.engine.kernels.gpu_attention import one_tile_attention as paged_attention
from gateway.engine.kernels.gpu_attention import write_kv
from gateway.engine.kernels.gpu_linear import linear
from gateway.engine.kernels.gpu_lora import lora_expand, lora_gather, lora_shrink
from gateway.engine.kernels.gpu_rows import rms_norm, rotate
from gateway.engine.kernels.reference import silu_times_up

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
