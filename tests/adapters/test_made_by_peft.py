"""Adapters that PEFT itself made, on a tiny Llama: we find in its files what PEFT has in memory."""

import copy
from pathlib import Path
from typing import Any

import pytest

from gateway.adapters.peft_format import check_folder, version_digest
from gateway.engine.messages import ModelInfo
from gateway.errors import InvalidAdapter

INFO = ModelInfo(
    digest="0" * 64,
    name="tiny",
    model_path="",
    architecture="llama",
    layers=3,
    hidden_size=32,
    vocab_size=64,
    context_tokens=128,
    eos_token_ids=[1],
    projections={
        "q_proj": (32, 32),
        "k_proj": (16, 32),
        "v_proj": (16, 32),
        "o_proj": (32, 32),
        "gate_proj": (48, 32),
        "up_proj": (48, 32),
        "down_proj": (32, 48),
    },
    dtype="float32",
    device="cpu",
)

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "v_proj"]},
    "all_linear": {"target_modules": "all-linear", "r": 3},
    "regex": {"target_modules": r".*\.(up_proj|down_proj)"},
    "regex_of_layers": {"target_modules": r"model\.layers\.[02]\.self_attn\.k_proj"},
    "whole_names": {"target_modules": ["model.layers.1.mlp.gate_proj", "o_proj"]},
    "rslora": {"target_modules": ["o_proj"], "use_rslora": True, "r": 12, "lora_alpha": 24},
    "layers": {"target_modules": ["q_proj", "gate_proj"], "layers_to_transform": [0, 2]},
    "one_layer": {"target_modules": ["q_proj"], "layers_to_transform": 1},
    "layers_pattern": {
        "target_modules": ["q_proj"],
        "layers_to_transform": [1],
        "layers_pattern": "layers",
    },
    "exclude": {
        "target_modules": ["q_proj", "v_proj"],
        "exclude_modules": ["layers.1.self_attn.v_proj"],
    },
    "patterns": {
        "target_modules": ["q_proj", "k_proj", "down_proj"],
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.down_proj": 9, "self_attn.k_proj": 1},
        "alpha_pattern": {r"layers\.[01]\.self_attn\.q_proj": 32, "q_proj": 3, "down_proj": 5},
    },
    "patterns_with_rslora": {
        "target_modules": ["q_proj", "up_proj"],
        "use_rslora": True,
        "rank_pattern": {"up_proj": 5},
        "alpha_pattern": {"up_proj": 7},
    },
    "gaussian": {"target_modules": ["q_proj"], "init_lora_weights": "gaussian"},
    "orthogonal": {"target_modules": ["q_proj"], "init_lora_weights": "orthogonal"},
    "mica": {"target_modules": ["q_proj"], "init_lora_weights": "mica"},
}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"target_modules": ["q_proj"], "use_dora": True}, "use_dora"),
    "lora_bias": ({"target_modules": ["q_proj"], "lora_bias": True}, "lora_bias"),
    "lm_head": ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
    "embeddings": ({"target_modules": ["embed_tokens"]}, "embeddings"),
    "modules_to_save": (
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        "modules_to_save",
    ),
    "pissa": ({"target_modules": ["q_proj"], "init_lora_weights": "pissa"}, "init_lora_weights"),
    "olora": ({"target_modules": ["q_proj"], "init_lora_weights": "olora"}, "init_lora_weights"),
    "tokens": (
        {"target_modules": ["q_proj"], "trainable_token_indices": [1, 2]},
        "trainable_token_indices",
    ),
    "replication": (
        {"target_modules": ["q_proj"], "layer_replication": [[0, 2], [1, 3]]},
        "layer_replication",
    ),
}


@pytest.fixture(scope="session")
def tiny_llama() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
    )
    return LlamaForCausalLM(config)


def made_by_peft(base: Any, folder: Path, options: dict[str, Any]) -> Any:
    from peft import LoraConfig, get_peft_model

    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"} | options
    model = get_peft_model(copy.deepcopy(base), LoraConfig(**settings))
    model.save_pretrained(str(folder))
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_and_scales_are_those_that_peft_computes_with(
    tiny_llama: Any, tmp_path: Path, kind: str
) -> None:
    model = made_by_peft(tiny_llama, tmp_path, KINDS[kind])
    theirs = {}
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):
            parts = name.removeprefix("base_model.model.model.layers.").split(".")
            theirs[int(parts[0]), parts[2]] = (module.r["default"], module.scaling["default"])
    found = check_folder(tmp_path, INFO).engine.targets
    assert {(item.layer, item.target): (item.rank, item.scale) for item in found} == theirs
    assert theirs


@pytest.mark.parametrize("kind", REFUSED)
def test_f26_kinds_that_are_not_served_are_refused_by_name(
    tiny_llama: Any, tmp_path: Path, kind: str
) -> None:
    options, word = REFUSED[kind]
    made_by_peft(tiny_llama, tmp_path, options)
    with pytest.raises(InvalidAdapter, match=word):
        check_folder(tmp_path, INFO)


def test_a_config_that_was_saved_twice_has_the_same_digest(tiny_llama: Any, tmp_path: Path) -> None:
    model = made_by_peft(tiny_llama, tmp_path / "one", {"target_modules": "all-linear"})
    model.save_pretrained(tmp_path / "two")
    one, two = (check_folder(tmp_path / name, INFO) for name in ("one", "two"))
    assert version_digest(one) == version_digest(two)
