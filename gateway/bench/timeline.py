"""What became of one request, by the clock of `time.perf_counter`."""

from dataclasses import dataclass, field
from typing import NamedTuple


class Failure(NamedTuple):
    kind: str
    """`connection`: it could not be opened, or broke before the answer began; `refused`: 429 or
    503; `http_…`: another status; `error_event`: an error inside of the stream; `cut`: the stream
    ended without [DONE]; `not_a_stream`: 200, and then no events; `timeout`."""
    detail: str
    """The server's words if it said any, short and without secrets."""


@dataclass(slots=True)
class Timeline:
    """Neither `ended_s` nor a failure: it ran when the measurement ended."""

    model: str
    prompt_tokens: int
    """The server's count if it gave one, else ours."""
    asked_tokens: int
    sent_s: float
    late_s: float = 0.0
    """How long after the moment at which it was due; that is the client's fault."""
    text_s: list[float] = field(default_factory=list)
    """When each chunk with text arrived."""
    finished_s: float | None = None
    """When the chunk that gives the reason for the end arrived, with or after the last token."""
    ended_s: float | None = None
    """When [DONE] arrived, or the failure happened."""
    counted_tokens: int | None = None
    """Of the answer, by the server's usage."""
    failure: Failure | None = None

    @property
    def completed(self) -> bool:
        return self.ended_s is not None and self.failure is None

    @property
    def running(self) -> bool:
        return self.ended_s is None

    @property
    def output_tokens(self) -> int:
        """By usage, or as many as there were chunks with text."""
        return len(self.text_s) if self.counted_tokens is None else self.counted_tokens

    @property
    def ttft_s(self) -> float | None:
        """From sending to the first text; of a whole answer without any, to its end."""
        if self.text_s:
            return self.text_s[0] - self.sent_s
        return self.e2e_s if self.completed else None

    @property
    def gaps_s(self) -> list[float]:
        """Between chunks with text, however many tokens one carries."""
        pairs = zip(self.text_s, self.text_s[1:], strict=False)
        return [later - earlier for earlier, later in pairs]

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first: from the first text to the last token, through
        the tokens in between. None for an answer that came in one piece."""
        if len(self.text_s) < 2 or self.output_tokens < 2:
            return None
        last_s = self.text_s[-1] if self.finished_s is None else self.finished_s
        return (last_s - self.text_s[0]) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float | None:
        return None if self.ended_s is None else self.ended_s - self.sent_s
