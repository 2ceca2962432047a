"""Broken uploads by the dozen: each gets a 4xx that names the problem, and leaves nothing behind.

`test_broken_…` are made by hand, one for each rule; the rest are made by a seeded generator.
"""

import gzip
import io
import json
import pickle
import random
import struct
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.adapters.conftest import Site
from tests.adapters.making import config, framed, header_of, key, packed, tensors, weights
from tests.live import error_of

A0 = key(0, "q_proj", "A")
GOOD = weights()


def header(change: Callable[[dict[str, Any]], object]) -> bytes:
    """The good file with its header changed."""
    described, data = header_of(GOOD)
    change(described)
    return framed(json.dumps(described).encode(), data)


def raw_header(change: Callable[[bytes], bytes]) -> bytes:
    (length,) = struct.unpack("<Q", GOOD[:8])
    return framed(change(GOOD[8 : 8 + length]), GOOD[8 + length :])


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("adapter_model.safetensors", GOOD)
    return file.getvalue()


def with_value(value: float, dtype: str = "float32") -> bytes:
    made = tensors(dtype=dtype)
    made[A0][1, 2] = value
    return weights(made)


def entry(**changes: Any) -> bytes:
    return header(lambda described: described[A0].update(changes))


FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "seven_bytes": (b"1234567", "7 bytes, too few"),
    "eight_zeros": (b"\0" * 8, "not a safetensors file"),
    "zip": (zipped(), "zip archive"),
    "pickle": (pickle.dumps({"a": 1}, protocol=4), "pickle"),
    "old_pickle": (pickle.dumps({"a": 1}, protocol=2), "pickle"),
    "gguf": (b"GGUF" + b"\x03\0\0\0" + b"\0" * 100, "GGUF"),
    "gzip": (gzip.compress(GOOD), "gzip"),
    "zstd": (b"\x28\xb5\x2f\xfd" + b"\0" * 64, "zstd"),
    "numpy": (b"\x93NUMPY\x01\0" + b"\0" * 64, "NumPy"),
    "hdf5": (b"\x89HDF\r\n\x1a\n" + b"\0" * 64, "HDF5"),
    "lfs_pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS"),
    "html": (b"<!DOCTYPE html><html></html>", "HTML"),
    "json": (json.dumps({"a": 1}).encode(), "JSON text"),
    "noise": (random.Random(0).randbytes(5000), "not a safetensors file"),
    "cut_in_the_header": (GOOD[:100], "cut short: its header"),
    "cut_in_the_data": (GOOD[:-1], "cut short: its header describes"),
    "cut_after_the_header": (GOOD[: len(GOOD) // 2], "cut short"),
    "longer": (GOOD + b"\0", "bytes that belong to no tensor"),
    "header_length_of_all_ones": (b"\xff" * 8 + GOOD[8:], "at most"),
    "header_length_2_63": (struct.pack("<Q", 2**63) + GOOD[8:], "at most"),
    "header_over_the_limit": (framed(b"{" + b" " * 2**22 + b"}"), "at most"),
    "header_length_too_small": (struct.pack("<Q", 20) + GOOD[8:], "not JSON"),
    "header_not_json": (framed(b"{nonsense}"), "not JSON"),
    "header_not_utf8": (framed(b'{"\xff": 1}'), "not JSON"),
    "header_of_nothing": (framed(b"{}"), "holds no tensors"),
    "header_nested": (framed(b'{"a":' + b"[" * 100_000), "not JSON"),
    "header_with_an_array": (framed(b"[]  "), "not a safetensors file"),
    "key_twice": (raw_header(lambda h: h.rstrip()[:-1] + b"," + h[1:]), "names something twice"),
    "field_twice": (
        raw_header(lambda h: h.replace(b'"dtype":"F32"', b'"dtype":"F32","dtype":"F16"', 1)),
        "names something twice",
    ),
    "metadata_not_texts": (
        header(lambda d: d.update(__metadata__={"a": 1})),
        "__metadata__",
    ),
    "metadata_a_list": (header(lambda d: d.update(__metadata__=[])), "__metadata__"),
    "entry_a_list": (header(lambda d: d.update({A0: []})), "must have dtype"),
    "entry_null": (header(lambda d: d.update({A0: None})), "must have dtype"),
    "entry_without_dtype": (header(lambda d: d[A0].pop("dtype")), "must have dtype"),
    "entry_with_more": (entry(extra=1), "must have dtype"),
    "dtype_unknown": (entry(dtype="F13"), "unknown dtype 'F13'"),
    "dtype_a_number": (entry(dtype=4), "unknown dtype"),
    "dtype_a_list": (entry(dtype=["F32"]), "unknown dtype"),
    "dtype_too_wide": (entry(dtype="F64"), "bytes, its offsets hold"),
    "shape_negative": (entry(shape=[-4, 576]), "not sizes"),
    "shape_of_texts": (entry(shape=["4", "576"]), "not sizes"),
    "shape_of_booleans": (entry(shape=[True, 2304]), "not sizes"),
    "shape_of_decimals": (entry(shape=[4.0, 576]), "not sizes"),
    "shape_a_number": (entry(shape=2304), "not sizes"),
    "shape_overflows": (entry(shape=[2**32, 2**32]), "bytes, its offsets hold"),
    "shape_huge": (entry(shape=[2**200]), "not sizes"),
    "shape_of_many": (entry(shape=[1] * 50), "not sizes"),
    "shape_swapped": (entry(shape=[576, 4]), "another base model"),
    "offsets_swapped": (entry(data_offsets=[9216, 0]), "its offsets hold"),
    "offsets_negative": (entry(data_offsets=[-9216, 0]), "not sizes"),
    "offsets_of_three": (entry(data_offsets=[0, 9216, 1]), "not sizes"),
    "offsets_of_texts": (entry(data_offsets=["0", "9216"]), "not sizes"),
    "offsets_overlap": (
        framed(
            json.dumps(
                {
                    A0: {"dtype": "F32", "shape": [4, 576], "data_offsets": [0, 9216]},
                    "b": {"dtype": "F32", "shape": [4], "data_offsets": [9212, 9228]},
                }
            ).encode(),
            b"\0" * 9228,
        ),
        "overlaps",
    ),
    "offsets_leave_a_gap": (
        framed(
            json.dumps(
                {A0: {"dtype": "F32", "shape": [4, 576], "data_offsets": [8, 9224]}}
            ).encode(),
            b"\0" * 9224,
        ),
        "leaves a gap",
    ),
    "offsets_outside": (
        framed(
            json.dumps(
                {A0: {"dtype": "F32", "shape": [4, 576], "data_offsets": [0, 9216]}}
            ).encode()
        ),
        "cut short",
    ),
    "tensors_of_zero_bytes_at_one_place": (
        packed({f"t{i}": ("F32", [0], b"") for i in range(10)}),
        "cannot be served",
    ),
    "too_many_tensors": (
        packed({f"t{i}": ("U8", [0], b"") for i in range(20_001)}),
        "20001 tensors",
    ),
    "a_name_without_end": (packed({"n" * 600: ("U8", [0], b"")}), "600 characters"),
    "a_name_of_half_a_character": (
        framed(b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
        "cannot be served",
    ),
    "nan": (with_value(float("nan")), f"NaN in {A0}"),
    "inf": (with_value(float("inf")), f"infinite values in {A0}"),
    "minus_inf_in_f16": (with_value(float("-inf"), "float16"), f"infinite values in {A0}"),
    "nan_in_bf16": (
        packed(
            {
                name: ("BF16", t.shape, (np.full(t.shape, 0x7FC1, "uint16")).tobytes())
                for name, t in tensors().items()
            }
        ),
        "NaN in",
    ),
    "f64": (weights(tensors(dtype="float64")), "in F64"),
    "rank_0": (weights(tensors(rank=0)), "not matrices"),
}

CONFIGS: dict[str, tuple[Any, str]] = {
    "empty": (b"", "not JSON"),
    "not_json": (b"r: 8", "not JSON"),
    "a_pickle": (pickle.dumps({"r": 8}), "not JSON"),
    "a_list": (b"[]", "not a JSON object"),
    "nested": (b'{"peft_type":' + b"[" * 50_000, "adapter_config.json"),
    "key_twice": (b'{"peft_type":"LORA","r":4,"r":8}', "twice"),
    "base_config": (b'{"model_type":"llama"}', "base model's config.json"),
    "vera": (config(peft_type="VERA"), "VERA"),
    "classifier": (config(task_type="SEQ_CLS"), "SEQ_CLS"),
    "dora": (config(use_dora=True), "use_dora"),
    "modules_to_save": (config(modules_to_save=["lm_head"]), "modules_to_save"),
    "redos": (config(alpha_pattern={"(a*)*b": 1}), "repeats a group"),
    "redos_in_ranks": (config(rank_pattern={"(.*)+x": 1}), "repeats a group"),
    "other_rank": (config(r=8), "belong to different adapters"),
    "other_targets": (config(target_modules=["k_proj"]), "belong to different adapters"),
    "more_layers": (config(layers_to_transform=[0, 1, 2]), "lacks weights"),
    "alpha_too_large": (config(lora_alpha=10**400), "lora_alpha"),
    "layers_pattern": (config(layers_pattern="model|x"), "layers_pattern"),
    "surrogate": (b'{"peft_type":"LORA","alpha_pattern":{"[\\ud800-a]":1}}', "alpha_pattern"),
    "unknown_field": (config(use_new_thing={"a": 1}), "use_new_thing"),
}


@pytest.mark.parametrize("fault", FILES)
def test_broken_weights_are_refused(site: Site, fault: str) -> None:
    file, words = FILES[fault]
    error = error_of(site.upload(file=file), 422)
    assert words in error["message"]
    assert (error["param"], error["code"]) == ("weights", "invalid_adapter")
    assert site.stored() == []
    assert site.names() == []
    assert site.engine.submits == []


@pytest.mark.parametrize("fault", CONFIGS)
def test_broken_configs_are_refused(site: Site, fault: str) -> None:
    config_json, words = CONFIGS[fault]
    error = error_of(site.upload(config_json=config_json), 422)
    assert words in error["message"]
    assert site.stored() == []
    assert site.names() == []


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_byte_never_passes_as_another_adapter_or_breaks_the_server(
    site: Site, seed: int
) -> None:
    """In the header a changed byte must be noticed; or it was a blank, or in the metadata."""
    chance = random.Random(seed)
    described, _ = header_of(GOOD)
    (length,) = struct.unpack("<Q", GOOD[:8])
    damaged = bytearray(GOOD)
    for _ in range(chance.choice((1, 2, 8))):
        damaged[chance.randrange(8 + length)] = chance.randrange(256)
    response = site.upload(file=bytes(damaged))
    assert response.status_code in (201, 422), response.text
    if response.status_code == 201:
        after, _ = header_of(bytes(damaged))
        assert {name: after[name] for name in after if name != "__metadata__"} == {
            name: described[name] for name in described if name != "__metadata__"
        }
        site.client.delete("/v1/adapters/pirate")
    assert site.stored() == []
