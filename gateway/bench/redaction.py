"""What is shown is shown without keys."""

from collections.abc import Callable, Iterable

from gateway.telemetry import redact


def hiding(keys: Iterable[str]) -> Callable[[str], str]:
    """A function that takes these keys, and whatever looks like one of ours, out of a text."""
    known = sorted({key for key in keys if key}, key=len, reverse=True)

    def hide(text: str) -> str:
        for key in known:
            text = text.replace(key, "…")
        return redact(text)

    return hide
