"""The openai package, unmodified, is one of our clients."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.fakes import Script, says
from tests.inference.conftest import BASE, Api
from tests.live import Live

HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(api: Api) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{api.live.url}/v1", api_key=api.live.key(), max_retries=0) as client:
        yield client


def other(running: Live, key: str, **options: Any) -> OpenAI:
    return OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0, **options)


def test_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=BASE, messages=HI, temperature=0, max_tokens=100, seed=1, stop=["\n"], user="me"
    )
    assert answer.choices[0].message.content == "Hello from the base."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20
    assert answer._request_id


def test_a_conversation_goes_on_with_what_the_client_got(client: OpenAI) -> None:
    first = client.chat.completions.create(model=BASE, messages=HI).choices[0].message
    again = [*HI, first, {"role": "user", "content": "and?"}]
    assert client.chat.completions.create(model=BASE, messages=again).choices[0].message.content


def test_chat_stream(client: OpenAI) -> None:
    pieces, usage = [], None
    for chunk in client.chat.completions.create(
        model=BASE, messages=HI, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        pieces += [choice.delta.content or "" for choice in chunk.choices]
    assert "".join(pieces) == "Hello from the base."
    assert usage is not None
    assert usage.completion_tokens == 20


def test_the_streaming_helper_puts_the_answer_together(client: OpenAI) -> None:
    with client.chat.completions.stream(model=BASE, messages=HI) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "Hello from the base."


def test_completions(client: OpenAI) -> None:
    answer = client.completions.create(model=BASE, prompt="hi", max_tokens=5, echo=False, n=1)
    assert answer.choices[0].text == "Hello"
    assert answer.choices[0].finish_reason == "length"
    chunks = client.completions.create(model=BASE, prompt=[104, 105], stream=True, max_tokens=5)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello"


def test_extensions_go_in_the_extra_body(client: OpenAI, api: Api) -> None:
    client.chat.completions.create(
        model=BASE, messages=HI, extra_body={"top_k": 5, "min_p": 0.5, "repetition_penalty": 1.0}
    )
    assert api.submitted().sampling.top_k == 5


def test_models_and_adapters(client: OpenAI, api: Api) -> None:
    adapter = api.upload("pirate")
    assert [model.id for model in client.models.list()] == [BASE, "pirate"]
    assert client.models.retrieve("pirate").owned_by == "acme"
    answer = client.chat.completions.create(model="pirate", messages=HI)
    assert answer.choices[0].message.content == f"Hello from {adapter['digest'][:8]}."
    api.client.delete("/v1/adapters/pirate")


async def test_the_async_client(api: Api) -> None:
    url = f"{api.live.url}/v1"
    async with AsyncOpenAI(base_url=url, api_key=api.live.key(), max_retries=0) as client:
        answer = await client.chat.completions.create(model=BASE, messages=HI)
        assert answer.choices[0].message.content == "Hello from the base."
        pieces = [
            chunk.choices[0].delta.content or ""
            async for chunk in await client.chat.completions.create(
                model=BASE, messages=HI, stream=True
            )
        ]
        assert "".join(pieces) == "Hello from the base."
        assert [model.id async for model in client.models.list()] == [BASE]
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="nope", messages=HI)


async def test_an_async_client_that_stops_reading_cancels_the_work(api: Api) -> None:
    api.engine.script = lambda _: Script([[65]] * 1000, delay_s=0.01)
    url = f"{api.live.url}/v1"
    async with AsyncOpenAI(base_url=url, api_key=api.live.key(), max_retries=0) as client:
        stream = await client.chat.completions.create(model=BASE, messages=HI, stream=True)
        async for _ in stream:
            break
        await stream.close()
    for _ in range(100):
        if api.engine.cancels:
            break
        await asyncio.sleep(0.01)
    assert api.engine.cancels == [api.submitted().request_id]


def test_errors_are_its_exception_classes(client: OpenAI, api: Api, running: Live) -> None:
    chat = client.chat.completions.create
    with pytest.raises(openai.AuthenticationError) as unknown:
        other(running, "lg_sk_wrong").chat.completions.create(model=BASE, messages=HI)
    assert unknown.value.code == "invalid_api_key"
    limited = running.key(scopes=("adapters:read",))
    with pytest.raises(openai.PermissionDeniedError):
        other(running, limited).chat.completions.create(model=BASE, messages=HI)
    with pytest.raises(openai.NotFoundError) as missing:
        chat(model="nope", messages=HI)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    assert missing.value.request_id
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nope")
    with pytest.raises(openai.BadRequestError) as bad:
        chat(model=BASE, messages=HI, temperature=3)
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as long:
        chat(model=BASE, messages=[{"role": "user", "content": "x" * 5000}])
    assert long.value.code == "context_length_exceeded"
    api.engine.script = lambda _: Script(failure=("not_finite", ""))
    with pytest.raises(openai.UnprocessableEntityError):
        chat(model=BASE, messages=HI)


def test_a_stream_that_fails_raises_whenever_it_fails(client: OpenAI, api: Api) -> None:
    chat = client.chat.completions.create
    with pytest.raises(openai.NotFoundError):
        chat(model="nope", messages=HI, stream=True)
    api.engine.script = lambda _: Script([[65]], failure=("engine_lost", "killed"))
    stream = chat(model=BASE, messages=HI, stream=True)
    seen: list[object] = []
    with pytest.raises(openai.APIError, match="engine stopped"):
        seen.extend(chunk.choices[0].delta.content for chunk in stream)


def test_an_overload_is_retried_after_the_time_that_was_said(api: Api, running: Live) -> None:
    tries: list[int] = []

    def script(_: object) -> Script:
        tries.append(1)
        return Script(failure=("overloaded", "full")) if len(tries) == 1 else says("at last")

    api.engine.script = script
    with other(running, running.key()).with_options(max_retries=2) as patient:
        answer = patient.chat.completions.create(model=BASE, messages=HI)
    assert answer.choices[0].message.content == "at last"
    assert len(tries) == 2


@pytest.mark.parametrize(
    "parameters",
    [
        {"tools": [{"type": "function", "function": {"name": "x"}}]},
        {"response_format": {"type": "json_object"}},
        {"n": 2},
        {"logprobs": True, "top_logprobs": 2},
        {"presence_penalty": 1.5},
    ],
)
def test_what_is_not_served_yet_is_a_bad_request(
    client: OpenAI, parameters: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError, match="not served here yet") as refused:
        client.chat.completions.create(model=BASE, messages=HI, **parameters)
    assert refused.value.code == "unsupported_parameter"
