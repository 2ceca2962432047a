"""The OpenAI API's requests and responses, as typed structs.

A request names every parameter of OpenAI's API, also those that are not served yet: a client that
sends one learns that from `parameters.py`, and one that misspells a name learns that, too.
"""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

# --- requests -----------------------------------------------------------------------------------


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ContentPart(Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a message; only text is served."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None


class Message(Struct, frozen=True, forbid_unknown_fields=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None
    tool_calls: Any = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class GenerationRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What chat and completions have in common."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    """vLLM's: only `max_tokens` or a stop string ends the answer."""
    user: str | None = None
    metadata: dict[str, Any] | None = None
    n: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None
    logprobs: Any = None
    service_tier: Any = None
    store: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None


class ChatRequest(GenerationRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    moderation: Any = None
    parallel_tool_calls: bool | None = None
    prediction: Any = None
    reasoning_effort: Any = None
    response_format: Any = None
    tool_choice: Any = None
    tools: Any = None
    top_logprobs: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[str | int | list[int]]
    best_of: Any = None
    echo: Any = None
    suffix: Any = None


# --- responses ----------------------------------------------------------------------------------

FinishReason = Literal["stop", "length"]


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatMessage(Struct, frozen=True):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(Struct, frozen=True):
    message: ChatMessage
    finish_reason: FinishReason
    index: int = 0
    logprobs: None = None


class ChatCompletion(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class TextChoice(Struct, frozen=True):
    text: str
    finish_reason: FinishReason
    index: int = 0
    logprobs: None = None


class TextCompletion(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage


class Model(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str
    base_model: str | UnsetType = UNSET
    """Of an adapter: what it adapts."""


class ModelList(Struct, frozen=True):
    data: list[Model]
    object: str = "list"
