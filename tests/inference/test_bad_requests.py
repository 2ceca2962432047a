"""Everything wrong that a client can send gets its 4xx, a message that says what, and `param`."""

import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from gateway.engine.client import EngineFailure
from gateway.engine.messages import FailureCode
from gateway.engine.tokenizer import Tokenizer
from gateway.inference.tokenizers import LONG_ENCODES_MAX
from tests.fakes import Script
from tests.inference.conftest import BASE, BODY_BYTES_MAX, Api, frames_of
from tests.live import error_of

HI = [{"role": "user", "content": "hi"}]

# what is wrong → (changes of a good request, param, words of the message)
BOTH: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown": ({"foo": 1}, "foo", "Unrecognized request argument supplied: foo"),
    "misspelt": ({"max_token": 1}, "max_token", "Unrecognized request argument"),
    "engine_path": ({"lora_path": "/etc"}, "lora_path", "Unrecognized request argument"),
    "model_number": ({"model": 1}, "model", "expected a string, but got an integer instead"),
    "model_null": ({"model": None}, "model", "expected a string, but got null instead"),
    "stream_text": ({"stream": "yes"}, "stream", "expected a boolean, but got a string"),
    "stream_number": ({"stream": 1}, "stream", "expected a boolean, but got an integer"),
    "stream_options": ({"stream_options": 1}, "stream_options", "expected an object"),
    "stream_options_unknown": (
        {"stream": True, "stream_options": {"usage": True}},
        "stream_options.usage",
        "Unknown parameter: 'stream_options.usage'",
    ),
    "stream_options_text": (
        {"stream_options": {"include_usage": "yes"}},
        "stream_options.include_usage",
        "expected a boolean",
    ),
    "max_tokens_negative": ({"max_tokens": -1}, "max_tokens", "Expected a value >= 1, but got -1"),
    "max_tokens_zero": ({"max_tokens": 0}, "max_tokens", "Expected a value >= 1, but got 0"),
    "max_tokens_text": ({"max_tokens": "5"}, "max_tokens", "expected an integer"),
    "max_tokens_decimal": ({"max_tokens": 1.5}, "max_tokens", "expected an integer"),
    "max_tokens_boolean": ({"max_tokens": True}, "max_tokens", "expected an integer"),
    "max_tokens_huge": ({"max_tokens": 10**40}, "max_tokens", "above maximum value"),
    "temperature_negative": ({"temperature": -0.1}, "temperature", "Expected a value >= 0"),
    "temperature_high": ({"temperature": 2.1}, "temperature", "Expected a value <= 2, but got 2.1"),
    "temperature_text": ({"temperature": "1"}, "temperature", "expected a decimal"),
    "temperature_list": ({"temperature": [1]}, "temperature", "expected a decimal"),
    "top_p_negative": ({"top_p": -1}, "top_p", "Expected a value >= 0"),
    "top_p_high": ({"top_p": 1.01}, "top_p", "Expected a value <= 1"),
    "top_k_low": ({"top_k": -2}, "top_k", "Expected a value >= -1"),
    "top_k_decimal": ({"top_k": 1.5}, "top_k", "expected an integer"),
    "min_p_high": ({"min_p": 2}, "min_p", "Expected a value <= 1"),
    "seed_high": ({"seed": 2**63}, "seed", "above maximum value"),
    "seed_low": ({"seed": -(2**63) - 1}, "seed", "below minimum value"),
    "seed_text": ({"seed": "x"}, "seed", "expected an integer"),
    "seed_decimal": ({"seed": 0.5}, "seed", "expected an integer"),
    "stop_number": ({"stop": 1}, "stop", "expected a string or an array"),
    "stop_of_numbers": ({"stop": [1]}, "stop[0]", "expected a string, but got an integer"),
    "stop_empty": ({"stop": ""}, "stop", "1 to 1000 characters, one has 0"),
    "stop_with_an_empty": ({"stop": ["a", ""]}, "stop", "one has 0"),
    "stop_of_five": ({"stop": ["a"] * 5}, "stop", "maximum length 4"),
    "stop_long": ({"stop": "x" * 1001}, "stop", "one has 1001"),
    "ignore_eos_text": (
        {"ignore_eos": "yes"},
        "ignore_eos",
        "expected a boolean, but got a string",
    ),
    "ignore_eos_number": ({"ignore_eos": 1}, "ignore_eos", "expected a boolean"),
    "user_number": ({"user": 1}, "user", "expected a string"),
    "metadata_text": ({"metadata": "x"}, "metadata", "expected an object"),
    "n": ({"n": 2}, "n", "not served here yet"),
    "n_zero": ({"n": 0}, "n", "not served here yet"),
    "n_text": ({"n": "1"}, "n", "not served here yet"),
    "n_boolean": ({"n": True}, "n", "not served here yet"),
    "logprobs": ({"logprobs": True}, "logprobs", "not served here yet"),
    "logit_bias": ({"logit_bias": {"1": 5}}, "logit_bias", "not served here yet"),
    "presence_penalty": ({"presence_penalty": 0.1}, "presence_penalty", "not served"),
    "frequency_penalty": ({"frequency_penalty": 1}, "frequency_penalty", "not served"),
    "repetition_penalty": ({"repetition_penalty": 1.1}, "repetition_penalty", "not served"),
    "service_tier": ({"service_tier": "flex"}, "service_tier", "not served"),
    "store_text": ({"store": "x"}, "store", "expected a boolean"),
}

