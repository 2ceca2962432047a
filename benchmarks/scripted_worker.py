"""A worker that computes nothing: each running request gets its next token at every step.

A step takes 2.5 ms and 2.5 ms more for each request, so one stream has 200 tokens a second and 32
have 12 each. Says that it is SmolLM2-135M; the settings' model need only hold its tokenizer.
"""

import sys
import time
from itertools import cycle, islice
from pathlib import Path

import msgspec

from gateway.engine.border import WorkerEnd
from gateway.engine.messages import (
    Cancel,
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

STEP_S = 0.0025
STATS = Stats.__struct_fields__
TEXT = (
    "The tide comes in twice a day, and twice a day it leaves: “pools, weed, a few shells”. "
    "Who walks out far should know when it turns – the café at the pier has a table of it. 🌊\n"
)
"""What every answer says, again and again; some of its characters are several tokens."""


Running = dict[str, tuple[Submit, list[int]]]
"""By request id: what was asked, and the tokens that are left to say."""


def main() -> None:
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineSettings)
    ids = Tokenizer.load(Path(settings.model)).encode(TEXT)
    with WorkerEnd(sys.argv[1]) as border:
        border.send(Events([Ready(model_info(settings.model, name=settings.name))]))
        _serve(border, ids)


def _serve(border: WorkerEnd, ids: list[int]) -> None:
    running: Running = {}
    due = time.perf_counter()
    while True:
        # the socket's clock counts milliseconds
        left_s = due - time.perf_counter() if running else 1.0
        for command in border.receive(max(0.001, left_s) if left_s > 0 else 0.0):
            match command:
                case Submit(request_id=name, max_tokens=count):
                    running[name] = command, list(islice(cycle(ids), count))
                case Cancel(name):
                    border.send(Events(_cancelled(running, name)))
                case GetStats(query_id):
                    border.send(Events([Stats(query_id, *[0] * (len(STATS) - 1))]))
                case Shutdown():
                    return
        if running and time.perf_counter() >= due:
            due = time.perf_counter() + STEP_S * (1 + len(running))
            border.send(Events(_step(running)))


def _cancelled(running: Running, name: str) -> list[Event]:
    if name not in running:
        return []
    request, left = running.pop(name)
    produced = request.max_tokens - len(left)
    prompt = len(request.prompt) if produced else 0
    return [Finished(name, "cancelled", prompt, produced)]


def _step(running: Running) -> list[Event]:
    events: list[Event] = []
    for name, (request, left) in list(running.items()):
        events.append(Tokens(name, [left.pop(0)]))
        if not left:
            events.append(Finished(name, "length", len(request.prompt), request.max_tokens))
            del running[name]
    return events


if __name__ == "__main__":
    main()
