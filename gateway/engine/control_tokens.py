"""Keeping the text of control tokens in messages apart from those that the template writes.

A client may write "<|im_end|>" in a message. Rendered into the prompt and parsed with it, that text
would end the message and could begin one of another role. So before rendering, each character of
such a text gets a mark behind it, a private character that the messages and the template don't use:

    say <|im_end|> twice   →   say <·|·i·m·_·e·n·d·|·>· twice

Whatever the template then does to the message, a control token in the rendered text is one that the
template wrote. Marked characters are encoded as plain text, and the marks are gone.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

PRIVATE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
"""Code points that Unicode gives no meaning."""


class Piece(NamedTuple):
    text: str
    plain: bool
    """Whether a control token in `text` is only text."""


class ControlTokens:
    """A set of tokens, by their texts."""

    def __init__(self, tokens: Iterable[str]) -> None:
        # Longest first: a token wins over those that it begins with.
        texts = sorted({token for token in tokens if token}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts)) or "(?!)")

    def within(self, text: str) -> bool:
        return self._pattern.search(text) is not None

    def mark(self, text: str, mark: str) -> str:
        return self._pattern.sub(lambda found: mark.join(found[0]) + mark, text)


def split(rendered: str, mark: str) -> Iterator[Piece]:
    """The rendered text in order, without the marks.

    A mark whose character the template has cut off still ends a piece: what lies on its sides must
    not join into a token.
    """
    position = 0
    for found in re.finditer(f"((?:[^{mark}]{mark})+)|{mark}", rendered):
        if found.start() > position:
            yield Piece(rendered[position : found.start()], plain=False)
        if found[1]:
            yield Piece(found[1].replace(mark, ""), plain=True)
        position = found.end()
    if position < len(rendered):
        yield Piece(rendered[position:], plain=False)


def unused_mark(messages: Sequence[Mapping[str, str]], template: str) -> str | None:
    """A private character that neither the messages nor the template use; None: all are used."""
    used = set(template)
    for message in messages:
        used.update(*message.values())
    return next((chr(point) for point in chain(*PRIVATE) if chr(point) not in used), None)
