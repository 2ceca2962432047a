"""What tokens cost, in whole numbers."""

from msgspec import Struct


class Rates(Struct, frozen=True):
    """Of a million tokens, in millionths of the operator's currency."""

    input_micros: int = 0
    cached_input_micros: int = 0
    output_micros: int = 0


FREE = Rates()


def cost_nanos(rates: Rates, prompt: int, cached: int, output: int) -> int:
    """In thousand-millionths of the currency, half of one rounded up. `cached` are among the tokens
    of the prompt."""
    micros = (
        (prompt - cached) * rates.input_micros
        + cached * rates.cached_input_micros
        + output * rates.output_micros
    )
    return (micros + 500) // 1000
