"""Stop strings in a text that arrives in pieces."""


class StopStrings:
    """Lets a text through up to the first stop string, however it is cut into pieces.

    The first is the one that is complete first; of those that end together, the longest. A stop
    string is not part of the answer, so what could be the beginning of one is held back.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """What can be let through now; nothing more once `found`."""
        if not self._stops:
            return text
        text = self._held + text
        if (start := self._first(text)) is not None:
            self.found, self._held = True, ""
            return text[:start]
        kept = self._beginning(text)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> int | None:
        places = [
            (start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0
        ]
        return min(places)[1] if places else None

    def _beginning(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
