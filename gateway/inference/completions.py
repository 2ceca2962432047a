"""POST /v1/completions"""

import time
from typing import Any

import msgspec
from litestar import Request, post
from litestar.openapi.datastructures import ResponseSpec
from litestar.types import ASGIApp

from gateway.connection import read_body, unless_gone
from gateway.errors import InvalidRequest
from gateway.inference import parameters
from gateway.inference.ask import Ask
from gateway.inference.decoding import decode
from gateway.inference.generation import Answer, Ending, Walk, begin
from gateway.inference.openapi import CompletionOperation
from gateway.inference.stream import EventStream, Frames
from gateway.inference.whole import JsonAnswer
from gateway.inference.wire import CompletionRequest, TextChoice, TextCompletion

DECODER = msgspec.json.Decoder(CompletionRequest)
ENCODER = msgspec.json.Encoder()
MAX_TOKENS_DEFAULT = 16
"""OpenAI's."""


@post(
    "/v1/completions",
    status_code=200,
    operation_id="createCompletion",
    summary="Continue a text",
    description="OpenAI's (legacy) completions. With `stream`, the text comes as events.",
    tags=["Inference"],
    operation_class=CompletionOperation,
    request_max_body_size=None,  # read_body has the limit
    responses={200: ResponseSpec(TextCompletion, description="The answer, if it is not streamed.")},
)
async def create_completion(
    request: Request[Any, Any, Any],
) -> ASGIApp:
    walk = await begin(request)
    body = decode(await read_body(request, walk.body_bytes_max), DECODER)
    ask = to_ask(body)
    if body.stream:
        include_usage = body.stream_options is not None and body.stream_options.include_usage
        return EventStream(_frames(walk, ask, include_usage=bool(include_usage)), walk.headers)
    answer = await unless_gone(request.receive, _complete(walk, ask))
    return JsonAnswer(answer, walk.headers)


def to_ask(body: CompletionRequest) -> Ask:
    """Raises InvalidRequest for what can be told to be wrong without the model."""
    parameters.refuse_not_served(body)
    return Ask(
        model=body.model,
        prompt=_prompt(body.prompt),
        prompt_param="prompt",
        sampling=parameters.sampling(body),
        stop=parameters.stop_strings(body.stop),
        ignore_eos=bool(body.ignore_eos),
        max_tokens=parameters.max_tokens("max_tokens", body.max_tokens),
        max_tokens_default=MAX_TOKENS_DEFAULT,
        id_prefix="cmpl-",
        user=body.user,
    )


def _prompt(prompt: str | list[str | int | list[int]]) -> str | list[int]:
    """A text, or token ids; also a list of one of either."""
    if isinstance(prompt, str):
        return prompt
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        return ids
    if len(prompt) == 1 and not isinstance(prompt[0], int):
        return prompt[0]
    if len({type(item) for item in prompt}) > 1:
        raise InvalidRequest(
            "Invalid 'prompt': expected a string, an array of token ids, or an array of one of "
            "these; this array mixes them.",
            param="prompt",
            code="invalid_type",
        )
    raise InvalidRequest(
        f"Invalid 'prompt': {len(prompt)} prompts in one request are not served yet. Send one "
        "request for each.",
        param="prompt",
        code="unsupported_parameter",
    )


async def _complete(walk: Walk, ask: Ask) -> TextCompletion:
    async with walk.answer(ask) as answer:
        text, ending = await answer.whole()
    return TextCompletion(
        id=answer.id,
        created=int(time.time()),
        model=ask.model,
        system_fingerprint=answer.fingerprint,
        choices=[TextChoice(text, ending.reason)],
        usage=ending.usage,
    )


async def _frames(walk: Walk, ask: Ask, *, include_usage: bool) -> Frames:
    async with walk.answer(ask) as answer:
        chunks = TextChunks(answer, ask.model, include_usage=include_usage)
        async for event in answer:
            yield chunks.end(event) if isinstance(event, Ending) else chunks.text(event)


class TextChunks:
    """The frames of one stream. All but the text in them is encoded once."""

    def __init__(self, answer: Answer, model: str, *, include_usage: bool) -> None:
        head = {
            "id": answer.id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": answer.fingerprint,
        }
        self._head = b"data: " + ENCODER.encode(head)[:-1]
        self._include_usage = include_usage
        self._before = self._head + b',"choices":[{"index":0,"logprobs":null,"text":'
        self._tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._after = b',"finish_reason":null}]' + self._tail

    def text(self, piece: str) -> bytes:
        return self._before + ENCODER.encode(piece) + self._after

    def end(self, ending: Ending) -> bytes:
        reason = b',"finish_reason":' + ENCODER.encode(ending.reason)
        frame = self._before + b'""' + reason + b"}]" + self._tail
        if not self._include_usage:
            return frame
        usage = ENCODER.encode(ending.usage)
        return frame + self._head + b',"choices":[],"usage":' + usage + b"}\n\n"
