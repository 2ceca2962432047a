"""The stub as a worker behind the gateway's own border.

Like the engine, it has iterations: streams of one pace get their tokens at the same moments, in one
message. Says that it is SmolLM2-135M; the settings' model need only hold its tokenizer.
"""

import heapq
import sys
import time
from pathlib import Path

import msgspec

from benchmarks.overhead.script import WORD, Script, read
from gateway.engine.border import WorkerEnd
from gateway.engine.messages import (
    Cancel,
    Command,
    EngineSettings,
    Event,
    Events,
    Finished,
    GetStats,
    Ready,
    Shutdown,
    Stats,
    Submit,
    Tokens,
)
from gateway.engine.tokenizer import Tokenizer
from tests.fakes import model_info

STATS = Stats.__struct_fields__
IDLE_S = 1.0
FINE_S = 0.0002
"""The socket's clock counts milliseconds; shorter waits are slept, and the socket asked between."""


class Running:
    """One request: what was asked, and how much of it was answered."""

    def __init__(self, request: Submit, asked_at: float) -> None:
        self.name, self.prompt_tokens = request.request_id, len(request.prompt)
        self._script: Script = read(request.max_tokens, request.sampling.seed or 0)
        self._left = self._script.tokens
        self.due = asked_at + self._script.first_s

    def step(self, word: int) -> list[Event]:
        """The events of the moment that was due."""
        pace = self._script.pace_s
        count = 1 if pace else self._left
        self._left -= count
        events: list[Event] = [Tokens(self.name, [word] * count)]
        if self._left:
            self.due = (self.due // pace + 1) * pace  # when all of this pace are due
        else:
            tokens = self._script.tokens
            events.append(Finished(self.name, "length", self.prompt_tokens, tokens))
        return events

    @property
    def ended(self) -> bool:
        return not self._left


class Requests:
    def __init__(self, word: int) -> None:
        self._word = word
        self._running: dict[str, Running] = {}
        self._due: list[tuple[float, str]] = []

    @property
    def next_due(self) -> float | None:
        return self._due[0][0] if self._due else None

    def add(self, request: Submit, now: float) -> None:
        running = self._running[request.request_id] = Running(request, now)
        heapq.heappush(self._due, (running.due, running.name))

    def cancel(self, name: str) -> None:
        self._running.pop(name, None)

    def step(self, now: float) -> list[Event]:
        """All that is due by now."""
        events: list[Event] = []
        while self._due and self._due[0][0] <= now:
            _, name = heapq.heappop(self._due)
            running = self._running.get(name)
            if running is None:
                continue
            events += running.step(self._word)
            if running.ended:
                del self._running[name]
            else:
                heapq.heappush(self._due, (running.due, name))
        return events


def main() -> None:
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineSettings)
    (word,) = Tokenizer.load(Path(settings.model)).encode(WORD)
    with WorkerEnd(sys.argv[1]) as border:
        border.send(Events([Ready(model_info(settings.model, name=settings.name))]))
        _serve(border, Requests(word))


def _serve(border: WorkerEnd, requests: Requests) -> None:
    while True:
        for command in _receive(border, requests.next_due):
            match command:
                case Submit():
                    requests.add(command, time.perf_counter())
                case Cancel(name):
                    requests.cancel(name)
                case GetStats(query_id):
                    border.send(Events([Stats(query_id, *[0] * (len(STATS) - 1))]))
                case Shutdown():
                    return
        if events := requests.step(time.perf_counter()):
            border.send(Events(events))


def _receive(border: WorkerEnd, due: float | None) -> list[Command]:
    wait_s = IDLE_S if due is None else max(0.0, due - time.perf_counter())
    if wait_s >= 0.001 or wait_s == 0.0:
        return border.receive(wait_s)
    time.sleep(min(wait_s, FINE_S))
    return border.receive(0.0)


if __name__ == "__main__":
    main()
