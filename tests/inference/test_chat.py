import time
from typing import Any

import msgspec
import pytest

from gateway.engine.messages import Sampling
from tests.fakes import IM_END, Script, byte_ids, says
from tests.inference.conftest import BASE, Api, frames_of
from tests.live import Live, error_of


def prompt_of(*messages: tuple[str, str]) -> list[int]:
    """The byte tokenizer's chat template, by hand."""
    ids: list[int] = []
    for role, content in messages:
        ids += [256, *byte_ids(f"{role}\n{content}"), 257, *byte_ids("\n")]
    return [*ids, 256, *byte_ids("assistant\n")]


def test_an_answer_has_openais_shape(api: Api) -> None:
    response = api.chat()
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.pop("id") == api.submitted().request_id
    assert abs(body.pop("created") - time.time()) < 10
    prompt = prompt_of(("user", "hi"))
    assert body == {
        "object": "chat.completion",
        "model": BASE,
        "system_fingerprint": "fp_ba5eba5eba5e",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Hello from the base.",
                    "refusal": None,
                },
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": 20,
            "total_tokens": len(prompt) + 20,
        },
    }
    assert api.submitted().prompt == prompt


def test_a_request_becomes_what_the_engine_needs(api: Api, running: Live) -> None:
    api.chat(
        temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, seed=7, max_tokens=5, user="me",
        metadata={"a": "b"},
    )  # fmt: skip
    submit = api.submitted()
    assert submit.sampling == Sampling(temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, seed=7)
    assert submit.max_tokens == 5
    assert submit.adapter is None
    assert submit.stop_token_ids == [IM_END]
    assert len(submit.fairness_key) == 36
    with running.client("other") as other:
        api.chat(other)
    assert api.engine.submits[1].fairness_key != submit.fairness_key
    namespaces = [request.cache_namespace for request in api.engine.submits[:2]]
    assert None not in namespaces
    assert len(set(namespaces)) == 2


@pytest.mark.parametrize(
    ("value", "ends"),
    [({}, [IM_END]), ({"ignore_eos": False}, [IM_END]), ({"ignore_eos": True}, [])],
)
def test_with_ignore_eos_no_token_ends_the_answer(
    api: Api, value: dict[str, Any], ends: list[int]
) -> None:
    assert api.chat(**value).status_code == 200
    assert api.complete(**value).status_code == 200
    assert [submit.stop_token_ids for submit in api.engine.submits] == [ends, ends]


def test_with_ignore_eos_a_stop_string_still_ends_the_answer(api: Api) -> None:
    api.engine.script = lambda _: says("one two three", per_step=1)
    body = api.chat(ignore_eos=True, stop=" two").json()
    assert body["choices"][0]["message"]["content"] == "one"
    assert body["choices"][0]["finish_reason"] == "stop"


def test_what_is_left_open_is_openais_default(api: Api) -> None:
    api.chat()
    submit = api.submitted()
    assert (submit.sampling.temperature, submit.sampling.top_p) == (1.0, 1.0)
    assert (submit.sampling.top_k, submit.sampling.min_p) == (0, 0.0)
    assert submit.max_tokens == 2048 - len(submit.prompt)


def test_requests_without_a_seed_get_different_ones(api: Api) -> None:
    for _ in range(5):
        api.chat()
    seeds = {submit.sampling.seed for submit in api.engine.submits}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_every_seed_of_64_bits_is_a_seed_for_the_engine(api: Api, seed: int) -> None:
    assert api.chat(seed=seed).status_code == 200
    assert 0 <= api.submitted().sampling.seed < 2**63


def test_values_at_the_edges_mean_greedy(api: Api) -> None:
    api.chat(temperature=0)
    api.chat(temperature=1e-30)
    api.chat(top_p=0)
    greedy, tiny, nucleus = (submit.sampling for submit in api.engine.submits)
    assert greedy.temperature == tiny.temperature == 0.0
    assert (nucleus.top_p, nucleus.top_k) == (1.0, 1)


def test_max_completion_tokens_is_max_tokens_by_its_new_name(api: Api) -> None:
    assert api.chat(max_completion_tokens=3).json()["choices"][0]["finish_reason"] == "length"
    assert api.chat(max_tokens=9, max_completion_tokens=3).json()["usage"]["completion_tokens"] == 3


def test_roles_become_the_templates(api: Api) -> None:
    messages = [
        {"role": "developer", "content": "be"},
        {"role": "system", "content": "brief", "name": "x"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo", "refusal": None, "tool_calls": None,
         "annotations": [], "audio": None, "function_call": None},
        {"role": "user", "content": "bye"},
    ]  # fmt: skip
    assert api.chat(messages=messages).status_code == 200
    assert api.submitted().prompt == prompt_of(
        ("system", "be"), ("system", "brief"), ("user", "hi"), ("assistant", "yo"), ("user", "bye")
    )


def test_text_parts_are_lines_of_one_text(api: Api) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    api.chat(messages=[{"role": "user", "content": parts}])
    assert api.submitted().prompt == prompt_of(("user", "one\ntwo"))


def test_a_special_token_in_a_message_is_only_text(api: Api) -> None:
    api.chat(messages=[{"role": "user", "content": "a<|im_end|>b"}])
    assert api.submitted().prompt.count(IM_END) == 1


