"""POST /v1/chat/completions"""

import time
from typing import Any

import msgspec
from litestar import Request, post
from litestar.openapi.datastructures import ResponseSpec
from litestar.types import ASGIApp

from gateway.connection import read_body, unless_gone
from gateway.errors import InvalidRequest
from gateway.inference import parameters
from gateway.inference.ask import Ask, Conversation
from gateway.inference.decoding import decode
from gateway.inference.generation import Answer, Ending, Walk, begin
from gateway.inference.openapi import ChatOperation
from gateway.inference.stream import EventStream, Frames
from gateway.inference.whole import JsonAnswer
from gateway.inference.wire import (
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    ChatRequest,
    ContentPart,
    Message,
)

DECODER = msgspec.json.Decoder(ChatRequest)
ENCODER = msgspec.json.Encoder()

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Role in a request → role in the model's chat template."""
NOT_SERVED_IN_MESSAGES = ("audio", "function_call", "tool_calls", "tool_call_id")
MESSAGES_MAX = 10_000


@post(
    "/v1/chat/completions",
    status_code=200,
    operation_id="createChatCompletion",
    summary="Answer a conversation",
    description="OpenAI's chat completions. With `stream`, the answer comes as server-sent events.",
    tags=["Inference"],
    operation_class=ChatOperation,
    request_max_body_size=None,  # read_body has the limit
    responses={200: ResponseSpec(ChatCompletion, description="The answer, if it is not streamed.")},
)
async def create_chat_completion(
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


def to_ask(body: ChatRequest) -> Ask:
    """Raises InvalidRequest for what can be told to be wrong without the model."""
    parameters.refuse_not_served(body)
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    wanted = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return Ask(
        model=body.model,
        prompt=_conversation(body.messages),
        prompt_param="messages",
        sampling=parameters.sampling(body),
        stop=parameters.stop_strings(body.stop),
        ignore_eos=bool(body.ignore_eos),
        max_tokens=parameters.max_tokens(name, wanted),
        max_tokens_default=None,
        id_prefix="chatcmpl-",
        user=body.user,
    )


def _conversation(messages: list[Message]) -> Conversation:
    if not messages:
        raise InvalidRequest(
            "Invalid 'messages': empty array. Expected an array with minimum length 1, but got an "
            "empty array instead.",
            param="messages",
            code="empty_array",
        )
    if len(messages) > MESSAGES_MAX:
        raise InvalidRequest(
            f"Invalid 'messages': array too long. Expected an array with maximum length "
            f"{MESSAGES_MAX}, but got an array with length {len(messages)} instead.",
            param="messages",
            code="array_above_max_length",
        )
    return Conversation(
        [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    )


def _message(message: Message, param: str) -> dict[str, str]:
    role = ROLES.get(message.role)
    if role is None:
        served = ", ".join(f"'{name}'" for name in ROLES)
        raise InvalidRequest(
            f"Invalid value: {message.role[:40]!r}. Supported values here are: {served}.",
            param=f"{param}.role",
            code="invalid_value",
        )
    for name in NOT_SERVED_IN_MESSAGES:
        if getattr(message, name):
            raise InvalidRequest(
                f"'{param}.{name}' is not served here yet. Leave it out.",
                param=f"{param}.{name}",
                code="unsupported_parameter",
            )
    return {"role": role, "content": _content(message.content, f"{param}.content")}


def _content(content: str | list[ContentPart] | None, param: str) -> str:
    if isinstance(content, str):
        return content
    if not content:
        raise InvalidRequest(
            f"Invalid value for '{param}': expected a string or an array of content parts.",
            param=param,
            code="invalid_value",
        )
    return "\n".join(_part(part, f"{param}[{index}]") for index, part in enumerate(content))


def _part(part: ContentPart, param: str) -> str:
    text = {"text": part.text, "refusal": part.refusal}.get(part.type)
    if part.type not in ("text", "refusal"):
        raise InvalidRequest(
            f"Content parts of the type {part.type[:40]!r} are not served: this model reads text.",
            param=f"{param}.type",
            code="invalid_value",
        )
    if text is None:
        raise InvalidRequest(
            f"Missing required parameter: '{param}.{part.type}'.",
            param=f"{param}.{part.type}",
            code="missing_required_parameter",
        )
    return text


async def _complete(walk: Walk, ask: Ask) -> ChatCompletion:
    async with walk.answer(ask) as answer:
        text, ending = await answer.whole()
    return ChatCompletion(
        id=answer.id,
        created=int(time.time()),
        model=ask.model,
        system_fingerprint=answer.fingerprint,
        choices=[ChatChoice(ChatMessage(text), ending.reason)],
        usage=ending.usage,
    )


async def _frames(walk: Walk, ask: Ask, *, include_usage: bool) -> Frames:
    async with walk.answer(ask) as answer:
        chunks = ChatChunks(answer, ask.model, include_usage=include_usage)
        role = chunks.role()  # goes out together with the first piece
        async for event in answer:
            if isinstance(event, Ending):
                yield role + chunks.end(event)
            else:
                yield role + chunks.text(event)
                role = b""


class ChatChunks:
    """The frames of one stream. All but the text in them is encoded once."""

    def __init__(self, answer: Answer, model: str, *, include_usage: bool) -> None:
        head = {
            "id": answer.id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": answer.fingerprint,
        }
        self._head = b"data: " + ENCODER.encode(head)[:-1]
        self._include_usage = include_usage
        self._before = self._head + b',"choices":[{"index":0,"delta":{"content":'
        self._tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"
        self._after = b'},"logprobs":null,"finish_reason":null}]' + self._tail

    def role(self) -> bytes:
        delta = b'"","role":"assistant","refusal":null'
        return self._before + delta + self._after

    def text(self, piece: str) -> bytes:
        return self._before + ENCODER.encode(piece) + self._after

    def end(self, ending: Ending) -> bytes:
        choice = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": ending.reason}
        frame = self._head + b',"choices":' + ENCODER.encode([choice]) + self._tail
        if not self._include_usage:
            return frame
        usage = ENCODER.encode(ending.usage)
        return frame + self._head + b',"choices":[],"usage":' + usage + b"}\n\n"
