"""The load generator on our own server with the real model, held against what the server says."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import httpx

from gateway.bench.plan import Limit, Plan
from gateway.bench.redaction import hiding
from gateway.bench.runner import Result, measure
from gateway.bench.shape import Range
from gateway.bench.targets import Target
from gateway.bench.workload import Request, requests
from tests.bench.scripted import shape
from tests.test_end_to_end import BASE, System, running


def plan(url: str, **changes: Any) -> Plan:
    values: dict[str, Any] = {
        "url": f"{url}/v1",
        "shape": shape(
            prompt_tokens=Range(20, 40),
            output_tokens=Range(4, 12),
            alpha=0.0,
            extra={"ignore_eos": True, "temperature": 0},
        ),
        "concurrency": 4,
        "rate": None,
        "cv": 1.0,
        "limit": Limit(12, None),
        "warmup": 1,
        "seed": 11,
        "timeout_s": 60.0,
        "slo_ttft_s": 30.0,
        "slo_inter_token_s": 5.0,
        "pids": (),
    }
    return Plan(**values | changes)


async def test_tokens_are_counted_as_the_server_counts_them(
    tmp_path: Path, base_model: Path, demo_adapters: dict[str, Path]
):
    async with running(tmp_path, base_model) as system:
        await system.upload("acme", "pirate", demo_adapters["pirate"])
        await system.upload("globex", "legal", demo_adapters["legal"])
        targets = [Target(BASE), Target("pirate"), Target("legal", api_key=system.keys["globex"])]
        for load in ({}, {"concurrency": None, "rate": 20.0, "seed": 12}):
            wanted = plan(system.url, **load)
            asked = list(islice(requests(wanted.shape, targets, wanted.seed), 12))
            result = await measure(
                wanted, targets, system.keys["acme"], hiding(system.keys.values()), lambda _: None
            )
            usages = [await usage_of(one, system) for one in asked]
            assert result is not None
            check(result, asked, usages)


async def usage_of(request: Request, system: System) -> tuple[int, int]:
    """Tokens of the prompt and the answer, of the same request without a stream."""
    key = request.target.api_key or system.keys["acme"]
    async with httpx.AsyncClient(timeout=60) as client:
        response = await client.post(
            f"{system.url}/v1/completions",
            headers={"authorization": f"Bearer {key}"},
            json=json.loads(request.body) | {"stream": False},
        )
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    return usage["prompt_tokens"], usage["completion_tokens"]


def check(result: Result, asked: list[Request], usages: list[tuple[int, int]]) -> None:
    timelines, figures = result.run.timelines, result.figures
    assert [one.failure for one in timelines] == [None] * 12
    assert {one.model for one in timelines} == {BASE, "pirate", "legal"}
    assert [(one.prompt_tokens, one.output_tokens) for one in timelines] == usages
    # with ignore_eos, an answer is as long as was asked for
    assert usages == [(one.prompt_tokens, one.output_tokens) for one in asked]
    assert figures.output_tokens == sum(completion for _, completion in usages)
    assert figures.output_tokens_by == "usage"
    assert figures.requests.completed == figures.ttft_s.count == 12
    assert figures.requests.short == 0
    assert figures.slo.attained_both == 1.0
    assert result.usage.own_cores > 0
