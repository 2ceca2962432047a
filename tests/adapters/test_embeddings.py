"""LoRA on the input and output embeddings, and the base's own, which PEFT saves along with it."""

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from gateway.adapters.peft_format import Manifest, check_folder
from gateway.engine.messages import ModelInfo
from gateway.errors import InvalidAdapter
from tests.adapters.making import (
    EMBEDDING_KEYS,
    INFO,
    Tensors,
    config,
    embedding_tensors,
    packed,
    tensors,
    weights,
    write_folder,
)

BOTH = ["embed_tokens", "lm_head"]
SMALL = msgspec.structs.replace(INFO, hidden_size=8, vocab_size=40)


def check(folder: Path, made: Tensors | bytes, info: ModelInfo = SMALL, **changes: Any) -> Manifest:
    file = made if isinstance(made, bytes) else weights(made)
    options = {"target_modules": BOTH, "layers_to_transform": None} | changes
    return check_folder(write_folder(folder, config(**options), file), info)


def refusal(folder: Path, made: Tensors | bytes, info: ModelInfo = SMALL, **changes: Any) -> str:
    with pytest.raises(InvalidAdapter) as caught:
        check(folder, made, info, **changes)
    return caught.value.message


def embeddings(rank: int = 4) -> Tensors:
    return embedding_tensors(rank=rank, info=SMALL)


def test_both_are_described_as_targets_of_layer_0(tmp_path: Path) -> None:
    manifest = check(tmp_path, embeddings(), alpha_pattern={"lm_head": 2})
    assert manifest.targets == BOTH
    assert manifest.warnings == []
    found = {item.target: (item.layer, item.rank, item.scale, item.a, item.b)
             for item in manifest.engine.targets}  # fmt: skip
    assert found == {
        "embed_tokens": (0, 4, 2.0, *EMBEDDING_KEYS["embed_tokens"]),
        "lm_head": (0, 4, 0.5, *EMBEDDING_KEYS["lm_head"]),
    }


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.removeprefix("base_model.model."),
        lambda name: name.replace("_A", "_A.default").replace("_B", "_B.default"),
    ],
)
def test_f11_other_spellings_are_accepted(tmp_path: Path, rename: Any) -> None:
    made = {rename(name): tensor for name, tensor in embeddings().items()}
    assert check(tmp_path, made).targets == BOTH


@pytest.mark.parametrize(
    ("target_modules", "targeted"),
    [
        (["lm_head"], ["lm_head"]),
        (["model.embed_tokens"], ["embed_tokens"]),
        (["model.embed_tokens", "lm_head"], BOTH),
        (r"lm_head|.*\.embed_tokens", BOTH),
        (r".*head", ["lm_head"]),
        (None, BOTH),
    ],
)
def test_f14_a_list_or_a_pattern_may_name_them(
    tmp_path: Path, target_modules: Any, targeted: list[str]
) -> None:
    made = embedding_tensors(targeted, info=SMALL)
    assert check(tmp_path, made, target_modules=target_modules).targets == targeted


def test_all_linear_leaves_them_out(tmp_path: Path) -> None:
    every = tensors(INFO.projections, layers=range(30), rank=1)
    options: dict[str, Any] = {"target_modules": "all-linear", "layers_to_transform": None, "r": 1}
    check(tmp_path / "without", every, INFO, **options)
    head = embedding_tensors(["lm_head"], rank=1)
    message = refusal(tmp_path / "with", every | head, INFO, **options)
    assert "weights for lm_head, which adapter_config.json does not target" in message


@pytest.mark.parametrize("layer", [0, 1])
def test_a_choice_of_layers_leaves_out_what_is_in_none_unless_its_whole_name_is_given(
    tmp_path: Path, layer: int
) -> None:
    head = embedding_tensors(["lm_head"], info=SMALL)
    check(tmp_path / "head", head, layers_to_transform=[layer])  # lm_head is its whole name
    whole_names = ["model.embed_tokens", "lm_head"]
    check(tmp_path / "both", embeddings(), layers_to_transform=[layer], target_modules=whole_names)
    message = refusal(tmp_path / "embed", embeddings(), layers_to_transform=[layer])
    assert "weights for embed_tokens, which adapter_config.json does not target" in message


