"""PEFT folders made by hand, fast, and right unless told otherwise."""

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from gateway.engine.messages import EMBEDDINGS, ModelInfo
from tests.fakes import model_info

INFO = model_info()
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")

Array = np.ndarray[Any, np.dtype[Any]]
Tensors = dict[str, Array]


EMBEDDING_KEYS = {
    "embed_tokens": tuple(
        f"base_model.model.model.embed_tokens.lora_embedding_{side}" for side in "AB"
    ),
    "lm_head": tuple(f"base_model.model.lm_head.lora_{side}.weight" for side in "AB"),
}
"""Names of the A and the B."""


def config(**changes: Any) -> dict[str, Any]:
    """What PEFT writes for rank 4 on q_proj and v_proj of the first two layers."""
    return {
        "alora_invocation_tokens": None,
        "alpha_pattern": {},
        "arrow_config": None,
        "auto_mapping": None,
        "base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "bias": "none",
        "corda_config": None,
        "ensure_weight_tying": False,
        "eva_config": None,
        "exclude_modules": None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layer_replication": None,
        "layers_pattern": None,
        "layers_to_transform": [0, 1],
        "loftq_config": {},
        "lora_alpha": 8,
        "lora_bias": False,
        "lora_dropout": 0.05,
        "megatron_config": None,
        "megatron_core": "megatron.core",
        "modules_to_save": None,
        "peft_type": "LORA",
        "peft_version": "0.21.2",
        "qalora_group_size": 16,
        "r": 4,
        "rank_pattern": {},
        "revision": None,
        "target_modules": ["v_proj", "q_proj"],
        "target_parameters": None,
        "task_type": "CAUSAL_LM",
        "trainable_token_indices": None,
        "use_dora": False,
        "use_qalora": False,
        "use_rslora": False,
    } | changes


def key(layer: int, projection: str, side: str) -> str:
    group = "self_attn" if projection in ATTENTION else "mlp"
    return f"base_model.model.model.layers.{layer}.{group}.{projection}.lora_{side}.weight"


def tensors(
    targets: Iterable[str] = ("q_proj", "v_proj"),
    layers: Iterable[int] = (0, 1),
    rank: int = 4,
    info: ModelInfo = INFO,
    seed: int = 0,
    dtype: str = "float32",
) -> Tensors:
    random = np.random.default_rng(seed)
    made: Tensors = {}
    for layer in layers:
        for target in targets:
            rows, columns = info.projections[target]
            made[key(layer, target, "A")] = random.normal(0, 0.02, (rank, columns)).astype(dtype)
            made[key(layer, target, "B")] = random.normal(0, 0.02, (rows, rank)).astype(dtype)
    return made


def embedding_tensors(
    targets: Iterable[str] = EMBEDDINGS, rank: int = 4, info: ModelInfo = INFO, seed: int = 0
) -> Tensors:
    """LoRA on the embeddings, as PEFT names it."""
    random = np.random.default_rng(seed)
    made: Tensors = {}
    for target in targets:
        rows, columns = info.targets[target]
        a, b = EMBEDDING_KEYS[target]
        made[a] = random.normal(0, 0.02, (rank, columns)).astype("float32")
        made[b] = random.normal(0, 0.02, (rows, rank)).astype("float32")
    return made


def weights(made: Tensors | None = None) -> bytes:
    return save(tensors() if made is None else made, metadata={"format": "pt"})


def packed(entries: Mapping[str, tuple[str, Iterable[int], bytes]], **header: Any) -> bytes:
    """A safetensors file of raw bytes: name → (dtype, shape, bytes)."""
    described: dict[str, Any] = dict(header)
    data = b""
    for name, (dtype, shape, raw) in entries.items():
        offsets = [len(data), len(data) + len(raw)]
        described[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        data += raw
    return framed(json.dumps(described).encode(), data)


def framed(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def header_of(file: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and all that follows it."""
    (length,) = struct.unpack("<Q", file[:8])
    return json.loads(file[8 : 8 + length]), file[8 + length :]


def write_folder(
    folder: Path, config_json: dict[str, Any] | bytes | None = None, file: bytes | None = None
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    text = config_json if isinstance(config_json, bytes) else json.dumps(config_json or config())
    content = text if isinstance(text, bytes) else text.encode()
    (folder / "adapter_config.json").write_bytes(content)
    (folder / "adapter_model.safetensors").write_bytes(weights() if file is None else file)
    return folder
