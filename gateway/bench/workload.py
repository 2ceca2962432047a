"""The requests of a run: the same ones in the same order for every server, from one seed.

Models, lengths and tokens are drawn from random streams of their own, so that changing one of them
leaves the others as they were.
"""

from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from gateway.bench.shape import Range, Shape
from gateway.bench.targets import Target
from gateway.bench.words import WORDS


class Request(Struct, frozen=True):
    target: Target
    body: bytes
    prompt_tokens: int
    """Of chat only about as many, since it is sent as words."""
    output_tokens: int
    """What is asked for at most, and exactly if the server ignores the end of a sequence."""


class Stream(IntEnum):
    MODELS = 0
    LENGTHS = 1
    TOKENS = 2
    PREFIXES = 3
    GROUPS = 4
    ARRIVALS = 5


MEASURED, WARM_UP = 0, 1
"""Parts of a run. What warmed a server up shares nothing with what is measured but the prefixes."""


def requests(
    shape: Shape, targets: list[Target], seed: int, part: int = MEASURED
) -> Iterator[Request]:
    """Without end. Raises nothing; the shape must have been checked."""
    models, lengths, tokens, groups = (
        np.random.default_rng([seed, stream, part])
        for stream in (Stream.MODELS, Stream.LENGTHS, Stream.TOKENS, Stream.GROUPS)
    )
    prefixes = _prefixes(shape, np.random.default_rng([seed, Stream.PREFIXES]))
    shares = popularity(len(targets), shape.alpha).cumsum()
    while True:
        # the last share may be a rounding error below 1
        place = min(int(np.searchsorted(shares, models.random(), "right")), len(targets) - 1)
        prompt_tokens = int(lengths.integers(*shape.prompt_tokens, endpoint=True))
        output_tokens = int(lengths.integers(*shape.output_tokens, endpoint=True))
        prefix = prefixes[groups.integers(len(prefixes))]
        rest = _tokens(shape, tokens, prompt_tokens - len(prefix))
        yield Request(
            target=targets[place],
            body=_body(shape, targets[place], prefix + rest, output_tokens),
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
        )


def popularity(models: int, alpha: float) -> NDArray[np.float64]:
    """Shares of ranks 1 … models, which sum to 1."""
    weights: NDArray[np.float64] = np.arange(1, models + 1, dtype=np.float64) ** -alpha
    shares: NDArray[np.float64] = weights / weights.sum()
    return shares


def arrivals(rate: float, cv: float, seed: int) -> Iterator[float]:
    """Seconds from the start, ascending, without end.

    Times between arrivals have a Gamma distribution of shape 1/cv² and scale cv²/rate: a mean of
    1/rate and a coefficient of variation of cv, 1 being a Poisson process and more being bursts
    (S-LoRA, arXiv 2311.03285, section 7.1).
    """
    chance = np.random.default_rng([seed, Stream.ARRIVALS])
    due_s = 0.0
    while True:
        due_s += float(chance.gamma(1 / cv**2, cv**2 / rate))
        yield due_s


def _prefixes(shape: Shape, chance: np.random.Generator) -> list[list[int]]:
    """One of each group."""
    if shape.shared_prefix is None:
        return [[]]
    tokens, groups = shape.shared_prefix
    return [_tokens(shape, chance, tokens) for _ in range(groups)]


def _tokens(shape: Shape, chance: np.random.Generator, count: int) -> list[int]:
    """Token ids; for chat, places in WORDS."""
    ids = shape.vocabulary if shape.endpoint == "completions" else Range(0, len(WORDS) - 1)
    drawn: list[int] = chance.integers(*ids, count, endpoint=True).tolist()
    return drawn


def _body(shape: Shape, target: Target, tokens: list[int], output_tokens: int) -> bytes:
    prompt: dict[str, Any]
    if shape.endpoint == "completions":
        prompt = {"prompt": tokens}
    else:
        text = " ".join(WORDS[token] for token in tokens)
        prompt = {"messages": [{"role": "user", "content": text}]}
    fixed = {"model": target.model, "max_tokens": output_tokens, "stream": True}
    options = {"stream_options": {"include_usage": True}} | shape.extra | target.extra
    sent = {name: value for name, value in options.items() if value is not None}
    return msgspec.json.encode(fixed | prompt | sent)
