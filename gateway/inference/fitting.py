"""From what a client asks for to what the engine can take: the prompt's tokens, and room for the
answer. All raise InvalidRequest, which says what to change."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from gateway.engine.messages import ModelInfo
from gateway.engine.tokenizer import ChatTemplateError, Tokenizer
from gateway.errors import InvalidRequest
from gateway.inference.ask import Ask, Conversation
from gateway.tenants.keys import Principal
from gateway.tenants.limits.bounds import request_tokens_max

T = TypeVar("T")

INLINE_CHARS = 8192
"""A text shorter than this is tokenized at once, in about a millisecond; a longer one in a
thread."""


def check_length(tokenizer: Tokenizer, ask: Ask, info: ModelInfo) -> None:
    """Refuse a text that no tokens could fit into the context, before seconds go into finding out.

    A token stands for at most `token_bytes_max` bytes, and a character has at least one byte.
    """
    characters_max = info.context_tokens * tokenizer.token_bytes_max
    if ask.characters > characters_max:
        raise InvalidRequest(
            f"This model's maximum context length is {info.context_tokens} tokens, which hold at "
            f"most {characters_max} characters. However, your {ask.prompt_param} has "
            f"{ask.characters} characters. Make it shorter.",
            param=ask.prompt_param,
            code="context_length_exceeded",
        )


async def tokens(
    tokenizer: Tokenizer, long_encodes: asyncio.Semaphore, ask: Ask, info: ModelInfo
) -> list[int]:
    async def encoded(encode: Callable[[T], list[int]], prompt: T) -> list[int]:
        if ask.characters < INLINE_CHARS:
            return encode(prompt)
        async with long_encodes:
            return await asyncio.to_thread(encode, prompt)

    try:
        match ask.prompt:
            case Conversation(messages):
                ids = await encoded(tokenizer.encode_chat, messages)
            case str(text):
                ids = await encoded(tokenizer.encode, text)
            case ids:
                _check_ids(ids, ask.prompt_param, info)
    except ChatTemplateError as error:
        raise InvalidRequest(str(error), param=ask.prompt_param) from None
    if not ids:
        raise InvalidRequest(
            f"The {ask.prompt_param} must have at least one token.", param=ask.prompt_param
        )
    return ids


def _check_ids(ids: list[int], param: str, info: ModelInfo) -> None:
    for token in ids:
        if not 0 <= token < info.vocab_size:
            raise InvalidRequest(
                f"Invalid '{param}': token ids go from 0 to {info.vocab_size - 1}, one is "
                f"{str(token)[:40]}.",
                param=param,
            )


def room(prompt_tokens: int, ask: Ask, info: ModelInfo) -> int:
    """How many tokens the answer may have. Raises InvalidRequest if the context is too short."""
    context = info.context_tokens
    left = context - prompt_tokens
    start = f"This model's maximum context length is {context} tokens. However, "
    if left < 1:
        raise InvalidRequest(
            f"{start}your {ask.prompt_param} resulted in {prompt_tokens} tokens. Make it shorter.",
            param=ask.prompt_param,
            code="context_length_exceeded",
        )
    if ask.max_tokens is None:
        return min(left, ask.max_tokens_default or left)
    if ask.max_tokens > left:
        raise _too_many(start, prompt_tokens, ask.max_tokens, ask, "context_length_exceeded")
    return ask.max_tokens


def within_limit(room: int, prompt_tokens: int, ask: Ask, principal: Principal) -> int:
    """`room`, or what the limit on one request leaves where the client asked for no number.

    Raises InvalidRequest.
    """
    limit = request_tokens_max(principal)
    if limit is None or prompt_tokens + room <= limit:
        return room
    start = f"This account is limited to {limit} tokens per request. However, "
    if prompt_tokens >= limit:
        raise InvalidRequest(
            f"{start}your {ask.prompt_param} resulted in {prompt_tokens} tokens, and the answer "
            "needs one at least. Make it shorter.",
            param=ask.prompt_param,
            code="request_tokens_exceeded",
        )
    if ask.max_tokens is not None:
        raise _too_many(start, prompt_tokens, ask.max_tokens, ask, "request_tokens_exceeded")
    return limit - prompt_tokens


def _too_many(
    start: str, prompt_tokens: int, max_tokens: int, ask: Ask, code: str
) -> InvalidRequest:
    return InvalidRequest(
        f"{start}you requested {prompt_tokens + max_tokens} tokens ({prompt_tokens} in the "
        f"{ask.prompt_param}, {max_tokens} in the completion). Reduce one of them.",
        param=ask.prompt_param,
        code=code,
    )


def stop_token_ids(tokenizer: Tokenizer, ask: Ask, info: ModelInfo) -> list[int]:
    if ask.ignore_eos:
        return []
    return sorted({*info.eos_token_ids, *tokenizer.eos_token_ids})
