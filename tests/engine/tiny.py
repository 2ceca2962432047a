"""Tiny random models and adapters, made by transformers and PEFT: milliseconds a step."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama-tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-head-dim": LlamaConfig(**SIZES, head_dim=32),
    "llama-linear": LlamaConfig(**SIZES, rope_parameters=LINEAR_ROPE),
    "llama-llama3": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "llama-yarn": LlamaConfig(**SIZES, rope_parameters=YARN_ROPE),
    "mistral-window": MistralConfig(**SIZES, sliding_window=7),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
}


def save_model(config: PreTrainedConfig, folder: Path, seed: int = 0) -> PreTrainedModel:
    """A random model in float32, saved to `folder` and returned. Its weights are large enough
    that greedy answers vary with the prompt; biases and norms are random too."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.3 if parameter.ndim == 1 else 0.15)
    model.save_pretrained(folder)
    return model


def save_adapter(model: PreTrainedModel, config: LoraConfig, folder: Path, seed: int) -> None:
    """A random adapter with B ≠ 0, as PEFT writes it. `model` is left as it was."""
    torch.manual_seed(seed)
    wrapped = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.3)
    wrapped.save_pretrained(str(folder))
    wrapped.unload()
