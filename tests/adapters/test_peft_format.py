import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from gateway.adapters.peft_format import check_folder, version_digest, write_manifest
from gateway.engine.messages import MANIFEST_FILE, AdapterManifest
from gateway.errors import InvalidAdapter
from tests.adapters.making import (
    INFO,
    config,
    key,
    packed,
    tensors,
    weights,
    write_folder,
)
from tests.fakes import model_info

Q0 = "model.layers.0.self_attn.q_proj"


def check(folder: Path, file: bytes | None = None, **changes: Any) -> Any:
    return check_folder(write_folder(folder, config(**changes), file), INFO)


def refusal(folder: Path, file: bytes | None = None, **changes: Any) -> str:
    with pytest.raises(InvalidAdapter) as caught:
        check(folder, file, **changes)
    return caught.value.message


def test_an_adapter_is_described_for_the_engine(tmp_path: Path) -> None:
    manifest = check(tmp_path)
    assert manifest.rank_max == 4
    assert manifest.targets == ["q_proj", "v_proj"]
    assert manifest.warnings == []
    found = {(item.layer, item.target): item for item in manifest.engine.targets}
    assert set(found) == {(layer, name) for layer in (0, 1) for name in ("q_proj", "v_proj")}
    first = found[0, "q_proj"]
    assert (first.rank, first.scale) == (4, 2.0)
    assert (first.a, first.b) == (key(0, "q_proj", "A"), key(0, "q_proj", "B"))


@pytest.mark.parametrize("rank", [1, 3, 4, 12, 24, 40, 100])
def test_f28_any_rank_is_accepted(tmp_path: Path, rank: int) -> None:
    manifest = check(tmp_path, weights(tensors(rank=rank)), r=rank, use_rslora=True)
    assert manifest.engine.targets[0].scale == 8 / math.sqrt(rank)


def test_f16_ranks_and_scales_are_resolved_for_each_module(tmp_path: Path) -> None:
    made = tensors(("v_proj",), rank=4) | tensors(("q_proj",), rank=2)
    manifest = check(tmp_path, weights(made), rank_pattern={"q_proj": 2}, alpha_pattern={Q0: 6})
    found = {(t.layer, t.target): (t.rank, t.scale) for t in manifest.engine.targets}
    assert found == {
        (0, "q_proj"): (2, 3.0),
        (1, "q_proj"): (2, 4.0),
        (0, "v_proj"): (4, 2.0),
        (1, "v_proj"): (4, 2.0),
    }


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.removeprefix("base_model.model."),
        lambda name: name.replace(".weight", ".default.weight"),
    ],
)
def test_f11_key_spellings_of_other_peft_versions_are_accepted(tmp_path: Path, rename: Any) -> None:
    made = {rename(name): tensor for name, tensor in tensors().items()}
    manifest = check(tmp_path, weights(made))
    assert {item.a for item in manifest.engine.targets} <= set(made)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_f29_the_stored_dtype_is_free(tmp_path: Path, dtype: str) -> None:
    check(tmp_path, weights(tensors(dtype=dtype)))


def test_f29_bfloat16_is_accepted(tmp_path: Path) -> None:
    made = {
        name: ("BF16", tensor.shape, (tensor.view("uint32") >> 16).astype("uint16").tobytes())
        for name, tensor in tensors().items()
    }
    check(tmp_path, packed(made))


@pytest.mark.parametrize(
    "target_modules",
    [
        ["q_proj", "v_proj"],
        ["self_attn.q_proj", "self_attn.v_proj"],
        r".*\.(q_proj|v_proj)",
        r"model\.layers\.[01]\.self_attn\.[qv]_proj",
        None,
    ],
)
def test_f14_targets_come_from_the_tensors(tmp_path: Path, target_modules: Any) -> None:
    every = tensors(layers=range(30)) if target_modules == r".*\.(q_proj|v_proj)" else tensors()
    layers = [0, 1] if isinstance(target_modules, list) else None
    manifest = check(
        tmp_path, weights(every), target_modules=target_modules, layers_to_transform=layers
    )
    assert manifest.targets == ["q_proj", "v_proj"]


