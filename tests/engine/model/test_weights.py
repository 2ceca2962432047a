import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gateway.engine.model import weights
from gateway.engine.model.config import ModelConfig
from gateway.engine.model.errors import ModelError
from gateway.engine.model.weights import Weights
from tests.engine.model.files import ARCHITECTURES, tiny_gguf, tiny_model


def taken_apart(config: ModelConfig, loaded: Weights) -> dict[str, torch.Tensor]:
    """The tensors under Hugging Face's names, out of the fused ones."""
    rows = [heads * config.head_dim for heads in (config.heads, config.kv_heads, config.kv_heads)]
    tensors = {
        "model.embed_tokens.weight": loaded.embed_VD,
        "model.norm.weight": loaded.final_norm_D,
        "lm_head.weight": loaded.head_VD,
    }
    for i, layer in enumerate(loaded.layers):
        name = f"model.layers.{i}.".__add__
        tensors[name("input_layernorm.weight")] = layer.input_norm_D
        tensors[name("post_attention_layernorm.weight")] = layer.post_norm_D
        tensors[name("self_attn.o_proj.weight")] = layer.o_DN
        tensors[name("mlp.down_proj.weight")] = layer.down_DF
        for kind, part in zip("qkv", torch.split(layer.qkv_ND, rows), strict=True):
            tensors[name(f"self_attn.{kind}_proj.weight")] = part
        gate, up = torch.split(layer.gate_up_FD, config.intermediate_size)
        tensors[name("mlp.gate_proj.weight")] = gate
        tensors[name("mlp.up_proj.weight")] = up
        if layer.qkv_bias_N is not None:
            for kind, part in zip("qkv", torch.split(layer.qkv_bias_N, rows), strict=True):
                tensors[name(f"self_attn.{kind}_proj.bias")] = part
        if layer.q_norm_H is not None and layer.k_norm_H is not None:
            tensors[name("self_attn.q_norm.weight")] = layer.q_norm_H
            tensors[name("self_attn.k_norm.weight")] = layer.k_norm_H
    return tensors


def assert_equal(path: Path, expected: dict[str, torch.Tensor]) -> None:
    """Every tensor, bit for bit."""
    config, loaded, _ = weights.load(path, torch.float32)
    found = taken_apart(config, loaded)
    expected = {"lm_head.weight": expected["model.embed_tokens.weight"]} | expected
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_every_tensor_of_the_gguf_is_as_transformers_dequantises_it(
    base_model: Path, reference_folder: Path
) -> None:
    assert_equal(base_model, load_file(reference_folder / "model.safetensors"))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_of_each_family_gives_back_its_model(
    architecture: str, tied: bool, tmp_path: Path
) -> None:
    path, model = tiny_gguf(tmp_path / "m.gguf", architecture, tie_word_embeddings=tied)
    assert_equal(path, model.state_dict())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("shard", ["50GB", "8KB"])
def test_a_folder_of_each_family_gives_back_its_model(
    architecture: str, shard: str, tmp_path: Path
) -> None:
    model = tiny_model(architecture)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").is_file() == (shard == "8KB")
    assert_equal(tmp_path, model.state_dict())


def test_tied_embeddings_are_one_tensor(tmp_path: Path) -> None:
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    _, loaded, _ = weights.load(tmp_path, torch.float32)
    assert loaded.head_VD is loaded.embed_VD


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_weights_have_the_dtype_that_was_asked_for(
    dtype: torch.dtype, stored: torch.dtype, tmp_path: Path
) -> None:
    model = tiny_model("qwen2").to(stored)
    model.save_pretrained(tmp_path)
    config, loaded, _ = weights.load(tmp_path, dtype)
    expected = model.state_dict()
    for name, tensor in taken_apart(config, loaded).items():
        assert torch.equal(tensor, expected[name].to(dtype)), name


