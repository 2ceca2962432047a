"""What only a stream can do wrong: begin too early, end too quietly, outlive its reader."""

import asyncio
import itertools
import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec
import pytest
from litestar.types import Message

from gateway.errors import Overloaded
from gateway.inference import stream
from gateway.inference.stream import DONE, KEEP_ALIVE, EventStream, Frames
from tests.fakes import Script, says
from tests.inference.conftest import BASE, Api, frames_of
from tests.live import Live, error_of


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> float:
    """How long it took."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() < begun + seconds
        time.sleep(0.002)
    return time.monotonic() - begun


def test_a_stream_has_openais_frames(api: Api) -> None:
    api.engine.script = lambda _: says("one two", per_step=4)
    response = api.chat(stream=True)
    assert response.status_code == 200
    frames = frames_of(response.text)
    assert {frame["id"] for frame in frames} == {api.submitted().request_id}
    assert {frame["object"] for frame in frames} == {"chat.completion.chunk"}
    assert {frame["model"] for frame in frames} == {BASE}
    assert {frame["system_fingerprint"] for frame in frames} == {"fp_ba5eba5eba5e"}
    assert len({frame["created"] for frame in frames}) == 1
    assert [frame["choices"] for frame in frames] == [
        [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]
        for delta, reason in [
            ({"role": "assistant", "content": "", "refusal": None}, None),
            ({"content": "one "}, None),
            ({"content": "two"}, None),
            ({}, "stop"),
        ]
    ]
    assert not any("usage" in frame for frame in frames)


def test_20_headers_keep_proxies_from_holding_a_stream_back(api: Api) -> None:
    headers = api.chat(stream=True).headers
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert "content-length" not in headers
    assert headers["x-request-id"]


def test_11_usage_comes_last_if_asked_for(api: Api) -> None:
    *frames, last = frames_of(
        api.chat(stream=True, stream_options={"include_usage": True}, max_tokens=3).text
    )
    assert all(frame["usage"] is None for frame in frames)
    assert frames[-1]["choices"][0]["finish_reason"] == "length"
    assert last["choices"] == []
    prompt = len(api.submitted().prompt)
    assert last["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 3,
        "total_tokens": prompt + 3,
    }


def test_each_iteration_is_sent_as_it_is_made(api: Api) -> None:
    api.engine.script = lambda _: says("abcd", per_step=1, delay_s=0.1)
    times = []
    with api.client.stream("POST", "/v1/chat/completions", json=body()) as response:
        for line in response.iter_lines():
            if '"content":' in line:
                times.append(time.monotonic())
    gaps = [after - before for before, after in itertools.pairwise(times[1:])]
    assert len(gaps) == 3
    assert all(gap > 0.05 for gap in gaps)


def body(**changes: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hi"}]
    return {"model": BASE, "messages": messages, "stream": True} | changes


@pytest.mark.parametrize("hold_s", [0.1, 30.0])
def test_19_the_status_line_waits_for_the_first_token_but_not_for_ever(
    api: Api, monkeypatch: pytest.MonkeyPatch, hold_s: float
) -> None:
    monkeypatch.setattr(stream, "HOLD_S", hold_s)
    api.engine.script = lambda _: Script(first_delay_s=0.5, failure=("overloaded", "full"))
    response = api.chat(stream=True)
    if hold_s > 1:
        assert error_of(response, 503)["code"] == "overloaded"
    else:
        assert response.status_code == 200
        assert response.text.startswith(KEEP_ALIVE.decode())
        assert frames_of(response.text)[-1]["error"]["code"] == "overloaded"


def test_a_comment_breaks_long_silences(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "KEEP_ALIVE_S", 0.1)
    api.engine.script = lambda _: Script([[65], [66]], delay_s=0.55)
    text = api.chat(stream=True).text
    assert 4 <= text.count(KEEP_ALIVE.decode()) <= 6
    assert text.index('"content":"A"') < text.index(KEEP_ALIVE.decode())
    frames_of(text)


@pytest.fixture
def slow(api: Api) -> Iterator[Api]:
    api.engine.script = lambda _: Script([[65]] * 1000, delay_s=0.01)
    yield api
    wait_until(lambda: not api.engine.running)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("streaming", [True, False])
def test_10_22_a_client_that_leaves_cancels_its_work_at_once(
    slow: Api, path: str, streaming: bool
) -> None:
    request = body(stream=streaming, max_tokens=1000)
    if path.endswith("/completions") and "chat" not in path:
        request["prompt"] = request.pop("messages")[0]["content"]
    connection = send(slow, path, request)
    wait_until(lambda: len(slow.engine.running) == 1)
    if streaming:
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    connection.close()
    assert wait_until(lambda: slow.engine.cancels != []) < 0.5
    assert slow.engine.cancels == [slow.submitted().request_id]
    assert slow.engine.running == set()


def test_a_client_that_leaves_while_its_request_waits_cancels_it(api: Api) -> None:
    api.engine.script = lambda _: Script(hang=True)
    for streaming in (True, False):
        connection = send(api, "/v1/chat/completions", body(stream=streaming))
        wait_until(lambda: len(api.engine.running) == 1)
        connection.close()
        wait_until(lambda: api.engine.running == set())
    assert len(api.engine.cancels) == 2


def send(api: Api, path: str, request: dict[str, Any]) -> socket.socket:
    """A request on a connection of its own."""
    url = httpx.URL(api.live.url)
    content = json.dumps(request)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
    connection.settimeout(10)
    connection.connect((url.host, url.port or 80))
    connection.sendall(
        f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: {api.client.headers['authorization']}"
        f"\r\nContent-Length: {len(content)}\r\n\r\n{content}".encode()
    )
    return connection


def test_a_client_that_takes_nothing_is_given_up_and_slows_nobody(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "STALL_S", 0.5)
    monkeypatch.setattr(stream, "KEEP_ALIVE_S", 0.1)
    before = api.engine.model
    api.engine.model = msgspec.structs.replace(before, context_tokens=10**9)
    flood = Script([[97] * 4096] * 10_000)
    api.engine.script = lambda submit: flood if submit.max_tokens > 1000 else says("quick")
    connection = send(api, "/v1/chat/completions", body())
    wait_until(lambda: len(api.engine.running) == 1)
    for _ in range(5):
        begun = time.monotonic()
        assert api.chat(max_tokens=5).json()["choices"][0]["message"]["content"] == "quick"
        assert time.monotonic() - begun < 1.0
    wait_until(lambda: api.engine.running == set())
    assert api.engine.cancels == [api.engine.submits[0].request_id]
    connection.close()
    api.engine.model = before


async def played(
    frames: Frames, receive: Callable[[], Any] | None = None, cancel_after_s: float | None = None
) -> list[Message]:
    """What a response of these frames sends, without a server."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def forever() -> Any:
        await asyncio.Event().wait()

    response = EventStream(frames)
    task = asyncio.ensure_future(response({}, receive or forever, send))  # type: ignore[arg-type]
    if cancel_after_s is not None:
        await asyncio.sleep(cancel_after_s)
        task.cancel()
    await asyncio.gather(task, return_exceptions=cancel_after_s is not None)
    return sent


