"""One of several gateway processes of which each asks for more than all may have together:
`python -m tests.tenants.limits.hammering URL KIND SECONDS`, for the tests beside it."""

import asyncio
import json
import sys
import threading
import time
from itertools import count

from gateway.errors import RateLimited
from gateway.tenants.keys import Principal
from gateway.tenants.limits.counters import CountersLost
from gateway.tenants.limits.counting import CountingLimiter
from gateway.tenants.limits.limiter import Demand, Used
from gateway.tenants.limits.rules import Limits
from gateway.tenants.limits.shared import SharedCounters
from gateway.tenants.usage.rates import FREE
from tests.tenants.limits.stores import client_of, principal

THREADS = 50
REQUESTS, TOKENS, RUNNING = 137, 1_009, 23
PROMPT, OUTPUT = 3, 5

WHO = {
    "requests": principal(Limits(requests_per_minute=REQUESTS)),
    "tokens": principal(Limits(tokens_per_minute=TOKENS)),
    "concurrency": principal(Limits(concurrent_requests=RUNNING)),
    "crash": principal(Limits(concurrent_requests=RUNNING, tokens_per_minute=10**6)),
}


class Hammer:
    """What one process got."""

    def __init__(self, url: str, name: str, seconds: float) -> None:
        self.who: Principal = WHO[name]
        self.keeps = name == "crash"
        self.loop = asyncio.new_event_loop()
        self.until = time.monotonic() + seconds
        self.numbers = count()
        self.passed = 0
        self.tokens = 0
        self.lost = 0
        """Answers of a Redis that was too busy: what was asked may have been counted."""
        self.spans: list[tuple[float, float]] = []
        self.url = url

    def run(self) -> None:
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.limiter = asyncio.run_coroutine_threadsafe(self._make(), self.loop).result()
        threads = [threading.Thread(target=self._hammer) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    async def _make(self) -> CountingLimiter:
        return CountingLimiter(SharedCounters(client_of(self.url)), _nothing_spent)

    def _hammer(self) -> None:
        while time.monotonic() < self.until:
            asyncio.run_coroutine_threadsafe(self._ask(), self.loop).result()

    async def _ask(self) -> None:
        name = f"{id(self)}-{time.monotonic_ns()}-{next(self.numbers)}"
        try:
            reservation = await self.limiter.reserve(Demand(name, self.who, PROMPT, OUTPUT, FREE))
        except RateLimited:
            await asyncio.sleep(0.005)
            return
        except CountersLost:
            self.lost += 1
            return
        began = time.time()
        self.passed += 1
        produced = min(await reservation.grant(OUTPUT), OUTPUT)
        self.tokens += PROMPT + produced
        if self.keeps:
            await asyncio.Event().wait()
        await asyncio.sleep(0.01)
        self.spans.append((began, time.time()))
        await reservation.settle(Used(PROMPT, produced))


async def _nothing_spent(owner: str, start: object) -> int:
    return 0


if __name__ == "__main__":
    _, url, name, seconds = sys.argv
    hammer = Hammer(url, name, float(seconds))
    print("begun", flush=True)
    hammer.run()
    found = {name: getattr(hammer, name) for name in ("passed", "tokens", "lost", "spans")}
    print(json.dumps(found))
