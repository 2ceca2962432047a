"""Do all servers go on alike from one prompt with one adapter, greedily?

A report and no gate: in bfloat16 two tokens can be as likely as each other, and a text that has
gone another way once does not come back.
"""

from collections.abc import Mapping
from itertools import takewhile

from benchmarks.peers.results import Answer

PROMPT = "The capital of France is"
TOKENS = 12
REFERENCE = "peft-float32"


def lines_of(answers: Mapping[str, Answer]) -> list[str]:
    """Each server's text, and how much of its beginning is that of PEFT in float32."""
    reference = answers.get(REFERENCE)
    lines = []
    for server, answer in answers.items():
        same = ""
        if reference is not None and server != REFERENCE:
            shared = _shared(reference.text, answer.text)
            same = f"   {shared} of {len(reference.text)} characters as {REFERENCE}"
        lines.append(f"  {server:<18}{answer.text!r}{same}")
    return lines


def _shared(first: str, second: str) -> int:
    """How many characters both begin with."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    )