def bodies(sent: list[Message]) -> bytes:
    return b"".join(m["body"] for m in sent if m["type"] == "http.response.body")


async def test_23_a_stream_that_the_server_cuts_says_so() -> None:
    async def frames() -> Frames:
        yield b"data: 1\n\n"
        await asyncio.Event().wait()

    sent = await played(frames(), cancel_after_s=0.05)
    text = bodies(sent)
    assert text.startswith(b"data: 1\n\n")
    assert b'"code":"server_stopped"' in text
    assert text.endswith(DONE)
    assert sent[-1]["type"] == "http.response.body"
    assert sent[-1]["more_body"] is False


async def test_a_stream_that_was_cut_before_it_began_sends_nothing() -> None:
    async def frames() -> Frames:
        await asyncio.Event().wait()
        yield b""

    assert await played(frames(), cancel_after_s=0.05) == []


async def test_frames_are_closed_whatever_happens() -> None:
    closed = []

    async def frames(error: Exception | None) -> Frames:
        try:
            yield b"data: 1\n\n"
            if error is not None:
                raise error
            await asyncio.Event().wait()
        finally:
            closed.append(error)

    async def gone() -> Any:
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    await played(frames(None), receive=gone)
    await played(frames(None), cancel_after_s=0.05)
    failed = await played(frames(Overloaded("full")))
    assert len(closed) == 3
    assert b'"code":"overloaded"' in bodies(failed)
    assert bodies(failed).endswith(DONE)


def test_64_streams_at_once_over_several_adapters_complete(api: Api, running: Live) -> None:
    digests = {}
    for name in ("one", "two"):
        digests[name] = api.upload(name)["digest"][:8]
    digests[BASE] = ""
    api.engine.script = lambda submit: says(
        f"I am {submit.adapter.digest[:8] if submit.adapter else ''}" * 20, per_step=3
    )

    def ask(number: int) -> bool:
        model = list(digests)[number % 3]
        frames = frames_of(api.chat(model=model, stream=True).text)
        text = "".join(frame["choices"][0]["delta"].get("content", "") for frame in frames)
        return text == f"I am {digests[model]}" * 20

    with ThreadPoolExecutor(64) as threads:
        assert all(threads.map(ask, range(64)))
    assert api.engine.running == set()
    assert api.engine.cancels == []
    for name in ("one", "two"):
        api.client.delete(f"/v1/adapters/{name}")


def test_r7_a_version_that_is_deleted_while_it_streams_goes_afterwards(api: Api) -> None:
    digest = api.upload("pirate")["digest"]
    api.engine.script = lambda _: says("to the end", per_step=1, delay_s=0.05)
    url = "/v1/chat/completions"
    with api.client.stream("POST", url, json=body(model="pirate")) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        assert api.live.client().delete("/v1/adapters/pirate").status_code == 200
        assert api.engine.unloads == []
        rest = "".join(lines)
    assert "[DONE]" in rest
    assert "error" not in rest
    wait_until(lambda: api.engine.unloads == [digest])
    folder = api.live.settings.data_dir / "adapters" / digest[:2]
    wait_until(lambda: not list(folder.iterdir()))
