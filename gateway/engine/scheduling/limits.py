"""What bounds an engine's work."""

from typing import NamedTuple


class Limits(NamedTuple):
    context_tokens: int
    vocab_size: int
    block_tokens: int
    step_tokens: int
    running_max: int
    waiting_max: int

    def blocks(self, tokens: int) -> int:
        """Pages that hold the KV of so many tokens."""
        return -(-tokens // self.block_tokens)
