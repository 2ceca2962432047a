"""Requests into an engine in this process, and what became of each, by the clock."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from gateway.engine.engine import Engine
from gateway.engine.messages import Failed, Finished, Submit, Tokens


@dataclass
class Answer:
    submitted_s: float
    """On the clock of `time.perf_counter`, as are the others."""
    ids: list[int] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    """When each token came."""
    ended_s: float | None = None
    failed: Failed | None = None

    @property
    def first_token_s(self) -> float:
        """Seconds from the arrival; infinity if there was none."""
        return self.token_s[0] - self.submitted_s if self.token_s else float("inf")

    @property
    def between_s(self) -> list[float]:
        """Seconds between its tokens."""
        return [
            later - earlier for earlier, later in zip(self.token_s, self.token_s[1:], strict=False)
        ]


class Drive:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.answers: dict[str, Answer] = {}
        self._open = 0

    def submit(self, request: Submit) -> None:
        self.answers[request.request_id] = Answer(time.perf_counter())
        self._open += 1
        self._take(self.engine.submit(request))

    def step(self) -> None:
        """One iteration; or, if all wait for adapters, a moment."""
        if self.engine.busy:
            self._take(self.engine.step())
        else:
            time.sleep(0.0005)

    def closed(self, requests: Iterable[Submit], outstanding: int) -> float:
        """Keep so many requests in flight until all are answered. Returns seconds."""
        started = time.perf_counter()
        waiting = iter(requests)
        while self._fill(waiting, outstanding) or self._open:
            self.step()
        return time.perf_counter() - started

    def open(self, arrivals: Iterable[tuple[float, Submit]]) -> None:
        """Submit each at its time, in seconds from now, whatever has become of those before."""
        started = time.perf_counter()
        for due_s, request in arrivals:
            while time.perf_counter() - started < due_s:
                self.step()
            self.submit(request)

    def finish(self) -> None:
        while self._open:
            self.step()

    @property
    def tokens(self) -> int:
        return sum(len(answer.token_s) for answer in self.answers.values())

    def _fill(self, waiting: Iterator[Submit], outstanding: int) -> bool:
        """True while there may be more to come."""
        while self._open < outstanding:
            request = next(waiting, None)
            if request is None:
                return False
            self.submit(request)
        return True

    def _take(self, events: Iterable[object]) -> None:
        now = time.perf_counter()
        for event in events:
            match event:
                case Tokens(request_id=name, ids=ids):
                    self.answers[name].ids += ids
                    self.answers[name].token_s += [now] * len(ids)
                case Finished(request_id=name):
                    self._end(name, now, None)
                case Failed(request_id=name):
                    self._end(name, now, event)

    def _end(self, name: str, now: float, failed: Failed | None) -> None:
        self.answers[name].ended_s = now
        self.answers[name].failed = failed
        self._open -= 1
