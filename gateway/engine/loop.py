"""The worker's loop: take commands, run an iteration, send what it had to say."""

import logging
from collections.abc import Callable

from gateway.engine.engine import Engine
from gateway.engine.messages import (
    Cancel,
    Command,
    Event,
    Events,
    Failed,
    GetPlaces,
    GetStats,
    Pin,
    Places,
    Shutdown,
    Submit,
    Unload,
    Unpin,
)

log = logging.getLogger(__name__)

IDLE_S = 1.0
"""How often an engine that has nothing to compute looks for requests whose time is up."""


def serve(
    engine: Engine, receive: Callable[[float], list[Command]], send: Callable[[Events], None]
) -> None:
    """Serve until `Shutdown`. `receive(wait_s)` gives the commands that have come; if there are
    none it waits until there is one, the engine's `wake` was called, or `wait_s` went by."""
    while True:
        events: list[Event] = []
        for command in receive(0.0 if engine.busy else IDLE_S):
            if isinstance(command, Shutdown):
                return
            events += _obey(engine, command)
        events += engine.step()
        if events:
            send(Events(events))


def _obey(engine: Engine, command: Command) -> list[Event]:
    match command:
        case Submit():
            try:
                return engine.submit(command)
            except AssertionError:  # a request that the client should not have let through
                log.exception("request %s refused", command.request_id)
                return [Failed(command.request_id, "internal", "the engine refused the request")]
        case Cancel():
            return engine.scheduler.cancel(command.request_id)
        case Unload():
            engine.unload(command.digest)
        case Pin():
            engine.pager.pin(command.digest)
        case Unpin():
            engine.pager.unpin(command.digest)
        case GetStats():
            return [engine.stats(command.query_id)]
        case GetPlaces(query_id, digests):
            return [Places(query_id, {digest: engine.pager.place(digest) for digest in digests})]
        case Shutdown():
            pass
    return []
