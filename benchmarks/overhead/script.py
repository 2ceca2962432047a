"""What both stubs answer. The request says it, in parameters that every gateway passes on."""

from typing import NamedTuple

WORD = " sea"
"""One token of SmolLM2's; every answer says it again and again."""
UNIT = 1000


class Script(NamedTuple):
    tokens: int
    first_s: float
    """From the request to the first token."""
    pace_s: float
    """Between tokens; 0: all at once."""

    @property
    def parameters(self) -> dict[str, int]:
        """Of a request: `max_tokens`, and the times, in milliseconds, as its `seed`."""
        first_ms, pace_ms = round(1e3 * self.first_s), round(1e3 * self.pace_s)
        return {"max_tokens": self.tokens, "seed": UNIT * first_ms + pace_ms}


def read(max_tokens: int, seed: int) -> Script:
    first_ms, pace_ms = divmod(seed, UNIT)
    return Script(max_tokens, first_ms / 1e3, pace_ms / 1e3)
