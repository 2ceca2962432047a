"""What tokens cost."""

from typing import Protocol

from msgspec import Struct


class Rates(Protocol):
    """Prices of a million tokens, in micros of the operator's currency."""

    @property
    def input_micros(self) -> int: ...
    @property
    def cached_input_micros(self) -> int: ...
    @property
    def output_micros(self) -> int: ...


class Free(Struct, frozen=True):
    input_micros: int = 0
    cached_input_micros: int = 0
    output_micros: int = 0


FREE = Free()


def cost_nanos(rates: Rates, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> int:
    """`cached_tokens` are among the `prompt_tokens`. Half a nano is rounded up."""
    micros = (
        (prompt_tokens - cached_tokens) * rates.input_micros
        + cached_tokens * rates.cached_input_micros
        + output_tokens * rates.output_micros
    )
    return (micros + 500) // 1000
