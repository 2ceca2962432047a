import dataclasses
import json
import math
from contextlib import suppress
from typing import Any

import pytest

from gateway.adapters.peft_config import HONOURED, REFUSED, WITHOUT_EFFECT, read_config
from gateway.errors import InvalidAdapter
from tests.adapters.making import config


def read(**changes: Any) -> Any:
    return read_config(json.dumps(config(**changes)).encode())


def test_f26_every_field_that_peft_writes_is_decided() -> None:
    from peft import LoraConfig

    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    assert fields - HONOURED - WITHOUT_EFFECT.keys() - REFUSED.keys() == set()


def test_no_field_is_decided_twice() -> None:
    assert HONOURED & (WITHOUT_EFFECT.keys() | REFUSED.keys()) == set()
    assert WITHOUT_EFFECT.keys() & REFUSED.keys() == set()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_f26_a_field_that_is_not_served_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidAdapter, match=name) as caught:
        read(**{name: ["something"]})
    assert caught.value.param == f"config.{name}"
    off: list[object] = [None, False, [], {}]
    for value in off:
        read(**{name: value})


@pytest.mark.parametrize("name", sorted(WITHOUT_EFFECT))
def test_a_field_without_effect_may_be_anything(name: str) -> None:
    before = read()
    after = read(**{name: "anything"})
    assert after.scale_of("model.layers.0.self_attn.q_proj") == before.scale_of(
        "model.layers.0.self_attn.q_proj"
    )


def test_f26_an_unknown_field_is_refused_unless_it_says_nothing() -> None:
    nothing: list[object] = [None, False, 0, "", [], {}]
    for value in nothing:
        read(use_future_lora=value)
    with pytest.raises(InvalidAdapter, match='"use_future_lora"'):
        read(use_future_lora=True)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("peft_type", "VERA", "VERA"),
        ("peft_type", None, "peft_type null"),
        ("task_type", "SEQ_CLS", "SEQ_CLS"),
        ("bias", "all", "bias='none'"),
        ("bias", "lora_only", "bias='none'"),
        ("init_lora_weights", "pissa", "Convert the adapter"),
        ("init_lora_weights", "pissa_niter_16", "Convert the adapter"),
        ("init_lora_weights", "olora", "Convert the adapter"),
        ("init_lora_weights", "loftq", "Convert the adapter"),
        ("init_lora_weights", "corda", "Convert the adapter"),
        ("init_lora_weights", "tomorrow", "Convert the adapter"),
        ("r", 0, "r that cannot be used"),
        ("r", -1, "r that cannot be used"),
        ("r", 4.5, "r that cannot be used"),
        ("r", "4", "r that cannot be used"),
        ("r", True, "r that cannot be used"),
        ("r", 10**30, "r that cannot be used"),
        ("lora_alpha", "8", "lora_alpha that cannot be used"),
        ("lora_alpha", 10**400, "lora_alpha that cannot be used"),
        ("lora_alpha", True, "lora_alpha that cannot be used"),
        ("use_rslora", 1, "use_rslora that cannot be used"),
        ("rank_pattern", [1], "rank_pattern"),
        ("rank_pattern", {"q_proj": 0}, "rank_pattern"),
        ("rank_pattern", {"(a+)+": 4}, "repeats a group"),
        ("alpha_pattern", {"q_proj": "x"}, "alpha_pattern"),
        ("alpha_pattern", {"q_proj(": 4}, "alpha_pattern"),
        ("target_modules", 5, "target_modules that cannot be used"),
        ("target_modules", ["q_proj", 5], "target_modules that cannot be used"),
        ("exclude_modules", {"a": 1}, "exclude_modules that cannot be used"),
        ("layers_to_transform", "0", "layers_to_transform that cannot be used"),
        ("layers_to_transform", [-1], "layers_to_transform that cannot be used"),
        ("layers_pattern", [1], "layers_pattern that cannot be used"),
        ("layers_pattern", "model|x", "alternatives outside of parentheses"),
        ("layers_pattern", "|", "alternatives outside of parentheses"),
        ("layers_pattern", ["layers", "(a)|b"], "alternatives outside of parentheses"),
        ("layers_pattern", "(layers", "not closed"),
        ("layers_pattern", "layers\\", "ends with a backslash"),
        ("layers_pattern", ["a*.*b"] * 10, "too many"),
        ("target_modules", "(q_proj", "not a regular expression"),
        ("target_modules", "x" * 1001, "longer than 1000 characters"),
        ("exclude_modules", "*q_proj", "not a regular expression"),
    ],
)
def test_a_value_that_cannot_be_served_is_refused_by_name(
    field: str, value: object, words: str
) -> None:
    with pytest.raises(InvalidAdapter) as caught:
        read(**{field: value})
    assert words in caught.value.message
    assert caught.value.param == f"config.{field}"


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules"])
@pytest.mark.parametrize(
    "pattern",
    [
        "(.*)+_proj",
        r"(?=.*)q_proj",
        ".*" * 10,
        # as some training tools write it
        r"(?:.*?(?:language|text).*?(?:self_attn|attention|mlp).*?(?:q_proj|k_proj|v_proj).*?)"
        r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|k_proj|v_proj)))",
    ],
)
def test_f14_a_costly_pattern_of_targets_is_not_matched_and_the_tensors_decide(
    field: str, pattern: str
) -> None:
    config = read(**{field: pattern})
    assert config.target_modules is None
    assert "not checked" in config.warnings[0]