CHAT: dict[str, tuple[dict[str, Any], str, str]] = {
    "messages_null": ({"messages": None}, "messages", "expected an array"),
    "messages_text": ({"messages": "hi"}, "messages", "expected an array"),
    "messages_object": ({"messages": {}}, "messages", "expected an array"),
    "messages_empty": ({"messages": []}, "messages", "empty array"),
    "messages_of_texts": ({"messages": ["hi"]}, "messages[0]", "expected an object"),
    "messages_many": ({"messages": HI * 10_001}, "messages", "maximum length 10000"),
    "role_missing": (
        {"messages": [{"content": "hi"}]},
        "messages[0].role",
        "Missing required parameter: 'messages[0].role'",
    ),
    "role_unknown": (
        {"messages": [*HI, {"role": "robot", "content": "hi"}]},
        "messages[1].role",
        "Supported values here are: 'system', 'developer', 'user', 'assistant'",
    ),
    "role_tool": (
        {"messages": [{"role": "tool", "content": "hi", "tool_call_id": "x"}]},
        "messages[0].role",
        "Invalid value: 'tool'",
    ),
    "role_number": ({"messages": [{"role": 1, "content": "hi"}]}, "messages[0].role", "a string"),
    "content_missing": ({"messages": [{"role": "user"}]}, "messages[0].content", "content parts"),
    "content_null": (
        {"messages": [{"role": "assistant", "content": None}]},
        "messages[0].content",
        "content parts",
    ),
    "content_number": (
        {"messages": [{"role": "user", "content": 1}]},
        "messages[0].content",
        "expected a string or an array",
    ),
    "content_no_parts": (
        {"messages": [{"role": "user", "content": []}]},
        "messages[0].content",
        "content parts",
    ),
    "part_image": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "what is this?"},
                        {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}},
                    ],
                }
            ]
        },
        "messages[0].content[1].type",
        "'image_url' are not served: this model reads text",
    ),
    "part_without_type": (
        {"messages": [{"role": "user", "content": [{"text": "hi"}]}]},
        "messages[0].content[0].type",
        "Missing required parameter",
    ),
    "part_without_text": (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
        "Missing required parameter",
    ),
    "part_unknown_field": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]},
        "messages[0].content[0].x",
        "Unknown parameter: 'messages[0].content[0].x'",
    ),
    "message_unknown_field": (
        {"messages": [{"role": "user", "content": "hi", "mood": 1}]},
        "messages[0].mood",
        "Unknown parameter",
    ),
    "tool_calls": (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
        "messages[0].tool_calls",
        "not served here yet",
    ),
    "max_completion_tokens": (
        {"max_completion_tokens": -5},
        "max_completion_tokens",
        "Expected a value >= 1, but got -5",
    ),
    "tools": ({"tools": [{"type": "function"}]}, "tools", "not served here yet"),
    "tool_choice": ({"tool_choice": "required"}, "tool_choice", "not served here yet"),
    "functions": ({"functions": [{"name": "x"}]}, "functions", "not served here yet"),
    "response_format": ({"response_format": {"type": "json_object"}}, "response_format", "not"),
    "top_logprobs": ({"top_logprobs": 2}, "top_logprobs", "not served here yet"),
    "modalities": ({"modalities": ["text", "audio"]}, "modalities", "not served here yet"),
    "audio": ({"audio": {"voice": "x"}}, "audio", "not served here yet"),
    "prediction": ({"prediction": {"type": "content"}}, "prediction", "not served here yet"),
    "reasoning_effort": ({"reasoning_effort": "high"}, "reasoning_effort", "not served here yet"),
    "web_search_options": ({"web_search_options": {}}, "web_search_options", "not served"),
    "prompt": ({"prompt": "hi"}, "prompt", "Unrecognized request argument"),
}

