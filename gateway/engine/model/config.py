"""The shape of a base model. Needs no torch.

`folder_config` and `gguf_config` read it from the two kinds of model. Only what the decoder
computes exactly is accepted: a setting that would change the numbers and is not in `ModelConfig` is
refused by name instead of being ignored.
"""

from typing import Any, Self

from msgspec import Struct

from gateway.engine.model.errors import ModelError

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""Hugging Face's `model_type`s; SmolLM3 only without its layers that have no rope."""
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""`general.architecture`; Mistral and SmolLM2 files call themselves llama."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
LAYERS_MAX = 1024
"""Far above any real model: a corrupt count must not become a list of that length."""


class ModelConfig(Struct, frozen=True):
    """Everything the decoder must know besides the weights. Lengths are tokens or elements."""

    architecture: str
    layers: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens: int
    rms_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    """None for plain rope, else Hugging Face's parameters with `rope_type` linear, llama3 or yarn,
    or `{"rope_type": "factors", "factors": [head_dim / 2 floats]}`: each inverse frequency is
    divided by its factor (how GGUF files write llama3)."""
    tie_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    sliding_window: int | None
    """A token sees itself and the `sliding_window - 1` before it; None: all before it."""
    eos_token_ids: list[int]
    bos_token_id: int | None

    def checked(self) -> Self:
        """Itself, if its numbers fit together. Raises ModelError."""
        positive = {
            "layers": self.layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "context_tokens": self.context_tokens,
            "sliding_window": self.sliding_window or 1,
        }
        for name, value in positive.items():
            if value < 1:
                raise ModelError(f"The model's {name} is {value}; it must be positive.")
        if self.layers > LAYERS_MAX:
            raise ModelError(f"The model's layers are {self.layers}; at most {LAYERS_MAX} are.")
        if self.heads % self.kv_heads:
            raise ModelError(
                f"{self.heads} attention heads cannot share {self.kv_heads} key/value heads evenly."
            )
        if self.head_dim % 2:
            raise ModelError(f"The model's head_dim is {self.head_dim}; rope needs an even one.")
        if not 0 < self.rms_eps < 1 or not self.rope_theta > 0:
            raise ModelError("The model's rms_norm_eps or rope_theta is out of range.")
        return self

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """(out_features, in_features) of every target module of a layer."""
        q_rows, kv_rows = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (q_rows, self.hidden_size),
            "k_proj": (kv_rows, self.hidden_size),
            "v_proj": (kv_rows, self.hidden_size),
            "o_proj": (self.hidden_size, q_rows),
            "gate_proj": (self.intermediate_size, self.hidden_size),
            "up_proj": (self.intermediate_size, self.hidden_size),
            "down_proj": (self.hidden_size, self.intermediate_size),
        }
