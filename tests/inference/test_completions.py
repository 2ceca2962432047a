from typing import Any

import pytest

from tests.fakes import END_OF_TEXT, byte_ids, says
from tests.inference.conftest import BASE, Api, frames_of


def test_a_completion_has_openais_shape(api: Api) -> None:
    body = api.complete(max_tokens=100).json()
    assert body.pop("id") == api.submitted().request_id
    assert body.pop("created")
    assert body == {
        "object": "text_completion",
        "model": BASE,
        "system_fingerprint": "fp_ba5eba5eba5e",
        "choices": [
            {"index": 0, "text": "Hello from the base.", "logprobs": None, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": 2, "completion_tokens": 20, "total_tokens": 22},
    }


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("hi", byte_ids("hi")),
        (["hi"], byte_ids("hi")),
        ([104, 105], [104, 105]),
        ([[104, 105]], [104, 105]),
        ([49151], [49151]),
        ("<|endoftext|>hi", [END_OF_TEXT, *byte_ids("hi")]),
    ],
)
def test_a_prompt_is_a_text_or_its_tokens(api: Api, prompt: Any, tokens: list[int]) -> None:
    assert api.complete(prompt=prompt).status_code == 200
    assert api.submitted().prompt == tokens


def test_sixteen_tokens_are_the_default_as_far_as_the_context_goes(api: Api) -> None:
    api.complete()
    api.complete(prompt=[1] * 2040)
    assert [submit.max_tokens for submit in api.engine.submits] == [16, 8]


@pytest.mark.parametrize(
    "harmless",
    [
        {"best_of": 1, "echo": False, "n": 1, "suffix": None, "logprobs": None},
        {"suffix": "", "logit_bias": {}, "presence_penalty": 0.0},
    ],
)
def test_harmless_parameters_change_nothing(api: Api, harmless: dict[str, Any]) -> None:
    assert api.complete(**harmless).status_code == 200


def test_a_stream_is_the_same_text_in_pieces(api: Api) -> None:
    api.engine.script = lambda _: says("one two three", per_step=5)
    frames = frames_of(api.complete(stream=True).text)
    assert [frame["choices"][0]["text"] for frame in frames] == ["one t", "wo th", "ree", ""]
    assert [frame["choices"][0]["finish_reason"] for frame in frames] == [None, None, None, "stop"]
    assert {frame["object"] for frame in frames} == {"text_completion"}
    assert not any("usage" in frame for frame in frames)


def test_usage_comes_last_if_asked_for(api: Api) -> None:
    options = {"include_usage": True}
    *frames, last = frames_of(api.complete(stream=True, stream_options=options).text)
    assert all(frame["usage"] is None for frame in frames)
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 2, "completion_tokens": 16, "total_tokens": 18}