@pytest.mark.parametrize("init", [True, False, None, "gaussian", "eva", "orthogonal", "mica"])
def test_an_initialisation_that_leaves_the_base_alone_is_accepted(init: object) -> None:
    assert read(init_lora_weights=init).warnings == []


def test_lora_ga_is_accepted_with_a_warning() -> None:
    assert "LoRA-GA" in read(init_lora_weights="lora_ga").warnings[0]


@pytest.mark.parametrize("text", [b"", b"[1]", b"{", b"null", b"\xff", b'{"a":1,"a":2}'])
def test_what_is_not_a_json_object_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidAdapter, match="adapter_config"):
        read_config(text)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_a_number_that_json_has_not_is_refused(value: str) -> None:
    text = json.dumps(config()).replace('"lora_dropout": 0.05', f'"lora_dropout": {value}')
    with pytest.raises(InvalidAdapter, match="not JSON"):
        read_config(text.encode())


def test_a_deeply_nested_config_is_refused() -> None:
    deep = b'{"peft_type":"LORA","eva_config":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(InvalidAdapter):
        read_config(deep)


@pytest.mark.parametrize("depth", [300, 500, 700, 900, 1100])
def test_a_config_near_the_recursion_limit_is_read_or_refused(depth: int) -> None:
    deep = b'{"peft_type":"LORA","eva_config":' + b"[" * depth + b"]" * depth + b"}"
    with suppress(InvalidAdapter):
        read_config(deep)


def test_a_base_models_config_is_recognised() -> None:
    with pytest.raises(InvalidAdapter, match=r"base model's config\.json"):
        read_config(b'{"model_type":"llama","hidden_size":576}')


def test_a_byte_order_mark_is_overlooked() -> None:
    assert read_config(b"\xef\xbb\xbf" + json.dumps(config()).encode()).rank == 4


@pytest.mark.parametrize("rank", [4, 64])
def test_f1_rslora_divides_by_the_root_of_the_rank(rank: int) -> None:
    plain, stable = read(r=rank, lora_alpha=16), read(r=rank, lora_alpha=16, use_rslora=True)
    module = "model.layers.0.self_attn.q_proj"
    assert plain.scale_of(module) == 16 / rank
    assert stable.scale_of(module) == 16 / math.sqrt(rank)


def test_f16_the_first_matching_pattern_wins_whatever_its_length() -> None:
    parsed = read(
        r=8,
        lora_alpha=16,
        rank_pattern={"layers.0.self_attn.q_proj": 2, "q_proj": 4, r".*\.v_proj": 16},
        alpha_pattern={"q_proj": 32, "layers.0.self_attn.q_proj": 64},
    )
    assert parsed.rank_of("model.layers.0.self_attn.q_proj") == 2
    assert parsed.rank_of("model.layers.10.self_attn.q_proj") == 4
    assert parsed.rank_of("model.layers.1.self_attn.v_proj") == 16
    assert parsed.rank_of("model.layers.1.self_attn.k_proj") == 8
    assert parsed.scale_of("model.layers.0.self_attn.q_proj") == 32 / 2
    assert parsed.scale_of("model.layers.1.self_attn.k_proj") == 16 / 8


def test_a_config_that_leaves_rank_and_alpha_out_has_pefts_defaults() -> None:
    parsed = read_config(b'{"peft_type":"LORA"}')
    assert (parsed.rank, parsed.alpha, parsed.rslora) == (8, 8, False)


def test_the_canonical_form_forgets_how_the_file_was_written() -> None:
    one = read_config(json.dumps(config(target_modules=["q_proj", "v_proj"]), indent=2).encode())
    two = dict(reversed(config(target_modules=["v_proj", "q_proj"]).items()))
    assert one.canonical == read_config(json.dumps(two).encode()).canonical


def test_the_canonical_form_keeps_the_order_of_patterns() -> None:
    one = read(alpha_pattern={"q_proj": 1, "self_attn.q_proj": 2})
    two = read(alpha_pattern={"self_attn.q_proj": 2, "q_proj": 1})
    assert one.canonical != two.canonical


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"alpha_pattern": {"[\ud800-a]": 1}}, "config.alpha_pattern"),
        ({"target_modules": ["q_proj", "\udfff"]}, "config.target_modules"),
        ({"base_model_name_or_path": "\ud800"}, "config.base_model_name_or_path"),
        ({"\ud800": None}, "config"),
    ],
)
def test_half_of_a_surrogate_pair_is_refused_with_the_field(
    changes: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidAdapter, match="surrogate") as caught:
        read(**changes)
    assert caught.value.param == param
    caught.value.message.encode()


def test_a_whole_surrogate_pair_is_a_character() -> None:
    assert read(base_model_name_or_path="\U0001f600").base_model_name == "\U0001f600"
