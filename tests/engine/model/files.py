"""Small model files for tests: Hugging Face folders by transformers, GGUF by the gguf package."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
VOCABULARY = 32

_GGUF_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
}


def tiny_model(architecture: str, **changes: Any) -> Any:
    """A random transformers model with 2 layers, every parameter different from its neighbours."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "head_dim": 16 if architecture == "qwen3" else 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "eos_token_id": 2,
        "bos_token_id": 1,
    }
    config = AutoConfig.for_model(architecture, **(settings | changes))
    torch.manual_seed(0)
    make: Any = AutoModelForCausalLM.from_config  # not annotated in transformers
    model = make(config)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases start out all equal
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[NDArray[Any], GGMLQuantizationType]],
) -> Path:
    """Write packed tensors; the type of a metadata value follows from Python's, ints as uint32."""
    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_metadata(config: Any, architecture: str) -> dict[str, Any]:
    """What llama.cpp's converter writes of a transformers config, with a byte-sized tokenizer."""
    key = f"{architecture}.".__add__
    return {
        key("block_count"): config.num_hidden_layers,
        key("context_length"): config.max_position_embeddings,
        key("embedding_length"): config.hidden_size,
        key("feed_forward_length"): config.intermediate_size,
        key("attention.head_count"): config.num_attention_heads,
        key("attention.head_count_kv"): config.num_key_value_heads,
        key("attention.key_length"): config.head_dim,
        key("attention.value_length"): config.head_dim,
        key("rope.freq_base"): config.rope_parameters["rope_theta"],
        key("attention.layer_norm_rms_epsilon"): config.rms_norm_eps,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [
            "<unk>",
            "<s>",
            "</s>",
            *map(chr, range(97, 97 + 26)),
            "ab",
            "cd",
        ],
        "tokenizer.ggml.token_type": [3, 3, 3, *[1] * 28],
        "tokenizer.ggml.merges": ["a b", "c d"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}</s>{% endfor %}",
    }


def gguf_tensors(
    model: Any, architecture: str
) -> dict[str, tuple[NDArray[Any], GGMLQuantizationType]]:
    """A model's tensors in float32 as llama.cpp's converter arranges them."""
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        stem, _, kind = name.removeprefix("model.").rpartition(".")
        layer = ""
        if stem.startswith("layers."):
            _, number, stem = stem.split(".", 2)
            layer = f"blk.{number}."
        part = _GGUF_PARTS[stem]
        data = tensor.numpy()
        if architecture == "llama" and part in heads:
            # llama.cpp's order: the two rows that rope turns together stand side by side
            halves = data.reshape(heads[part], 2, -1, *data.shape[1:])
            data = halves.swapaxes(1, 2).reshape(data.shape)
        tensors[f"{layer}{part}.{kind}"] = (np.ascontiguousarray(data), GGMLQuantizationType.F32)
    return tensors


def tiny_gguf(path: Path, architecture: str = "llama", **changes: Any) -> tuple[Path, Any]:
    """A GGUF and the transformers model that it holds."""
    model = tiny_model(architecture, **changes)
    write_gguf(
        path,
        architecture,
        gguf_metadata(model.config, architecture),
        gguf_tensors(model, architecture),
    )
    return path, model
