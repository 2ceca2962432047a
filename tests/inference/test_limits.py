"""Limits as clients see them: headers, refusals, answers that end early, places given back."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest

from gateway.engine.messages import Submit
from gateway.tenants.auth import Authenticator
from gateway.tenants.limits.rules import BudgetRule, Limits
from tests.fakes import Script, says
from tests.inference.conftest import BASE, Api, frames_of
from tests.inference.test_stream import wait_until
from tests.live import error_of

RATE_HEADERS = {
    f"x-ratelimit-{what}-{kind}"
    for what in ("limit", "remaining", "reset")
    for kind in ("requests", "tokens")
}


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch, api: Api) -> Iterator[Callable[..., httpx.Client]]:
    """A client of a tenant of its own, with these limits."""
    changes: dict[str, Any] = {}
    known = Authenticator.authenticate
    given: dict[str, Any] = {}

    async def authenticate(self: Authenticator, *args: Any, **more: Any) -> Any:
        principal = await known(self, *args, **more)
        changed = changes.get(principal.tenant_slug)
        if changed is None:
            return principal
        if principal.key_id not in given:
            given[principal.key_id] = msgspec.structs.replace(principal, **changed)
        return given[principal.key_id]

    monkeypatch.setattr(Authenticator, "authenticate", authenticate)
    clients = []

    def make(budgets: tuple[BudgetRule, ...] = (), **limits: int) -> httpx.Client:
        slug = f"limited-{time.monotonic_ns()}"
        changes[slug] = {"tenant_limits": Limits(**limits), "budgets": budgets}
        clients.append(api.live.client(slug))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def of(response: httpx.Response) -> set[str]:
    return {name for name in response.headers if name.startswith("x-ratelimit")}


@pytest.mark.parametrize("stream", [False, True])
def test_answers_tell_what_is_left(api: Api, limited: Any, stream: bool):
    client = limited(requests_per_minute=9, tokens_per_minute=5_000)
    headers = api.chat(client, stream=stream, max_tokens=5).headers
    prompt = len(api.submitted().prompt)
    assert {name: headers[name] for name in RATE_HEADERS if "reset" not in name} == {
        "x-ratelimit-limit-requests": "9",
        "x-ratelimit-remaining-requests": "8",
        "x-ratelimit-limit-tokens": "5000",
        "x-ratelimit-remaining-tokens": str(5_000 - prompt - 5),
    }
    assert headers["x-ratelimit-reset-requests"].startswith("1m")


def test_a_tenant_without_limits_gets_no_such_header(api: Api, limited: Any):
    assert of(api.chat(limited())) == set()
    assert of(api.chat(limited(concurrent_requests=5))) == set()
    assert of(api.chat(limited(requests_per_minute=5))) == {
        name for name in RATE_HEADERS if name.endswith("requests")
    }


@pytest.mark.parametrize("stream", [False, True])
def test_f17_f18_a_full_limit_is_429_with_the_time_to_wait(api: Api, limited: Any, stream: bool):
    client = limited(requests_per_minute=1)
    assert api.chat(client).status_code == 200
    response = api.chat(client, stream=stream)
    error = error_of(response, 429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert 55 <= int(response.headers["retry-after"]) <= 65
    assert response.headers["x-ratelimit-remaining-requests"] == "0"


def test_f17_a_spent_budget_is_429_that_nobody_retries(api: Api, limited: Any):
    client = limited(budgets=(BudgetRule("b", "tenant:unused", "day", 0, True),))
    response = api.chat(client)
    error = error_of(response, 429)
    assert (error["type"], error["code"]) == ("insufficient_quota", "insufficient_quota")
    assert response.headers["x-should-retry"] == "false"
    assert "retry-after" not in response.headers


def test_a_request_above_its_own_limit_names_the_parameter(api: Api, limited: Any):
    client = limited(request_tokens_max=60)
    error = error_of(api.chat(client, max_tokens=60), 400)
    assert (error["param"], error["code"]) == ("messages", "request_tokens_exceeded")
    assert "60 tokens per request" in error["message"]
    long = [{"role": "user", "content": "x" * 70}]
    assert "Make it shorter" in error_of(api.chat(client, messages=long), 400)["message"]
    api.engine.submits.clear()
    assert api.chat(client).status_code == 200
    submit = api.submitted()
    assert len(submit.prompt) + submit.max_tokens == 60


def test_f12_an_answer_ends_where_the_limit_does_and_the_engine_stops(api: Api, limited: Any):
    text = "x" * 400
    api.engine.script = lambda _: says(text, per_step=7)
    client = limited(tokens_per_minute=300)
    answer = api.chat(client, max_tokens=400).json()
    submit = api.submitted()
    left = 300 - len(submit.prompt)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["message"]["content"] == text[:left]
    assert answer["usage"]["completion_tokens"] == left
    assert api.engine.cancels == [submit.request_id]


def test_f12_a_stream_ends_so_too(api: Api, limited: Any):
    api.engine.script = lambda _: says("x" * 400, per_step=1)
    frames = frames_of(api.chat(limited(tokens_per_minute=300), stream=True, max_tokens=400).text)
    assert frames[-1]["choices"][0]["finish_reason"] == "length"
    assert len(frames) - 2 == 300 - len(api.submitted().prompt)


def test_f12_an_answer_that_ends_by_itself_at_the_limit_says_so(api: Api, limited: Any):
    api.chat(limited(), max_tokens=1)
    prompt = len(api.submitted().prompt)
    api.engine.reset()
    api.engine.script = lambda _: says("x" * 100, per_step=1)
    client = limited(tokens_per_minute=prompt + 100)
    choice = api.chat(client, max_tokens=400).json()["choices"][0]
    assert (choice["finish_reason"], len(choice["message"]["content"])) == ("stop", 100)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "status", "left"),
    [
        (says("four"), 200, 8),
        (Script(failure=("overloaded", "full")), 503, 10),
        (Script(failure=("late", "too late")), 503, 10),
        (Script(failure=("internal", "?")), 500, 10),
        (Script(failure=("not_finite", "nan")), 422, 9),
    ],
)
def test_f5_each_end_gives_back_what_was_not_used(
    api: Api, limited: Any, script: Script, status: int, left: int, stream: bool
):
    client = limited(requests_per_minute=10, tokens_per_minute=5_000, concurrent_requests=1)
    api.engine.script = lambda _: script
    assert api.chat(client, stream=stream).status_code == status
    prompt = len(api.submitted().prompt)
    api.engine.script = lambda _: says("")
    headers = api.chat(client, max_tokens=1).headers  # the one place is free
    used = prompt + 4 if status == 200 else 0
    assert headers["x-ratelimit-remaining-tokens"] == str(5_000 - used - prompt - 1)
    assert headers["x-ratelimit-remaining-requests"] == str(left if status == 200 else left - 1)


@pytest.mark.parametrize("stream", [False, True])
def test_f5_f8_a_client_that_leaves_frees_its_place_and_pays_for_what_was_made(
    api: Api, limited: Any, stream: bool
):
    def script(submit: Submit) -> Script:
        return says("abcd", per_step=1, hang=True)

    api.engine.script = script
    client = limited(tokens_per_minute=5_000, concurrent_requests=1)
    body = {"model": BASE, "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    request = client.build_request("POST", "/v1/chat/completions", json=body)
    raw = b"POST /v1/chat/completions HTTP/1.1\r\n" + b"".join(
        name + b": " + value + b"\r\n" for name, value in request.headers.raw
    )
    with socket.create_connection(("127.0.0.1", client.base_url.port or 80)) as connection:
        connection.sendall(raw + b"\r\n" + request.content)
        wait_until(lambda: bool(api.engine.submits))
        error_of(api.chat(client), 429)
        threading.Event().wait(0.2)
    wait_until(lambda: bool(api.engine.cancels))
    prompt = len(api.engine.submits[0].prompt)
    api.engine.script = lambda _: says("")
    threading.Event().wait(0.1)
    headers = api.chat(client, max_tokens=1).headers
    assert headers["x-ratelimit-remaining-tokens"] == str(5_000 - (prompt + 4) - (prompt + 1))


def test_f8_a_stop_string_pays_for_what_was_made(api: Api, limited: Any):
    api.engine.script = lambda _: says("one two three", per_step=1)
    client = limited(tokens_per_minute=5_000)
    api.chat(client, stop="two")
    prompt = len(api.submitted().prompt)
    headers = api.chat(client, max_tokens=1).headers
    assert headers["x-ratelimit-remaining-tokens"] == str(5_000 - (prompt + 7) - (prompt + 1))
