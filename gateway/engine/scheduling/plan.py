"""What one iteration will compute: which sequences, how many tokens of each."""

from typing import NamedTuple

from gateway.engine.messages import Event
from gateway.engine.scheduling.sequence import Sequence


class Slice(NamedTuple):
    """`length` tokens of a sequence, beginning at its `computed`."""

    sequence: Sequence
    length: int

    @property
    def samples(self) -> bool:
        """Whether the last of these tokens is the newest one, so that the next is to be chosen."""
        return self.length == self.sequence.pending


class Plan(NamedTuple):
    slices: list[Slice]
    """Ordered by adapter, so that each adapter's tokens are one run; base-only ones first."""
    events: list[Event]
    """What planning itself had to say: failures of adapters that could not be loaded."""
