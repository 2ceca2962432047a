"""Keeping the text of control tokens in messages apart from those that the template writes.

A client may write "<|im_end|>" in a message. Rendered into the prompt and parsed with it, that text
would end the message and could begin one of another role. So it is marked before rendering, with a
private character on either side that no message holds. The template still sees the text itself, so
what it does with strings works; afterwards the marked texts are encoded as plain text, and the
marks are gone.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

PRIVATE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
"""Code points that Unicode gives no meaning."""


class Marks(NamedTuple):
    opening: str
    closing: str


class Piece(NamedTuple):
    text: str
    plain: bool
    """Whether a control token in `text` is only text."""


class ControlTokens:
    """A set of tokens, by their texts."""

    def __init__(self, tokens: Iterable[str]) -> None:
        # Longest first: a token wins over those that it begins with.
        texts = sorted({token for token in tokens if token}, key=len, reverse=True)
        self._any = "|".join(map(re.escape, texts)) or "(?!)"
        self._pattern = re.compile(self._any)

    def within(self, text: str) -> bool:
        return self._pattern.search(text) is not None

    def mark(self, text: str, marks: Marks) -> str:
        return self._pattern.sub(lambda found: f"{marks.opening}{found[0]}{marks.closing}", text)

    def split(self, rendered: str, marks: Marks) -> Iterator[Piece]:
        """The rendered text in order, without the marks.

        A template may cut a message anywhere, so one mark is enough to make a token plain. A mark
        without a token still ends a piece: what lies on its sides must not join into a token.
        """
        opening, closing = marks
        marked = re.compile(
            f"{opening}({self._any}){closing}?|({self._any}){closing}|[{opening}{closing}]"
        )
        position = 0
        for found in marked.finditer(rendered):
            if found.start() > position:
                yield Piece(rendered[position : found.start()], plain=False)
            if token := found[1] or found[2]:
                yield Piece(token, plain=True)
            position = found.end()
        if position < len(rendered):
            yield Piece(rendered[position:], plain=False)


def unused_marks(messages: Sequence[Mapping[str, str]], template: str) -> Marks | None:
    """Two private characters that neither the messages nor the template use; None: all are used."""
    used = set(template)
    for message in messages:
        used.update(*message.values())
    free = (chr(point) for point in chain(*PRIVATE) if chr(point) not in used)
    opening, closing = next(free, None), next(free, None)
    return Marks(opening, closing) if opening and closing else None
