"""Sharded weights become the file that safetensors would have written, or are refused."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.adapters.shards import is_sharded, join
from gateway.errors import InvalidAdapter
from tests.adapters.conftest import Site
from tests.adapters.making import tensors, weights
from tests.adapters.packing import CONFIG, INDEX, WEIGHTS, files, packed_as, sharded
from tests.live import error_of


def put(folder: Path, made: dict[str, bytes]) -> Path:
    for name, content in made.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_shards_become_the_bytes_that_safetensors_writes(tmp_path: Path, count: int) -> None:
    made = tensors(targets=("q_proj", "v_proj", "down_proj"))
    made |= tensors(targets=("k_proj",), dtype="float16")
    made |= tensors(targets=("o_proj",), dtype="float64")
    made |= {"é": np.arange(3, dtype="uint8"), 'a "b"\\': np.arange(2, dtype="int64")}
    put(tmp_path, sharded(count, made))
    assert is_sharded(tmp_path)
    digest = join(tmp_path)
    whole = weights(made)
    assert (tmp_path / WEIGHTS).read_bytes() == whole
    assert digest == hashlib.sha256(whole).hexdigest()
    assert [path.name for path in tmp_path.iterdir()] == [WEIGHTS]


def test_the_digest_does_not_depend_on_how_the_weights_were_cut(site: Site) -> None:
    whole = site.upload().json()["digest"]
    for count in (1, 2, 4):
        parts = {CONFIG: files()[CONFIG], **sharded(count)}
        archive = packed_as("tar", parts)
        answer = site.upload(config=None, weights=None, archive=("a", archive))
        assert answer.status_code == 200, answer.text
        assert answer.json()["digest"] == whole
        as_parts: dict[str, Any] = {
            name: (name, content) for name, content in sharded(count).items()
        }
        answer = site.upload(weights=None, **as_parts)
        assert answer.status_code == 200, answer.text
        assert answer.json()["digest"] == whole
    assert len(site.stored()) == 3


FIRST = "adapter_model-00001-of-00002.safetensors"
SECOND = "adapter_model-00002-of-00002.safetensors"


def index(change: Callable[[dict[str, str]], object]) -> Callable[[dict[str, bytes]], object]:
    def changed(made: dict[str, bytes]) -> None:
        where = json.loads(made[INDEX])
        change(where["weight_map"])
        made[INDEX] = json.dumps(where).encode()

    return changed


def replaced(name: str, content: bytes) -> Callable[[dict[str, bytes]], object]:
    return lambda made: made.update({name: content})


def swap(where: dict[str, str]) -> None:
    where.update({name: SECOND if file == FIRST else FIRST for name, file in where.items()})


FAULTS: dict[str, tuple[Callable[[dict[str, bytes]], object], str]] = {
    "no_index": (lambda made: made.pop(INDEX), "index.json is missing"),
    "a_shard_missing": (lambda made: made.pop(SECOND), f"{SECOND}', which is not there"),
    "a_shard_too_many": (
        replaced("adapter_model-00003-of-00003.safetensors", weights()),
        "is not in adapter_model.safetensors.index.json",
    ),
    "the_same_tensors_twice": (lambda made: made.update({SECOND: made[FIRST]}), "several shards"),
    "in_another_shard": (index(swap), "says otherwise"),
    "a_tensor_not_in_the_index": (index(lambda where: where.popitem()), "says otherwise"),
    "a_tensor_in_no_shard": (index(lambda where: where.update(x=FIRST)), "'x', which is in no"),
    "a_path_in_the_index": (index(lambda where: where.update(x="../../x")), "'../../x', which"),
    "not_json": (replaced(INDEX, b"{"), "is not JSON"),
    "not_utf8": (replaced(INDEX, b"\xff"), "is not JSON"),
    "nested": (replaced(INDEX, b'{"weight_map":' + b"[" * 50_000), "is not JSON"),
    "a_list": (replaced(INDEX, b"[]"), "must have a weight_map"),
    "no_map": (replaced(INDEX, b"{}"), "must have a weight_map"),
    "numbers": (replaced(INDEX, b'{"weight_map":{"a":1}}'), "must have a weight_map"),
    "twice": (replaced(INDEX, b'{"weight_map":{"a":"x","a":"y"}}'), "twice"),
    "a_shard_cut_short": (lambda made: made.update({FIRST: made[FIRST][:-1]}), f"{FIRST} was cut"),
    "a_shard_that_is_none": (replaced(FIRST, b"\x80\x04"), FIRST),
    "beside_the_whole": (replaced(WEIGHTS, weights()), "one or the other"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_shards_that_do_not_agree_are_refused(site: Site, tmp_path: Path, fault: str) -> None:
    change, words = FAULTS[fault]
    made = sharded(2)
    change(made)
    with pytest.raises(InvalidAdapter) as error:
        join(put(tmp_path, made))
    assert words in error.value.message
    archive = packed_as("zip", {CONFIG: files()[CONFIG], **made})
    error_of(site.upload(config=None, weights=None, archive=("a", archive)), 422)
    assert site.stored() == []