COMPLETION: dict[str, tuple[dict[str, Any], str, str]] = {
    "prompt_null": ({"prompt": None}, "prompt", "expected a string or an array"),
    "prompt_number": ({"prompt": 1}, "prompt", "expected a string or an array"),
    "prompt_empty": ({"prompt": ""}, "prompt", "at least one token"),
    "prompt_empty_list": ({"prompt": []}, "prompt", "at least one token"),
    "prompt_list_of_empty": ({"prompt": [[]]}, "prompt", "at least one token"),
    "prompt_of_two": ({"prompt": ["a", "b"]}, "prompt", "2 prompts in one request"),
    "prompt_of_two_lists": ({"prompt": [[1], [2]]}, "prompt", "2 prompts in one request"),
    "prompt_mixed": ({"prompt": ["a", 1]}, "prompt", "mixes them"),
    "prompt_of_booleans": ({"prompt": [True]}, "prompt[0]", "got a boolean"),
    "prompt_of_decimals": ({"prompt": [1.5]}, "prompt[0]", "got a decimal"),
    "prompt_of_objects": ({"prompt": [{}]}, "prompt[0]", "got an object"),
    "token_negative": ({"prompt": [1, -1]}, "prompt", "from 0 to 49151, one is -1"),
    "token_too_high": ({"prompt": [49152]}, "prompt", "from 0 to 49151, one is 49152"),
    "token_huge": ({"prompt": [10**50]}, "prompt", "from 0 to 49151"),
    "echo": ({"echo": True}, "echo", "not served here yet"),
    "best_of": ({"best_of": 2}, "best_of", "not served here yet"),
    "suffix": ({"suffix": "x"}, "suffix", "not served here yet"),
    "logprobs_number": ({"logprobs": 1}, "logprobs", "not served here yet"),
    "messages": ({"messages": HI}, "messages", "Unrecognized request argument"),
    "max_completion_tokens": ({"max_completion_tokens": 1}, "max_completion_tokens", "Unrecog"),
}

PATHS = ("/v1/chat/completions", "/v1/completions")


def check(response: httpx.Response, param: str, words: str) -> None:
    error = error_of(response, 400)
    assert words in error["message"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("fault", BOTH | CHAT)
def test_a_bad_chat_request_is_told_what_is_wrong(api: Api, fault: str) -> None:
    changes, param, words = (BOTH | CHAT)[fault]
    check(api.chat(**changes), param, words)
    assert api.engine.submits == []


@pytest.mark.parametrize("fault", BOTH | COMPLETION)
def test_a_bad_completion_request_is_told_what_is_wrong(api: Api, fault: str) -> None:
    changes, param, words = (BOTH | COMPLETION)[fault]
    check(api.complete(**changes), param, words)
    assert api.engine.submits == []


@pytest.mark.parametrize("missing", ["model", "messages"])
def test_a_missing_parameter_is_named(api: Api, missing: str) -> None:
    body = {"model": BASE, "messages": HI}
    del body[missing]
    response = api.client.post("/v1/chat/completions", json=body)
    check(response, missing, f"Missing required parameter: '{missing}'.")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"hello",
        b'{"model": "a"',
        b'{"model": NaN}',
        b'{"model": "a",}',
        b"{'model': 'a'}",
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b'\xef\xbb\xbf{"model": "a"}',
        b"null",
        b"[]",
        b'"text"',
        b"[" * 100_000,
        b'{"model":"a","messages":' + b"[" * 100_000,
        b'{"model":"a","tools":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model":"a","prompt":' + b"[" * 100_000,
        b'{"model":"a","metadata":' + b'{"a":' * 100_000,
        b'{"model":"a","temperature":1e999}',
        b"--x\r\nContent-Disposition: form-data\r\n\r\n",
        b"model=a&prompt=b",
    ],
)
def test_what_is_not_a_json_object_gets_400(api: Api, path: str, body: bytes) -> None:
    error = error_of(api.client.post(path, content=body), 400)
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 500


