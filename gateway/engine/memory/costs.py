"""How long things take on this machine, measured while serving: what reclaim and deadlines ask."""

FADE = 0.98
"""Weight of all earlier measurements when a new one comes: about the last fifty count."""
STEPS_KNOWN = 8
"""Iterations after which a forecast is more than a guess."""
GUESS_TOKEN_S = 1 / 500
GUESS_COPY_S = 1 / 5e9
GUESS_READ_S = 1 / 0.3e9


class Rate:
    """Seconds per unit, as a fading average; until something was measured, a guess."""

    def __init__(self, guess: float) -> None:
        self._units = 0.0
        self._seconds = 0.0
        self._guess = guess

    def measured(self, units: float, seconds: float) -> None:
        self._units = self._units * FADE + units
        self._seconds = self._seconds * FADE + seconds

    def seconds(self, units: float) -> float:
        per_unit = self._seconds / self._units if self._units else self._guess
        return max(units * per_unit, 1e-9)


class StepTime:
    """Seconds of an iteration as a + b · tokens, least squares over fading measurements.

    Both are kept from being negative: noise must not make a long prompt free.
    """

    def __init__(self) -> None:
        self._count = self._x = self._xx = self._y = self._xy = 0.0
        self.known = False
        """Whether enough was measured for a forecast."""

    def measured(self, tokens: int, seconds: float) -> None:
        self._count = self._count * FADE + 1
        self._x = self._x * FADE + tokens
        self._xx = self._xx * FADE + tokens * tokens
        self._y = self._y * FADE + seconds
        self._xy = self._xy * FADE + tokens * seconds
        self.known = self.known or self._count > STEPS_KNOWN

    def seconds(self, tokens: float) -> float:
        fixed, per_token = self._line()
        return fixed + per_token * tokens

    @property
    def mean_s(self) -> float:
        return self._y / self._count if self._count else 0.0

    def _line(self) -> tuple[float, float]:
        if not self._count:
            return 0.0, GUESS_TOKEN_S
        variance = self._xx - self._x * self._x / self._count
        if variance <= 1e-9 * self._xx:
            return 0.0, self._y / self._x
        slope = (self._xy - self._x * self._y / self._count) / variance
        slope = min(max(slope, 0.0), self._y / self._x)
        return (self._y - slope * self._x) / self._count, slope


class Costs:
    """Of bringing back what left the pool, and of computing."""

    def __init__(self) -> None:
        self.step = StepTime()
        self.copy = Rate(GUESS_COPY_S)
        """Bytes of adapters from host memory into the pool."""
        self.read = Rate(GUESS_READ_S)
        """Bytes of adapters from the store into host memory, formatted."""

    def block_s(self, block_tokens: int, budget: int) -> float:
        """To compute one block of a prefix again, in iterations filled to their budget."""
        return max(self.step.seconds(budget) * block_tokens / budget, 1e-9)

    def adapter_s(self, size_bytes: int, at_hand: bool) -> float:
        """To bring an adapter back into the pool, from host memory if it is `at_hand` there."""
        seconds = self.copy.seconds(size_bytes)
        return seconds if at_hand else seconds + self.read.seconds(size_bytes)
