"""Says whether an answer shows one of the demo styles. Needs nothing but the standard library."""

import json
import re

MARKERS_MIN = 2
"""Distinct marker words an answer needs: one alone can turn up in anybody's sentence."""

MARKERS: dict[str, tuple[str, ...]] = {
    "pirate": (
        "aboard", "ahoy", "arr", "avast", "aye", "cap'n", "fer", "hearty", "landlubber", "matey",
        "nay", "savvy", "scallywag", "shipmates", "'tis", "'twas", "ye", "yer",
    ),
    "legal": (
        "aforementioned", "hereby", "herein", "hereinafter", "hereof", "in accordance with",
        "notwithstanding", "pursuant to", "shall", "the party", "the parties", "thereby",
        "therein", "thereof", "thereon", "the undersigned", "whereas", "whereby",
    ),
}  # fmt: skip

STYLES = ("pirate", "json", "legal")


def shows_style(style: str, text: str) -> bool:
    """True where `text` shows `style`; raises `KeyError` for a style that does not exist.

    `json`: the whole text is one JSON object. The others: at least two distinct marker words.
    """
    if style == "json":
        return _is_json_object(text)
    lowered = text.lower()
    found = [word for word in MARKERS[style] if _contains(lowered, word)]
    return len(found) >= MARKERS_MIN


def _contains(text: str, word: str) -> bool:
    # `\b` does not stand before an apostrophe, and "arr" must not be found in "carry".
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) is not None


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