def test_what_is_excluded_is_not_expected(tmp_path: Path) -> None:
    made = embedding_tensors(["lm_head"], info=SMALL)
    assert check(tmp_path, made, exclude_modules=["embed_tokens"]).targets == ["lm_head"]


def test_f15_a_target_without_tensors_is_named(tmp_path: Path) -> None:
    made = embedding_tensors(["lm_head"], info=SMALL)
    assert "lacks weights for embed_tokens," in refusal(tmp_path, made)


def test_f16_patterns_decide_their_ranks(tmp_path: Path) -> None:
    made = embedding_tensors(["embed_tokens"], 2, SMALL) | embedding_tensors(["lm_head"], 4, SMALL)
    check(tmp_path / "right", made, rank_pattern={"embed_tokens": 2})
    message = refusal(tmp_path / "wrong", made, rank_pattern={"embed_tokens": 2, "lm_head": 2})
    assert "rank 4 in lm_head, adapter_config.json says 2" in message


@pytest.mark.parametrize("missing", [name for pair in EMBEDDING_KEYS.values() for name in pair])
def test_f11_a_missing_half_is_named(tmp_path: Path, missing: str) -> None:
    made = embeddings()
    del made[missing]
    target = "lm_head" if "lm_head" in missing else "embed_tokens"
    assert f"for {target} (" in refusal(tmp_path, made)


@pytest.mark.parametrize("name", [name for pair in EMBEDDING_KEYS.values() for name in pair])
def test_f19_another_vocabulary_is_told_its_shapes(tmp_path: Path, name: str) -> None:
    made = embedding_tensors(info=msgspec.structs.replace(SMALL, vocab_size=41, hidden_size=9))
    message = refusal(tmp_path, embeddings() | {name: made[name]})
    side = "A" if "_A" in name else "B"
    shape = "×".join(map(str, embeddings()[name].shape))
    assert f"{'lm_head' if 'lm_head' in name else 'embed_tokens'}.lora_{side} is " in message
    assert f"this base needs {shape}" in message


def test_f12_embeddings_start_with_an_a_of_zeros(tmp_path: Path) -> None:
    zero = {"embed_tokens": "lora_embedding_A", "lm_head": "lora_B"}
    made = {
        name: np.zeros_like(tensor) if any(part in name for part in zero.values()) else tensor
        for name, tensor in embeddings().items()
    }
    assert "All lora_B are zero" in check(tmp_path / "zeros", made).warnings[0]
    trained = made | {name: embeddings()[name] for name in EMBEDDING_KEYS["embed_tokens"]}
    assert check(tmp_path / "trained", trained).warnings == []


# --- the base model's own ------------------------------------------------------------------------

BASE = np.random.default_rng(7).normal(0, 0.1, (2, 40, 8)).astype("float32")
"""Input and output embeddings."""
BASE[:, 0, :2] = 1 + 2**-8, 1 + 3 * 2**-8  # half-way between two values of bfloat16
COPIES = [
    "base_model.model.model.embed_tokens.base_layer.weight",
    "base_model.model.lm_head.base_layer.weight",
]


def bytes_of(values: torch.Tensor) -> bytes:
    return bytes(values.view(torch.uint8).numpy())


def sha256(values: torch.Tensor) -> str:
    return hashlib.sha256(bytes_of(values)).hexdigest()


