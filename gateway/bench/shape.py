"""What the requests of a run look like, as an operator says it."""

from typing import Any, Literal, NamedTuple

from msgspec import Struct

Endpoint = Literal["completions", "chat"]


class Range(NamedTuple):
    """Both ends included."""

    low: int
    high: int


class SharedPrefix(NamedTuple):
    tokens: int
    groups: int


class Shape(Struct, frozen=True):
    """What requests look like. Lengths are drawn uniformly."""

    endpoint: Endpoint
    prompt_tokens: Range
    output_tokens: Range
    vocabulary: Range
    """Token ids of prompts; chat has words instead."""
    alpha: float
    """The model of rank r, in the order of the models, is asked with probability ∝ r^-alpha."""
    shared_prefix: SharedPrefix | None
    """A prompt begins as all others of its group, which is drawn uniformly, do."""
    extra: dict[str, Any]
    """Merged into each body; null leaves a field out."""