@pytest.mark.parametrize("path", PATHS)
def test_json_over_the_limit_gets_413_with_the_limit(api: Api, path: str) -> None:
    for content in (b" " * (BODY_BYTES_MAX + 1), (b" " * 2**16 for _ in range(160))):
        error = error_of(api.client.post(path, content=content), 413)
        assert str(BODY_BYTES_MAX) in error["message"]
        assert error["code"] == "request_too_large"


def test_the_connection_lives_on_after_a_body_that_was_too_large(api: Api) -> None:
    error_of(api.chat(messages=[{"role": "user", "content": "x" * 10 * 2**20}]), 413)
    assert api.chat().status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_fills_the_context_is_told_the_numbers(api: Api, stream: bool) -> None:
    error = error_of(
        api.chat(messages=[{"role": "user", "content": "x" * 2048}], stream=stream), 400
    )
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages"
    assert "maximum context length is 2048 tokens" in error["message"]
    assert "your messages resulted in 2067 tokens" in error["message"]


def test_a_long_prompt_is_tokenized_beside_the_others_and_refused(api: Api) -> None:
    error = error_of(api.complete(prompt="x" * 20_000), 400)
    assert "20000 tokens" in error["message"]


def test_a_prompt_too_long_for_any_tokens_is_refused_without_tokenizing_it(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> list[int]:
        raise AssertionError("tokenized")

    monkeypatch.setattr(Tokenizer, "encode", never)
    monkeypatch.setattr(Tokenizer, "encode_chat", never)
    longest = 2048 * len("<|endoftext|>")
    text = "x" * (longest + 1)
    chat = api.chat(messages=[{"role": "user", "content": text}])
    for response, param in ((api.complete(prompt=text), "prompt"), (chat, "messages")):
        error = error_of(response, 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert f"{longest} characters" in error["message"]
        assert f"{longest + 1} characters" in error["message"]


def test_a_prompt_of_the_longest_tokens_is_not_refused_by_its_length(api: Api) -> None:
    assert api.complete(prompt="<|endoftext|>" * 2047).status_code == 200
    assert len(api.submitted().prompt) == 2047


def test_few_long_prompts_are_tokenized_at_once(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, at_once, most = threading.Lock(), 0, 0

    def encode(*_: object) -> list[int]:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.05)
        with lock:
            at_once -= 1
        return [1]

    monkeypatch.setattr(Tokenizer, "encode", encode)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: api.complete(prompt="x" * 10_000), range(8)))
    assert {answer.status_code for answer in answers} == {200}
    assert most == LONG_ENCODES_MAX


def test_more_tokens_than_the_context_has_left_are_refused_with_the_numbers(api: Api) -> None:
    error = error_of(api.complete(prompt=[1] * 2000, max_tokens=100), 400)
    assert error["code"] == "context_length_exceeded"
    assert (
        "you requested 2100 tokens (2000 in the prompt, 100 in the completion)" in error["message"]
    )
    assert api.complete(prompt=[1] * 2000, max_tokens=48).status_code == 200