@pytest.mark.parametrize(
    "harmless",
    [
        {"n": 1},
        {"logprobs": False, "top_logprobs": 0},
        {"logit_bias": {}},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
        {"response_format": {"type": "text"}},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"tools": None, "tool_choice": None, "n": None, "stream": None, "stop": None},
        {"functions": [], "function_call": "none"},
        {"modalities": ["text"], "audio": None},
        {"store": True, "metadata": {"a": "b"}, "user": "me", "safety_identifier": "x"},
        {"service_tier": "auto"},
        {"stream_options": {"include_usage": True}},
        {"reasoning_effort": "none", "verbosity": "medium"},
        {"prompt_cache_key": "x", "prompt_cache_retention": "24h"},
        {"stop": []},
        {"top_k": -1},
    ],
)
def test_harmless_parameters_change_nothing(api: Api, harmless: dict[str, Any]) -> None:
    response = api.chat(**harmless)
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"] == "Hello from the base."


@pytest.mark.parametrize("per_step", [1, 2, 3, 7, 100])
def test_characters_come_whole_and_byte_exact(api: Api, per_step: int) -> None:
    text = 'naïve 日本語 👩‍👩‍👧 e\u0301 \u200f\0\n"quoted\\" end'
    api.engine.script = lambda _: says(text, per_step=per_step)
    assert api.chat().json()["choices"][0]["message"]["content"] == text
    frames = frames_of(api.chat(stream=True).text)
    pieces = [frame["choices"][0]["delta"].get("content", "") for frame in frames]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_bytes_that_are_no_text_become_replacement_characters(api: Api) -> None:
    api.engine.script = lambda _: Script([[0xE6, 0x97], [0x41], [0xF0, 0x9F]])
    assert api.chat().json()["choices"][0]["message"]["content"] == "\ufffdA\ufffd"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("per_step", [1, 2, 3, 100])
def test_a_stop_string_ends_the_answer_and_the_work(api: Api, per_step: int, stream: bool) -> None:
    api.engine.script = lambda _: says("one two STOP three", per_step=per_step, hang=True)
    response = api.chat(stop=["never", "STOP"], stream=stream)
    if stream:
        frames = frames_of(response.text)
        text = "".join(frame["choices"][0]["delta"].get("content", "") for frame in frames)
        reason = frames[-1]["choices"][0]["finish_reason"]
    else:
        (choice,) = response.json()["choices"]
        text, reason = choice["message"]["content"], choice["finish_reason"]
        # tokens that were made are counted, also those that the client does not see
        assert response.json()["usage"]["completion_tokens"] >= len("one two STOP")
    assert (text, reason) == ("one two ", "stop")
    assert api.engine.cancels == [api.submitted().request_id]


def test_the_beginning_of_a_stop_string_is_text_if_no_more_comes(api: Api) -> None:
    api.engine.script = lambda _: says("one ST")
    assert api.chat(stop="STOP").json()["choices"][0]["message"]["content"] == "one ST"


def test_an_answer_of_no_tokens_is_an_answer(api: Api) -> None:
    api.engine.script = lambda _: Script()
    assert api.chat().json()["choices"][0]["message"]["content"] == ""
    first, last = frames_of(api.chat(stream=True).text)
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert last["choices"][0]["finish_reason"] == "stop"


def test_w2_an_adapter_answers_under_its_name_and_its_id(api: Api) -> None:
    adapter = api.upload("pirate")
    for model in ("pirate", adapter["id"]):
        body = api.chat(model=model).json()
        assert body["model"] == model
        text = body["choices"][0]["message"]["content"]
        assert text == f"Hello from {adapter['digest'][:8]}."
        assert api.engine.submits[-1].adapter is not None
        assert api.engine.submits[-1].adapter.digest == adapter["digest"]
    api.client.delete("/v1/adapters/pirate")
    assert error_of(api.chat(model="pirate"), 404)["code"] == "model_not_found"


def test_l6_another_tenants_adapter_is_an_unknown_model(api: Api, running: Live) -> None:
    adapter = api.upload("pirate")
    with running.client("stranger") as stranger:
        for model in ("pirate", adapter["id"], "never-was", "a/b", "a\0b", "", "x" * 100_000):
            for stream in (False, True):
                error = error_of(api.chat(stranger, model=model, stream=stream), 404)
                assert (error["code"], error["param"]) == ("model_not_found", "model")
                assert error["message"] == (
                    f"The model {model[:200]!r} does not exist or you do not have access to it. "
                    "GET /v1/models lists what this key can use."
                )
    api.client.delete("/v1/adapters/pirate")


def test_an_adapter_of_an_earlier_base_model_is_refused_with_both_names(
    api: Api, running: Live
) -> None:
    api.upload("pirate")
    before = running.engine.model
    running.engine.model = msgspec.structs.replace(before, digest="0" * 64, name="other-base")
    try:
        error = error_of(api.chat(model="pirate"), 422)
        assert (
            "uploaded for the base model smollm2-135m-instruct, but other-base" in error["message"]
        )
        assert [model["id"] for model in api.client.get("/v1/models").json()["data"]] == [
            "other-base"
        ]
        assert api.client.get("/v1/models/pirate").status_code == 404
    finally:
        running.engine.model = before
    api.client.delete("/v1/adapters/pirate")


@pytest.mark.parametrize("tenant", ["acme", None])
def test_s10_a_key_without_the_scope_cannot_call_models(
    api: Api, running: Live, tenant: str | None
) -> None:
    with running.client(tenant, scopes=("adapters:read",)) as limited:
        for stream in (False, True):
            assert error_of(api.chat(limited, stream=stream), 403)["code"] == "permission_denied"
        assert error_of(limited.get("/v1/models"), 403)
        assert error_of(limited.get(f"/v1/models/{BASE}"), 403)
    assert api.engine.submits == []
