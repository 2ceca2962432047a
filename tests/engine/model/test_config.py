import json
from pathlib import Path
from typing import Any

import pytest

from gateway.engine.model.config import ModelConfig
from gateway.engine.model.errors import ModelError
from gateway.engine.model.folder_config import read_folder
from gateway.engine.model.gguf import GgufFile
from gateway.engine.model.gguf_config import read_gguf
from tests.engine.model.files import (
    ARCHITECTURES,
    gguf_metadata,
    gguf_tensors,
    tiny_gguf,
    tiny_model,
    write_gguf,
)

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 256,
}


def folder_with(tmp_path: Path, config: dict[str, Any], **others: dict[str, Any]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name, content in others.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path


def assert_same_shape(ours: ModelConfig, theirs: Any) -> None:
    """`theirs` is transformers' config."""
    assert ours.layers == theirs.num_hidden_layers
    assert ours.hidden_size == theirs.hidden_size
    assert ours.intermediate_size == theirs.intermediate_size
    assert ours.heads == theirs.num_attention_heads
    assert ours.kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == getattr(
        theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads
    )
    assert ours.vocab_size == theirs.vocab_size
    assert ours.context_tokens == theirs.max_position_embeddings
    assert ours.rms_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.tie_embeddings == theirs.tie_word_embeddings


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_folder_is_read_as_transformers_wrote_it(architecture: str, tmp_path: Path) -> None:
    theirs = tiny_model(architecture).config
    theirs.save_pretrained(tmp_path)
    ours = read_folder(tmp_path)
    assert_same_shape(ours, theirs)
    assert ours.architecture == architecture
    assert ours.qkv_bias == (architecture == "qwen2")
    assert ours.qk_norm == (architecture == "qwen3")
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)
    assert ours.rope_scaling is None
    assert (ours.eos_token_ids, ours.bos_token_id) == ([2], 1)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_defaults_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    written = LLAMA | {"model_type": architecture, "num_key_value_heads": 4}
    theirs = AutoConfig.for_model(**written)
    assert_same_shape(read_folder(folder_with(tmp_path, written)), theirs)


def test_without_key_value_heads_a_llama_has_as_many_as_heads(tmp_path: Path) -> None:
    assert read_folder(folder_with(tmp_path, LLAMA)).kv_heads == 4
    qwen = LLAMA | {"model_type": "qwen2"}
    assert read_folder(folder_with(tmp_path, qwen | {"num_key_value_heads": None})).kv_heads == 4
    with pytest.raises(ModelError, match="has no num_key_value_heads"):
        read_folder(folder_with(tmp_path, qwen))


def test_the_gguf_and_its_reference_folder_have_one_config(
    base_model: Path, reference_folder: Path
) -> None:
    with GgufFile.open(base_model) as file:
        assert read_gguf(file) == read_folder(reference_folder)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_gguf_is_read_as_the_folder_it_was_made_of(
    architecture: str, tied: bool, tmp_path: Path
) -> None:
    path, model = tiny_gguf(tmp_path / "m.gguf", architecture, tie_word_embeddings=tied)
    model.config.save_pretrained(tmp_path)
    ours, expected = read_gguf(GgufFile.open(path)), read_folder(tmp_path)
    assert ours.rms_eps == pytest.approx(expected.rms_eps)  # float32 in the file
    assert ours == type(ours)(
        **{name: getattr(expected, name) for name in expected.__struct_fields__}
        | {"rms_eps": ours.rms_eps}
    )


