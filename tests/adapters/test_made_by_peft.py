"""Adapters that PEFT itself made, on a tiny Llama: we find in its files what PEFT has in memory."""

import copy
import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.adapters.peft_format import check_folder, version_digest
from gateway.adapters.targets import Target
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
    embeddings_sha256={"embed_tokens": "", "lm_head": ""},
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
    "head": {"target_modules": ["lm_head"]},
    "embeddings": {"target_modules": ["embed_tokens"], "use_rslora": True},
    "head_and_layers": {"target_modules": ["lm_head", "q_proj"], "rank_pattern": {"lm_head": 2}},
    "regex_of_both": {"target_modules": r".*embed_tokens|lm_head"},
    "both_and_one_layer": {
        "target_modules": ["q_proj", "model.embed_tokens", "lm_head"],
        "layers_to_transform": [1],
        "alpha_pattern": {"embed_tokens": 3},
    },
    "excluded_head": {
        "target_modules": ["embed_tokens", "lm_head", "up_proj"],
        "exclude_modules": ["lm_head"],
    },
    "tied": {"target_modules": ["lm_head"], "ensure_weight_tying": True},
    "tied_regex": {"target_modules": r".*embed_tokens", "ensure_weight_tying": True},
    "regex_that_ties_nothing": {
        "target_modules": r"model\.embed_tokens",
        "ensure_weight_tying": True,
    },
}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"target_modules": ["q_proj"], "use_dora": True}, "use_dora"),
    "lora_bias": ({"target_modules": ["q_proj"], "lora_bias": True}, "lora_bias"),
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
    return llama(tie_word_embeddings=False)


@pytest.fixture(scope="session")
def tied_llama() -> Any:
    return llama(tie_word_embeddings=True)


def llama(tie_word_embeddings: bool) -> Any:
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
        tie_word_embeddings=tie_word_embeddings,
    )
    return LlamaForCausalLM(config)


def made_by_peft(base: Any, folder: Path, options: dict[str, Any]) -> Any:
    from peft import LoraConfig, get_peft_model

    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"} | options
    model = get_peft_model(copy.deepcopy(base), LoraConfig(**settings))
    model.save_pretrained(str(folder))
    return model


def info_of(model: Any) -> ModelInfo:
    modules = {"embed_tokens": model.get_input_embeddings(), "lm_head": model.lm_head}
    digests = {
        name: hashlib.sha256(module.weight.detach().numpy().tobytes()).hexdigest()
        for name, module in modules.items()
    }
    return msgspec.structs.replace(INFO, embeddings_sha256=digests)


@pytest.mark.parametrize("base", ["tiny_llama", "tied_llama"])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_and_scales_are_those_that_peft_computes_with(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, base: str
) -> None:
    llama = request.getfixturevalue(base)
    model = made_by_peft(llama, tmp_path, KINDS[kind])
    theirs = {
        name.removeprefix("base_model.model."): (module.r["default"], module.scaling["default"])
        for name, module in model.named_modules()
        if hasattr(module, "lora_A")
    }
    found = check_folder(tmp_path, info_of(llama)).engine.targets
    ours = {Target(item.layer, item.target).module: (item.rank, item.scale) for item in found}
    assert ours == theirs
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
