"""Several processes at once on one key."""

import asyncio
import json
import subprocess
import sys
import time
from itertools import accumulate
from typing import Any

import pytest
import redis

from gateway.tenants.limits.bounds import bounds_of
from gateway.tenants.limits.counters import LEASE_MS, Answer
from gateway.tenants.limits.shared import SharedCounters
from tests.tenants.limits import hammering
from tests.tenants.limits.stores import NOON, claim_of, client_of

PROCESSES = 4


def start(url: str, name: str, seconds: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.tenants.limits.hammering", url, name, str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def hammered(url: str, name: str, seconds: float = 3.0) -> list[dict[str, Any]]:
    running = [start(url, name, seconds) for _ in range(PROCESSES)]
    lines = [one.communicate(timeout=120)[0].splitlines() for one in running]
    return [json.loads(line[-1]) for line in lines]


def test_f2_f3_requests_of_all_processes_together_come_to_the_limit(redis_url: str):
    found = hammered(redis_url, "requests")
    passed, lost = (sum(one[name] for one in found) for name in ("passed", "lost"))
    assert hammering.REQUESTS - 1 - lost <= passed <= hammering.REQUESTS


def test_f2_f3_tokens_of_all_processes_together_come_to_the_limit(redis_url: str):
    found = hammered(redis_url, "tokens")
    tokens, lost = (sum(one[name] for one in found) for name in ("tokens", "lost"))
    request = hammering.PROMPT + hammering.OUTPUT
    assert hammering.TOKENS - request * (1 + lost) < tokens <= hammering.TOKENS


def test_f5_running_requests_of_all_processes_together_come_to_the_limit(redis_url: str):
    spans = [span for one in hammered(redis_url, "concurrency") for span in one["spans"]]
    changes = sorted([(begun, 1) for begun, _ in spans] + [(ended, -1) for _, ended in spans])
    at_once = list(accumulate(change for _, change in changes))
    assert hammering.RUNNING - 1 <= max(at_once) <= hammering.RUNNING
    assert len(spans) > 10 * hammering.RUNNING, "places are taken again"
    with redis.Redis.from_url(redis_url) as client:
        (bound,) = bounds_of(hammering.WHO["concurrency"], NOON).running
        assert client.zcard(bound.name) == 0


async def test_f5_a_killed_process_leaves_nothing_that_does_not_lapse(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
):
    process = await asyncio.to_thread(start, redis_url, "crash", 60.0)
    who = hammering.WHO["crash"]
    (places,) = bounds_of(who, NOON).running
    client = client_of(redis_url)
    try:
        until = time.monotonic() + 30
        while await client.zcard(places.name) < hammering.RUNNING:
            assert time.monotonic() < until
            await asyncio.sleep(0.05)
        process.kill()
        await asyncio.to_thread(process.wait)
        counters = SharedCounters(client)
        assert (await counters.admit(claim_of(who, "a"))).answer is Answer.NO_PLACE
        lives = [await client.pttl(key) async for key in client.scan_iter("*")]
        assert all(0 < ms <= LEASE_MS + 15_000 for ms in lives), "each key goes by itself"
        assert len(lives) == 2 + hammering.RUNNING
        # the time of the leases passes
        with redis.Redis.from_url(redis_url) as plain:
            names: Any = plain.zrange(places.name, 0, -1)
            for request in names:
                plain.zincrby(places.name, -LEASE_MS, request)
        assert (await counters.admit(claim_of(who, "a"))).answer is Answer.ADMITTED
        assert await client.zcard(places.name) == 1
        await counters.close()
    finally:
        process.kill()
        await client.aclose()