@pytest.mark.parametrize(
    "written",
    [
        {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
        {"rope_theta": 500.0, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    ],
)
def test_rope_is_found_wherever_transformers_writes_it(
    written: dict[str, Any], tmp_path: Path
) -> None:
    config = read_folder(folder_with(tmp_path, LLAMA | written))
    assert config.rope_theta == 500.0
    assert config.rope_scaling == {"rope_type": "linear", "factor": 2.0}


def test_llama3_rope_keeps_its_parameters(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = read_folder(folder_with(tmp_path, LLAMA | {"rope_scaling": scaling}))
    assert config.rope_scaling == scaling


def test_yarn_without_an_original_context_takes_the_context(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0}
    config = read_folder(folder_with(tmp_path, LLAMA | {"rope_scaling": scaling}))
    assert config.rope_scaling == scaling | {"original_max_position_embeddings": 256}


def test_gguf_rope_scaling_is_read(tmp_path: Path) -> None:
    model = tiny_model("llama")
    metadata = gguf_metadata(model.config, "llama") | {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 16,
    }
    path = write_gguf(tmp_path / "m.gguf", "llama", metadata, gguf_tensors(model, "llama"))
    assert read_gguf(GgufFile.open(path)).rope_scaling == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    }


def test_gguf_rope_factors_are_read(tmp_path: Path) -> None:
    import numpy as np
    from gguf.constants import GGMLQuantizationType

    model = tiny_model("llama")
    factors = np.array([1, 1, 2, 8], np.float32)
    tensors = gguf_tensors(model, "llama") | {
        "rope_freqs.weight": (factors, GGMLQuantizationType.F32)
    }
    path = write_gguf(tmp_path / "m.gguf", "llama", gguf_metadata(model.config, "llama"), tensors)
    expected = {"rope_type": "factors", "factors": [1.0, 1.0, 2.0, 8.0]}
    assert read_gguf(GgufFile.open(path)).rope_scaling == expected


def test_end_tokens_of_the_generation_config_win(tmp_path: Path) -> None:
    folder = folder_with(
        tmp_path,
        LLAMA | {"eos_token_id": 2},
        generation_config={"eos_token_id": [7, 8, 7]},
    )
    assert read_folder(folder).eos_token_ids == [7, 8]


def test_a_sliding_window_counts_only_where_it_is_used(tmp_path: Path) -> None:
    qwen = LLAMA | {"model_type": "qwen2", "num_key_value_heads": 4, "sliding_window": 32}
    assert read_folder(folder_with(tmp_path, qwen)).sliding_window is None
    used = qwen | {"use_sliding_window": True, "max_window_layers": 0}
    assert read_folder(folder_with(tmp_path, used)).sliding_window == 32
    unused = qwen | {"use_sliding_window": True, "max_window_layers": 2}
    assert read_folder(folder_with(tmp_path, unused)).sliding_window is None
    mistral = LLAMA | {"model_type": "mistral", "num_key_value_heads": 4, "sliding_window": None}
    assert read_folder(folder_with(tmp_path, mistral)).sliding_window is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt_neox"}, "supported are llama, mistral, qwen2"),
        ({"model_type": None}, "has no model_type"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "has no factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"model_type": "smollm3"}, "no_rope_layers"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({"hidden_size": "64"}, "hidden_size must be of type int"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be of type int"),
        ({"num_hidden_layers": 10**9}, "layers"),
        ({"num_attention_heads": 0}, "heads is 0"),
        ({"num_key_value_heads": 3}, "cannot share"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"vocab_size": -5}, "vocab_size is -5"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        (
            {
                "model_type": "qwen2",
                "num_key_value_heads": 4,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            "mixes layers",
        ),
    ],
)
def test_what_the_decoder_cannot_compute_is_refused_by_name(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        read_folder(folder_with(tmp_path, LLAMA | change))


def test_smollm3_with_rope_in_every_layer_is_plain(tmp_path: Path) -> None:
    config = LLAMA | {"model_type": "smollm3", "no_rope_layers": [1, 1], "num_key_value_heads": 4}
    assert read_folder(folder_with(tmp_path, config)).tie_embeddings


@pytest.mark.parametrize("content", ["", "[]", "{", '{"model_type": "llama"}', "[" * 100_000])
def test_a_broken_config_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.rope.dimension_count": 4}, "part of each head"),
        ({"llama.attention.value_length": 4}, "different sizes"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.block_count": "two"}, "must be an integer"),
        ({"llama.attention.head_count_kv": [2, 4]}, "differs between layers"),
        ({"split.count": 3}, "split GGUF"),
    ],
)
def test_an_unusual_gguf_is_refused_by_name(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = tiny_model("llama")
    metadata = gguf_metadata(model.config, "llama") | change
    path = write_gguf(tmp_path / "m.gguf", "llama", metadata, gguf_tensors(model, "llama"))
    with pytest.raises(ModelError, match=message):
        read_gguf(GgufFile.open(path))


def test_an_unknown_gguf_architecture_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "mamba", {}, {})
    with pytest.raises(ModelError, match="'mamba'; supported are llama, qwen2, qwen3"):
        read_gguf(GgufFile.open(path))
