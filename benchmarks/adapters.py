"""Random LoRA adapters in PEFT's format, for measuring: all seven projections, ranks in turn."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from gateway.engine.messages import ModelInfo

RANKS = (8, 16, 32)


def make_adapter(folder: Path, info: ModelInfo, rank: int, seed: int) -> Path:
    """Write one adapter in bfloat16. Its B is small, so that answers stay finite."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(info.layers):
        for target, (out_features, in_features) in info.projections.items():
            part = "mlp" if target in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            name = f"base_model.model.model.layers.{layer}.{part}.{target}"
            a_RD = torch.randn(rank, in_features, generator=generator) * in_features**-0.5
            b_DR = torch.randn(out_features, rank, generator=generator) * 0.02
            tensors[f"{name}.lora_A.weight"] = a_RD.bfloat16()
            tensors[f"{name}.lora_B.weight"] = b_DR.bfloat16()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(info.projections),
        "base_model_name_or_path": "benchmark",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def make_adapters(folder: Path, info: ModelInfo, count: int) -> list[Path]:
    return [
        make_adapter(folder / f"adapter-{i:03d}", info, RANKS[i % len(RANKS)], seed=i)
        for i in range(count)
    ]
