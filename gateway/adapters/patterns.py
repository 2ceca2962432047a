"""Regular expressions from strangers' adapter configs, kept from costing more than they may.

PEFT's `rank_pattern`, `alpha_pattern`, `target_modules` and others hold regular expressions. Python
matches by backtracking and holds the interpreter lock meanwhile, so one hostile pattern would stop
the whole process. A pattern is compiled only if the number of ways to match it is bounded.
"""

import re

PATTERN_CHARS_MAX = 1000
WAYS_MAX = 20_000
"""Ways to match one pattern: enough for two `.*` and a few alternatives."""
NAME_CHARS = 64
"""A module name is shorter than this, so an unbounded repeat can stop in so many places."""
REPEAT = re.compile(r"\{(\d{0,4})(,?)(\d{0,4})\}")


class UnboundedPattern(ValueError):
    """Not a regular expression, or one that could take for ever; the message says which."""


def compile_bounded(pattern: str, template: str = "{}") -> re.Pattern[str]:
    """Compile `pattern`, put in the place of `{}` in our own `template`.

    Raises UnboundedPattern.
    """
    if count_ways(pattern) > WAYS_MAX:
        raise UnboundedPattern("it has too many repeats and alternatives")
    try:
        return re.compile(template.replace("{}", pattern))
    except (re.error, RecursionError, OverflowError) as error:
        raise UnboundedPattern(f"it is not a regular expression ({error})") from None


def count_ways(pattern: str) -> int:
    """How many ways there are to match it, at most; WAYS_MAX + 1 stands for all above it.

    Raises UnboundedPattern.
    """
    if len(pattern) > PATTERN_CHARS_MAX:
        raise UnboundedPattern(f"it is longer than {PATTERN_CHARS_MAX} characters")
    return _Scan(pattern).ways()


def has_outer_alternatives(pattern: str) -> bool:
    """Whether a | stands outside of parentheses, so that it would divide a template, too.

    Raises UnboundedPattern.
    """
    scan = _Scan(pattern)
    scan.ways()
    return scan.divided


class _Scan:
    """Counts the ways to match a pattern: a product along a sequence, a sum over alternatives."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._groups: list[tuple[int, int]] = []  # (sum of finished alternatives, product so far)
        self._sum, self._product = 0, 1
        self._last = ""  # what a quantifier here would repeat: "" nothing, "one", "group"

    def ways(self) -> int:
        while self._at < len(self._text):
            self._step(self._text[self._at])
            if self._sum + self._product > WAYS_MAX:
                return WAYS_MAX + 1
        if self._groups:
            raise UnboundedPattern("a parenthesis is not closed")
        return self._sum + self._product

    @property
    def divided(self) -> bool:
        return self._sum > 0 and not self._groups

    def _step(self, character: str) -> None:
        if character == "\\":
            self._escape()
        elif character == "[":
            self._character_class()
        elif character == "(":
            self._open()
        elif character == ")":
            self._close()
        elif character == "|":
            self._sum, self._product, self._last = self._sum + self._product, 1, ""
            self._at += 1
        elif character in "*+?" or REPEAT.match(self._text, self._at):
            self._quantifier(character)
        else:
            self._one(1)

    def _one(self, length: int) -> None:
        self._at += length
        self._last = "one"

    def _escape(self) -> None:
        if self._at + 1 == len(self._text):
            raise UnboundedPattern("it ends with a backslash")
        if self._text[self._at + 1 : self._at + 2] in tuple("123456789"):
            raise UnboundedPattern("it refers back to a group")
        self._one(2)

    def _character_class(self) -> None:
        end = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL).match(self._text, self._at)
        if end is None:
            raise UnboundedPattern("a [ is not closed")
        self._one(end.end() - self._at)

    def _open(self) -> None:
        plain = self._text.startswith("(?:", self._at)
        if not plain and self._text.startswith("(?", self._at):
            raise UnboundedPattern("it uses (?…), of which only (?:…) is taken")
        self._groups.append((self._sum, self._product))
        self._sum, self._product, self._last = 0, 1, ""
        self._at += 3 if plain else 1

    def _close(self) -> None:
        if not self._groups:
            raise UnboundedPattern("a parenthesis is not opened")
        inside = self._sum + self._product
        self._sum, before = self._groups.pop()
        self._product, self._last = before * inside, "group"
        self._at += 1

    def _quantifier(self, character: str) -> None:
        if self._last == "":
            raise UnboundedPattern("a quantifier repeats nothing")
        repeat = REPEAT.match(self._text, self._at)
        if character == "?":
            self._product *= 2
        elif self._last == "group":
            raise UnboundedPattern("it repeats a group")
        elif repeat is None or repeat[2]:
            self._product *= NAME_CHARS
        self._at += len(repeat[0]) if repeat else 1
        if self._text[self._at : self._at + 1] in ("?", "+"):  # lazy, possessive
            self._at += 1
        self._last = ""