def test_f14_all_linear_means_all_seven(tmp_path: Path) -> None:
    made = tensors(INFO.projections, layers=range(30), rank=1)
    manifest = check(
        tmp_path, weights(made), target_modules="all-linear", layers_to_transform=None, r=1
    )
    assert manifest.targets == sorted(INFO.projections)


def test_modules_that_the_config_excludes_are_not_expected(tmp_path: Path) -> None:
    check(tmp_path, weights(tensors(("q_proj",))), exclude_modules=["v_proj"])
    check(tmp_path, weights(tensors(("q_proj",))), exclude_modules=r".*\.v_proj")


def test_a_layers_pattern_says_which_number_is_the_layer(tmp_path: Path) -> None:
    check(tmp_path, layers_pattern="layers")
    check(tmp_path, layers_pattern=["h", "layers"])
    check(tmp_path, layers_pattern="(h|layers)")
    assert "does not target" in refusal(tmp_path, layers_pattern=["h"])


def test_a_target_by_its_whole_name_is_in_whatever_layer(tmp_path: Path) -> None:
    made = tensors(("q_proj",), layers=[5])
    name = "model.layers.5.self_attn.q_proj"
    check(tmp_path, weights(made), target_modules=[name], layers_to_transform=[0])


def test_f12_an_adapter_of_zeros_is_accepted_with_a_warning(tmp_path: Path) -> None:
    made = {n: np.zeros_like(t) if ".lora_B." in n else t for n, t in tensors().items()}
    assert "All lora_B are zero" in check(tmp_path, weights(made)).warnings[0]


def test_f19_an_adapter_of_another_base_model_is_told_its_shapes(tmp_path: Path) -> None:
    other = msgspec.structs.replace(INFO, projections=dict.fromkeys(INFO.projections, (1024, 1024)))
    message = refusal(tmp_path, weights(tensors(("q_proj",), info=other, rank=8)), r=8)
    assert message.startswith("The adapter was trained for another base model: q_proj.lora_A is ")
    assert "8×1024 here, this base needs 8×576 (smollm2-135m-instruct)" in message
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in message


def test_f18_the_shape_of_each_projection_is_its_own(tmp_path: Path) -> None:
    made = tensors(("k_proj",))
    made[key(1, "k_proj", "B")] = np.zeros((576, 4), "float32")
    message = refusal(tmp_path, weights(made), target_modules=["k_proj"])
    assert "k_proj.lora_B is 576×4 here, this base needs 192×4" in message


def test_an_adapter_of_a_deeper_base_model_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, weights(tensors(layers=[30])), layers_to_transform=[30])
    assert "another base model" in message
    assert "layer 30" in message


def test_f5_tensors_that_fit_nothing_are_listed(tmp_path: Path) -> None:
    made = tensors() | {"transformer.h.0.attn.c_attn.lora_A.weight": np.zeros((4, 4), "float32")}
    message = refusal(tmp_path, weights(made))
    assert "that cannot be served (1): 'transformer.h.0.attn.c_attn.lora_A" in message


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("base_model.model.model.embed_tokens.lora_A.weight", "not one that is served"),
        ("base_model.model.model.embed_positions.lora_embedding_A", "not one that is served"),
        ("base_model.model.lm_head.lora_embedding_A", "not one that is served"),
        ("base_model.model.lm_head.lora_magnitude_vector", "DoRA"),
        ("base_model.model.lm_head.bias", "Biases"),
        ("base_model.model.lm_head.modules_to_save.weight", "replaced modules"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", "DoRA"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias", "Biases"),
        ("base_model.model.model.norm.modules_to_save.weight", "replaced modules"),
        ("base_model.model.score.weight", "classifier"),
        ("base_model.vera_lambda_b", "VeRA"),
        ("base_model.model.model.layers.0.mlp.q_proj.lora_A.weight", "not one that is served"),
        ("base_model.model.model.layers.00.self_attn.q_proj.lora_A.weight", "not one that is"),
        ("base_model.model.model.layers.٠.self_attn.q_proj.lora_A.weight", "not one that is"),
        ("model.layers.0.self_attn.q_proj.weight", "Expected are names such as"),
    ],
)
def test_f6_f8_f9_foreign_tensors_are_refused_with_advice(
    tmp_path: Path, name: str, advice: str
) -> None:
    message = refusal(tmp_path, weights(tensors() | {name: np.zeros((4, 4), "float32")}))
    assert advice in message


