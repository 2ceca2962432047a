"""A base model's weights as the compiled step reads them.

D hidden size · N columns of q, k and v · F inner size · V vocabulary · E head dimension
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gateway.engine.kernels import panels
from gateway.engine.kernels.step_data import Array, Model, flat
from gateway.engine.model.config import ModelConfig
from gateway.engine.model.rope import Rope
from gateway.engine.model.weights import Weights


def pack(config: ModelConfig, weights: Weights, rope: Rope) -> Model:
    """Takes the layers out of `weights`, one by one, so that they never lie in memory twice."""
    dtype = weights.embed_VD.dtype
    hidden, inner = config.hidden_size, config.intermediate_size
    q_columns, kv_columns = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes = {
        "qkv_ND": (q_columns + 2 * kv_columns, hidden),
        "o_DN": (hidden, q_columns),
        "gate_up_FD": (2 * inner, hidden),
        "down_DF": (hidden, inner),
    }
    sizes = [panels.elements(*shape, dtype) for shape in shapes.values()]
    at_L4 = np.cumsum([0, *sizes * config.layers])[:-1].reshape(config.layers, 4)
    packed = torch.empty(sum(sizes) * config.layers, dtype=dtype)
    small: dict[str, list[Tensor | None]] = {
        name: [] for name in ("input_norm_D", "post_norm_D", "qkv_bias_N", "q_norm_H", "k_norm_H")
    }
    for index in range(config.layers):
        layer = weights.layers.pop(0)
        for name, at, size in zip(shapes, at_L4[index], sizes, strict=True):
            panels.pack(getattr(layer, name), packed[at : at + size])
        for name, values in small.items():
            values.append(getattr(layer, name))
    head = torch.empty(panels.elements(config.vocab_size, hidden, dtype), dtype=dtype)
    panels.pack(weights.head_VD, head)
    tied = weights.head_VD is weights.embed_VD
    return Model(
        layers=config.layers,
        hidden=hidden,
        inner=inner,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocabulary=config.vocab_size,
        eps=np.float32(config.rms_eps),
        scale=np.float32(config.head_dim**-0.5),
        window=config.sliding_window or 2**62,
        panels=flat(packed),
        panels_at_L4=at_L4,
        head=flat(head),
        embed_VD=flat(weights.embed_VD[:0] if tied else weights.embed_VD),
        input_norm_LD=_joined(small["input_norm_D"]),
        post_norm_LD=_joined(small["post_norm_D"]),
        final_norm_D=_joined([weights.final_norm_D]),
        qkv_bias_LN=_joined(small["qkv_bias_N"]),
        q_norm_LE=_joined(small["q_norm_H"]),
        k_norm_LE=_joined(small["k_norm_H"]),
        turn_PE=flat(rope.half_turns()),
    )


def _joined(values: Sequence[Tensor | None]) -> Array:
    """One after another in float32; nothing if they are none."""
    given = [value.float() for value in values if value is not None]
    return flat(torch.cat(given)) if given else np.zeros(0, dtype=np.float32)