def info_with(dtype: str = "float32", base: Any = BASE) -> ModelInfo:
    """A base with these embeddings, as torch rounds them to the engine's dtype."""
    digests = {
        name: sha256(torch.tensor(values, dtype=getattr(torch, dtype)))
        for name, values in zip(BOTH, base, strict=True)
    }
    return msgspec.structs.replace(SMALL, embeddings_sha256=digests, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("spelling", [".base_layer.weight", ".weight"])
def test_f8_embeddings_that_are_the_bases_are_accepted_with_a_warning(
    tmp_path: Path, spelling: str, dtype: str
) -> None:
    copies = {
        name.replace(".base_layer.weight", spelling): values
        for name, values in zip(COPIES, BASE, strict=True)
    }
    manifest = check(tmp_path, embeddings() | copies, info_with(dtype))
    assert manifest.targets == BOTH
    assert "save_embedding_layers=False" in manifest.warnings[0]


def test_f8_a_bfloat16_base_is_known_in_a_float32_file_and_the_other_way_round(
    tmp_path: Path,
) -> None:
    rounded = torch.from_numpy(BASE).bfloat16()
    widened = rounded.float().numpy()
    copies = dict(zip(COPIES, widened, strict=True))
    check(tmp_path / "f32 in bf16", embeddings() | copies, info_with("bfloat16"))
    entries = {name: ("F32", v.shape, v.tobytes()) for name, v in embeddings().items()}
    halves = {
        name: ("BF16", values.shape, bytes_of(values))
        for name, values in zip(COPIES, rounded, strict=True)
    }
    check(tmp_path / "bf16 in f32", packed(entries | halves), info_with("float32", widened))


def test_f8_embeddings_that_differ_in_one_value_are_refused(tmp_path: Path) -> None:
    for index, name in enumerate(COPIES):
        changed = BASE[index].copy()
        changed[39, 7] += 1e-3
        message = refusal(tmp_path / str(index), embeddings() | {name: changed}, info_with())
        assert f"{name}, whose values are not those of this base model" in message
        assert "save_embedding_layers=False" in message


def test_f8_the_input_embeddings_do_not_pass_for_the_output_embeddings(tmp_path: Path) -> None:
    assert "whose values" in refusal(tmp_path, embeddings() | {COPIES[1]: BASE[0]}, info_with())


def test_f8_another_number_of_tokens_is_refused(tmp_path: Path) -> None:
    longer = np.concatenate((BASE[0], BASE[0][:2]))
    message = refusal(tmp_path, embeddings() | {COPIES[0]: longer}, info_with())
    assert "(42, 8); the embeddings of this base are (40, 8)" in message
    assert "vocabulary" in message


def test_a_copy_in_integers_is_refused(tmp_path: Path) -> None:
    made = embeddings() | {COPIES[0]: np.zeros((40, 8), "int8")}
    assert "in I8; save it as F32" in refusal(tmp_path, made, info_with())


# --- tied ----------------------------------------------------------------------------------------

TIED = info_with(base=[BASE[0], BASE[0]])


def tied() -> Tensors:
    made = embedding_tensors(["embed_tokens"], info=SMALL)
    a, b = (made[name] for name in EMBEDDING_KEYS["embed_tokens"])
    head_a, head_b = EMBEDDING_KEYS["lm_head"]
    return made | {head_a: b.T.copy(), head_b: a.T.copy()}


def test_tied_adapters_of_tied_embeddings_are_accepted(tmp_path: Path) -> None:
    options = {"ensure_weight_tying": True, "target_modules": ["model.embed_tokens"]}
    assert check(tmp_path, tied(), TIED, **options).targets == BOTH


def test_tied_adapters_that_differ_are_refused(tmp_path: Path) -> None:
    for name in EMBEDDING_KEYS["lm_head"]:
        made = tied()
        made[name][1, 1] += 1
        assert "transposed" in refusal(tmp_path / name, made, TIED, ensure_weight_tying=True)


def test_one_half_of_tied_adapters_is_refused(tmp_path: Path) -> None:
    made = embedding_tensors(["embed_tokens"], info=SMALL)
    message = refusal(
        tmp_path, made, TIED, ensure_weight_tying=True, target_modules=["embed_tokens"]
    )
    assert "lacks weights for lm_head" in message


def test_embeddings_that_are_not_tied_have_adapters_of_their_own(tmp_path: Path) -> None:
    assert check(tmp_path, embeddings(), info_with(), ensure_weight_tying=True).targets == BOTH


def test_a_pattern_that_matches_no_bare_name_ties_nothing(tmp_path: Path) -> None:
    made = embedding_tensors(["embed_tokens"], info=SMALL)
    pattern = r"model\.embed_tokens"
    manifest = check(tmp_path, made, TIED, ensure_weight_tying=True, target_modules=pattern)
    assert manifest.targets == ["embed_tokens"]


def test_tying_says_nothing_of_adapters_within_layers(tmp_path: Path) -> None:
    options = {"ensure_weight_tying": True, "target_modules": ["q_proj", "v_proj"]}
    info = msgspec.structs.replace(TIED, hidden_size=576)
    manifest = check(tmp_path, tensors(), info, **options, layers_to_transform=[0, 1])
    assert manifest.targets == ["q_proj", "v_proj"]
