"""An engine whose worker is a task: all that runs gets a token at every step, and commands arrive
between steps, as at the real one. It keeps what it has truly produced."""

import asyncio
import random
from contextlib import suppress

from gateway.engine.client import EngineClient
from gateway.engine.messages import (
    Cancel,
    Command,
    Event,
    Finished,
    ModelInfo,
    Ready,
    Submit,
    Tokens,
)


class SteppingEngine(EngineClient):
    """`chance`: decides how long each request takes to begin."""

    def __init__(self, info: ModelInfo, step_s: float, chance: random.Random) -> None:
        super().__init__()
        self._info = info
        self._step_s = step_s
        self._chance = chance
        self._inbox: list[Command] = []
        self._running: dict[str, Submit] = {}
        self._begins: dict[str, int] = {}
        self.produced: dict[str, int] = {}
        self.prompts: dict[str, int] = {}
        """Tokens of the prompts that were computed."""

    async def start(self) -> None:
        self._mailbox.deliver([Ready(self._info)])
        self._task = asyncio.create_task(self._serve())

    async def close(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._mailbox.lose("the engine was closed")

    async def send(self, command: Command) -> None:
        self._inbox.append(command)

    @property
    def in_flight(self) -> int:
        return self._mailbox.in_flight

    async def _serve(self) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            commands, self._inbox = self._inbox, []
            events: list[Event] = []
            for command in commands:
                if isinstance(command, Submit):
                    self._running[command.request_id] = command
                    self._begins[command.request_id] = self._chance.randint(0, 5)
                    self.produced[command.request_id] = self.prompts[command.request_id] = 0
                elif isinstance(command, Cancel) and command.request_id in self._running:
                    events.append(self._end(command.request_id, "cancelled"))
            for name in list(self._running):
                events += self._step(name)
            self._mailbox.deliver(events)

    def _step(self, name: str) -> list[Event]:
        if self._begins[name]:
            self._begins[name] -= 1
            return []
        request = self._running[name]
        self.prompts[name] = len(request.prompt)
        self.produced[name] += 1
        events: list[Event] = [Tokens(name, [65 + self.produced[name] % 26])]
        if self.produced[name] == request.max_tokens:
            events.append(self._end(name, "length"))
        return events

    def _end(self, name: str, reason: str) -> Finished:
        del self._running[name]
        counts = self.prompts[name], self.produced[name]
        return Finished(name, reason, *counts)  # type: ignore[arg-type]  # one of the reasons