def test_f11_a_missing_half_is_named(tmp_path: Path) -> None:
    made = tensors()
    del made[key(1, "v_proj", "B")]
    assert "lora_A but not lora_B for layers.1.v_proj" in refusal(tmp_path, weights(made))


def test_f15_targets_without_tensors_are_named(tmp_path: Path) -> None:
    message = refusal(tmp_path, target_modules=["q_proj", "v_proj", "k_proj"])
    assert "lacks weights for layers.0.k_proj, layers.1.k_proj" in message


def test_f15_tensors_that_peft_would_ignore_are_named(tmp_path: Path) -> None:
    message = refusal(tmp_path, target_modules=["q_proj"])
    assert "layers.0.v_proj, layers.1.v_proj, which adapter_config.json does not target" in message


def test_a_rank_that_is_not_the_configs_is_refused(tmp_path: Path) -> None:
    assert "rank 4 in layers.0.q_proj, adapter_config.json says 8" in refusal(tmp_path, r=8)


def test_halves_of_different_ranks_are_refused(tmp_path: Path) -> None:
    made = tensors()
    made[key(0, "q_proj", "B")] = np.zeros((576, 3), "float32")
    assert "rank 4 in lora_A but 3 in lora_B" in refusal(tmp_path, weights(made))


@pytest.mark.parametrize("shape", [(0, 576), (4, 576, 1), (2304,)])
def test_what_is_not_a_matrix_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    made = tensors() | {key(0, "q_proj", "A"): np.zeros(shape, "float32")}
    assert "not matrices" in refusal(tmp_path, weights(made))


def test_one_tensor_under_two_spellings_is_refused(tmp_path: Path) -> None:
    name = key(0, "q_proj", "A")
    made = tensors() | {name.removeprefix("base_model.model."): tensors()[name]}
    assert "under two spellings" in refusal(tmp_path, weights(made))


def test_f29_integers_are_refused(tmp_path: Path) -> None:
    made = tensors() | {key(0, "q_proj", "A"): np.zeros((4, 576), "int8")}
    assert "in I8; save it as F32" in refusal(tmp_path, weights(made))


def test_f29_nan_is_refused_with_the_tensors_name(tmp_path: Path) -> None:
    made = tensors()
    made[key(1, "q_proj", "B")][7, 2] = math.nan
    assert f"NaN in {key(1, 'q_proj', 'B')}" in refusal(tmp_path, weights(made))


def test_f29_a_value_that_overflows_in_the_engines_dtype_is_refused(tmp_path: Path) -> None:
    made = tensors()
    made[key(1, "q_proj", "B")][7, 2] = 70000
    folder = write_folder(tmp_path, config(), weights(made))
    check_folder(folder, INFO)
    with pytest.raises(InvalidAdapter, match=r"70000 in .* too large for float16"):
        check_folder(folder, model_info(dtype="float16"))


def test_f23_a_missing_file_is_named_with_the_call_that_writes_it(tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        folder = write_folder(tmp_path / name)
        (folder / name).unlink()
        with pytest.raises(InvalidAdapter, match=f"{name} is missing.*save_pretrained"):
            check_folder(folder, INFO)


def test_the_digest_is_of_the_content_alone(tmp_path: Path) -> None:
    one = version_digest(check(tmp_path / "one"))
    assert version_digest(check(tmp_path / "two")) == one
    assert version_digest(check(tmp_path / "alpha", lora_alpha=16)) != one
    assert version_digest(check(tmp_path / "seed", weights(tensors(seed=1)))) != one


def test_a_folder_of_our_own_gets_its_manifest_in_place(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    ref = write_manifest(folder, INFO)
    manifest = msgspec.json.decode((folder / MANIFEST_FILE).read_bytes(), type=AdapterManifest)
    assert manifest == check_folder(folder, INFO).engine
    assert (ref.folder, len(ref.digest)) == (str(folder), 64)