def test_loaded_weights_do_not_change_with_their_file(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    _, loaded, _ = weights.load(tmp_path, torch.float32)
    before = loaded.final_norm_D.clone()
    path = tmp_path / "model.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(b"\0" * size)
    assert torch.equal(loaded.final_norm_D, before)


def test_the_digest_changes_with_weights_and_config_only(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    first = weights.load(tmp_path, torch.float32)[2]
    (tmp_path / "README.md").write_text("a note")
    assert weights.load(tmp_path, torch.bfloat16)[2] == first
    assert len(first) == 64

    path = tmp_path / "model.safetensors"
    original = path.read_bytes()
    path.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
    assert weights.load(tmp_path, torch.float32)[2] != first
    path.write_bytes(original)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    assert weights.load(tmp_path, torch.float32)[2] != first


def test_progress_rises_to_one(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    shares: list[float] = []
    weights.load(tmp_path, torch.float32, shares.append)
    assert shares == sorted(shares)
    assert len(shares) > 2
    assert shares[-1] == 1.0


def change_tensors(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Rewrite the weights with some tensors replaced, added or (None) left out."""
    tensors: dict[str, Any] = {**load_file(folder / "model.safetensors"), **change}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, r"has no model\.layers\.1\.mlp\.up_proj"),
        ("lm_head.weight", None, "has no lm_head"),
        ("model.layers.2.mlp.up_proj.weight", torch.ones(48, 32), r"not use: model\.layers\.2"),
        ("model.layers.0.self_attn.o_proj.bias", torch.ones(32), r"not use: .*o_proj\.bias"),
        ("model.norm.weight", torch.ones(31), r"model\.norm\.weight has shape \[31\]"),
        ("model.norm.weight", torch.ones(32, 1), r"asks for \[32\]"),
        ("model.norm.weight", torch.ones(32, dtype=torch.int8), r"model\.norm\.weight has dtype"),
    ],
)
def test_tensors_must_be_those_of_the_config(
    name: str, tensor: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    change_tensors(tmp_path, {name: tensor})
    with pytest.raises(ModelError, match=message):
        weights.load(tmp_path, torch.float32)


def test_tensors_without_a_use_are_passed_over(tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    change_tensors(
        tmp_path,
        {
            "lm_head.weight": torch.zeros(32, 32),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
        },
    )
    assert_equal(tmp_path, model.state_dict())


def test_a_gguf_with_a_missing_tensor_is_refused_by_name(tmp_path: Path) -> None:
    from tests.engine.model.files import gguf_metadata, gguf_tensors, write_gguf

    model = tiny_model("llama")
    tensors = gguf_tensors(model, "llama")
    del tensors["blk.1.ffn_down.weight"]
    path = write_gguf(tmp_path / "m.gguf", "llama", gguf_metadata(model.config, "llama"), tensors)
    with pytest.raises(ModelError, match=r"has no model\.layers\.1\.mlp\.down_proj\.weight"):
        weights.load(path, torch.float32)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04K\x01.",
        struct.pack("<Q", 1 << 60),
        struct.pack("<Q", 100) + b"{" * 100,
        struct.pack("<Q", 2) + b"{}",
    ],
    ids=["empty", "pickle", "huge header", "no JSON", "no tensors"],
)
def test_broken_safetensors_are_refused(content: bytes, tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError):
        weights.load(tmp_path, torch.float32)


def test_truncated_safetensors_are_refused(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read as safetensors"):
        weights.load(tmp_path, torch.float32)


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="must be safetensors"):
        weights.load(tmp_path, torch.float32)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "has no weight_map"),
        ({"weight_map": {}}, "has no weight_map"),
        ({"weight_map": {"a": "../secret.safetensors"}}, "not a file beside it"),
        ({"weight_map": {"a": "/etc/passwd"}}, "not a file beside it"),
        ({"weight_map": {"a": "none.safetensors"}}, r"has no none\.safetensors"),
        ({"weight_map": {"a": ""}}, "has no"),
        ({"weight_map": {"a": ".."}}, "has no"),
    ],
)
def test_an_index_names_files_beside_it(
    index: dict[str, Any], message: str, tmp_path: Path
) -> None:
    tiny_model("llama").config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=message):
        weights.load(tmp_path, torch.float32)