FAILURES: list[tuple[FailureCode, int, str]] = [
    ("prompt_too_long", 400, "context_length_exceeded"),
    ("adapter_failed", 422, "invalid_adapter"),
    ("not_finite", 422, "invalid_adapter"),
    ("overloaded", 503, "overloaded"),
    ("late", 503, "overloaded"),
    ("engine_lost", 503, "engine_unavailable"),
    ("internal", 500, "server_error"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("failure", "status", "code"), FAILURES)
def test_17_each_failure_before_the_first_token_has_its_status(
    api: Api, failure: FailureCode, status: int, code: str, stream: bool
) -> None:
    api.engine.script = lambda _: Script(failure=(failure, "because"))
    response = api.chat(stream=stream)
    error = error_of(response, status)
    assert error["code"] == code
    assert ("retry-after" in response.headers) == (status == 503)
    assert status != 500 or "because" not in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_would_come_too_late_is_told_when_to_try_again(
    api: Api, stream: bool
) -> None:
    late = EngineFailure("late", "because", retry_after_s=7.4)
    api.engine.script = lambda _: Script(raises=late)
    response = api.chat(stream=stream)
    assert "too busy to begin the answer in time" in error_of(response, 503)["message"]
    assert response.headers["retry-after"] == "8"
    assert api.submitted().first_token_s is not None


@pytest.mark.parametrize("stream", [False, True])
def test_while_the_engine_is_not_there_a_request_is_told_to_come_back(
    api: Api, stream: bool
) -> None:
    api.engine.ready = False
    response = api.chat(stream=stream)
    assert error_of(response, 503)["code"] == "engine_unavailable"
    assert response.headers["retry-after"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_waits_too_long_for_its_first_token_is_given_up(
    api: Api, stream: bool
) -> None:
    api.engine.script = lambda _: Script(hang=True)
    response = api.chat(stream=stream)
    assert error_of(response, 503)["code"] == "overloaded"
    assert api.engine.cancels == [api.submitted().request_id]


@pytest.mark.parametrize(("failure", "status", "code"), FAILURES)
def test_a_failure_after_the_first_token_is_an_error_frame_and_done(
    api: Api, failure: FailureCode, status: int, code: str
) -> None:
    api.engine.script = lambda _: Script([[65], [66]], failure=(failure, "because"))
    response = api.chat(stream=True)
    assert response.status_code == 200
    *frames, last = frames_of(response.text)
    assert [frame["choices"][0]["delta"]["content"] for frame in frames] == ["", "A", "B"]
    assert last.keys() == {"error"}
    assert last["error"]["code"] == code
    assert status != 500 or "because" not in last["error"]["message"]


@pytest.mark.parametrize("steps", [[], [[65]]])
def test_what_an_engine_should_never_raise_is_a_plain_server_error(
    api: Api, steps: list[list[int]]
) -> None:
    api.engine.script = lambda _: Script(steps, raises=ZeroDivisionError("secret"))
    assert error_of(api.chat(), 500)["code"] == "server_error"
    response = api.chat(stream=True)
    assert "secret" not in response.text
    error = frames_of(response.text)[-1]["error"] if steps else error_of(response, 500)
    assert error["code"] == "server_error"


@pytest.mark.parametrize("path", PATHS)
def test_only_post_is_possible(api: Api, path: str) -> None:
    for method in ("GET", "PUT", "DELETE"):
        error_of(api.client.request(method, path), 405)


@pytest.mark.parametrize("path", PATHS)
def test_without_a_key_the_body_is_not_even_read(api: Api, path: str) -> None:
    response = httpx.post(api.live.url + path, content=b"{")
    assert error_of(response, 401)["code"] == "invalid_api_key"
    wrong = {"authorization": "Bearer wrong"}
    assert error_of(httpx.post(api.live.url + path, headers=wrong, content=b"{"), 401)


@pytest.mark.parametrize("seed", range(60))
def test_any_value_for_any_parameter_gets_an_answer_or_a_400(api: Api, seed: int) -> None:
    chance = random.Random(seed)
    values: list[Any] = [
        None, True, False, 0, 1, -1, 2**31, 2**63, 2**64, 10**30, -(10**30), 0.5, -0.5, 1e308, "",
        "x", "\0", "😀", [], [None], [0], [[]], ["a"], [{}], {}, {"a": 1}, {"type": "text"},
    ]  # fmt: skip
    names = [
        "model", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens",
        "temperature", "top_p", "top_k", "min_p", "seed", "stop", "user", "metadata", "n",
        "logprobs", "top_logprobs", "logit_bias", "tools", "tool_choice", "response_format",
        "store", "service_tier", "modalities", "prediction", "parallel_tool_calls",
    ]  # fmt: skip
    for name in names:
        changes = {name: chance.choice(values), chance.choice(names): chance.choice(values)}
        response = api.chat(**changes)
        assert response.status_code in (200, 400, 404), (changes, response.text)
        if response.status_code != 200:
            error = error_of(response, response.status_code)
            assert error["param"], (changes, error)
            json.dumps(error)
