"""What becomes of a request, against a server that does what a script says."""

import asyncio
import json
import socket
import time
from contextlib import suppress

import pytest

from gateway.bench.client import Address, AddressError, Client
from gateway.bench.redaction import hiding
from gateway.bench.shape import Endpoint
from gateway.bench.timeline import Timeline
from tests.bench.scripted import (
    DONE,
    Call,
    Script,
    answers,
    delta,
    event,
    request,
    serving,
    text,
    until,
    usage,
)

KEY = "sk-proj-0123456789"


async def ask(
    url: str,
    *,
    endpoint: Endpoint = "completions",
    timeout_s: float = 10.0,
    api_key: str = "",
    timeline: Timeline | None = None,
) -> Timeline:
    client = Client(Address(url, endpoint), KEY, timeout_s, hiding([KEY]))
    timeline = timeline or new_timeline()
    await client.send(request(api_key=api_key), timeline)
    client.close()
    return timeline


def new_timeline() -> Timeline:
    return Timeline("m", prompt_tokens=2, asked_tokens=3, sent_s=time.perf_counter())


async def outcome(script: Script, *, timeout_s: float = 10.0) -> Timeline:
    with serving(script) as server:
        return await ask(server.url, timeout_s=timeout_s)


async def test_a_stream_is_timed_from_sending_to_its_end():
    timeline = new_timeline()
    sent: list[float] = []
    seen: list[float] = []

    async def script(call: Call) -> None:
        """Each event after the client has had the one before, with a pause between."""
        await call.begin()
        for _ in range(3):
            await asyncio.sleep(0.05)
            sent.append(time.perf_counter())
            await call.send(text("word"))
            await until(lambda: len(timeline.text_s) == len(sent))
            seen.append(time.perf_counter())
        await call.send(text("", finish_reason="length"))
        await until(lambda: timeline.finished_s is not None)
        await call.send(usage(17, 5), DONE)
        await call.end()

    with serving(script) as server:
        await ask(server.url, timeline=timeline)
    assert timeline.completed
    for before, arrived, after in zip(sent, timeline.text_s, seen, strict=True):
        assert before <= arrived <= after
    assert timeline.finished_s is not None
    assert timeline.ended_s is not None
    assert seen[-1] <= timeline.finished_s <= timeline.ended_s
    assert timeline.ttft_s == timeline.text_s[0] - timeline.sent_s
    assert min(timeline.gaps_s) >= 0.05
    assert (timeline.prompt_tokens, timeline.output_tokens) == (17, 5)


async def test_without_usage_chunks_with_text_are_counted():
    async def script(call: Call) -> None:
        await call.begin()
        await call.send(text("a"), text("b"), text(""), text("", finish_reason="stop"), DONE)
        await call.end()

    timeline = await outcome(script)
    assert timeline.completed
    assert timeline.counted_tokens is None
    assert timeline.output_tokens == 2
    assert timeline.prompt_tokens == 2


async def test_the_role_of_a_chat_is_not_its_first_token():
    async def script(call: Call) -> None:
        await call.begin()
        await call.send(delta(role="assistant", content=""))
        await call.send(delta(reasoning_content="hm"), after_s=0.2)
        await call.send(delta(content="yes"), DONE)
        await call.end()

    with serving(script) as server:
        timeline = await ask(server.url, endpoint="chat")
        assert server.calls[0].head.startswith("POST /v1/chat/completions HTTP/1.1\r\n")
    assert timeline.ttft_s is not None
    assert timeline.ttft_s >= 0.2
    assert timeline.output_tokens == 2


@pytest.mark.parametrize("size", [1, 2, 7, 50])
async def test_it_does_not_matter_how_a_stream_is_cut_into_pieces(size: int):
    stream = b": comment\r\n\r\n" + text("ä").replace(b"\n", b"\r\n") + text("b") + usage(9, 2)

    async def script(call: Call) -> None:
        await call.begin()
        whole = stream + DONE.replace(b"\n", b"\r\n")
        await call.send(*[whole[start : start + size] for start in range(0, len(whole), size)])
        await call.end()

    timeline = await outcome(script)
    assert timeline.completed
    assert (len(timeline.text_s), timeline.output_tokens, timeline.prompt_tokens) == (2, 2, 9)


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_server_refuses(status: int):
    async def script(call: Call) -> None:
        await call.refuse(status, json.dumps({"error": {"message": "come back later"}}).encode())

    failure = (await outcome(script)).failure
    assert failure == ("refused", f"{status}: come back later")


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (400, b'{"error": {"message": "no such model", "type": "x"}}', "400: no such model"),
        (401, b'{"error": "bad key"}', "401: bad key"),
        (404, b'{"detail": "Not Found"}', "404: Not Found"),
        (422, b'{"detail": [{"msg": "ids"}]}', '422: {"detail": [{"msg": "ids"}]}'),
        (500, b"<html>\n oh</html>", "500: <html> oh</html>"),
        (502, b"", "502: "),
        (400, b'{"object": "error", "message": "short"}', "400: short"),
        (400, b"x" * 300_000, "400: " + "x" * 195),
    ],
)
async def test_another_status_is_kept_with_the_servers_words(status: int, body: bytes, words: str):
    async def script(call: Call) -> None:
        await call.refuse(status, body)

    assert (await outcome(script)).failure == (f"http_{status}", words)


async def test_a_key_that_the_server_repeats_is_not_shown():
    ours = "lg_sk_0123456789_secretsecret"

    async def script(call: Call) -> None:
        await call.refuse(401, f"{'x' * 180} {KEY} or {ours}".encode())

    failure = (await outcome(script)).failure
    assert failure is not None
    assert failure.detail.startswith("401: xxx")
    assert "sk-proj" not in failure.detail
    assert "secret" not in failure.detail


async def test_a_stream_that_just_stops_is_cut():
    async def aborted(call: Call) -> None:
        await call.begin()
        await call.send(text("a"))
        await asyncio.sleep(0.05)
        call.cut()

    async def ended_early(call: Call) -> None:
        await call.begin()
        await call.send(text("a"), text("", finish_reason="stop"))
        await call.end()

    for script in (aborted, ended_early):
        timeline = await outcome(script)
        assert timeline.failure is not None
        assert timeline.failure.kind == "cut", timeline.failure
        assert len(timeline.text_s) == 1


@pytest.mark.parametrize(
    "line",
    [
        event({"error": {"message": "engine lost", "code": 500}}),
        event({"error": "engine lost"}),
        event({"object": "error", "message": "engine lost"}),
        b'error: {"code": 500, "message": "engine lost"}\n\n',
    ],
)
async def test_an_error_inside_of_a_stream_is_a_failure(line: bytes):
    async def script(call: Call) -> None:
        await call.begin()
        await call.send(text("a"), line, DONE)
        await call.end()

    assert (await outcome(script)).failure == ("error_event", "engine lost")


async def test_what_is_no_stream_is_a_failure():
    async def whole(call: Call) -> None:
        await call.refuse(200, b'{"choices": [{"text": "all at once"}]}')

    async def garbled(call: Call) -> None:
        await call.begin()
        await call.send(b"data: {nonsense\n\n")

    async def endless_line(call: Call) -> None:
        await call.begin()
        with suppress(ConnectionError):
            for _ in range(64):
                await call.send(b"x" * 2**16)

    async def not_http(call: Call) -> None:
        call.writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")

    for script in (whole, garbled, endless_line):
        failure = (await outcome(script)).failure
        assert failure is not None
        assert failure.kind == "not_a_stream", failure
    failure = (await outcome(not_http)).failure
    assert failure is not None
    assert failure.kind == "connection"
    assert "not HTTP" in failure.detail


async def test_an_answer_that_does_not_end_in_time_is_a_timeout():
    async def script(call: Call) -> None:
        await call.begin()
        await call.send(text("a"))
        await asyncio.sleep(30)

    started = time.perf_counter()
    timeline = await outcome(script, timeout_s=0.3)
    assert time.perf_counter() - started < 5
    assert timeline.failure == ("timeout", "no end after 0.3 s")
    assert timeline.e2e_s is not None
    assert 0.29 < timeline.e2e_s < 5


async def test_nobody_there_is_a_failed_connection():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}/v1"
    failure = (await ask(url)).failure
    assert failure is not None
    assert failure.kind == "connection"
    assert "refused" in failure.detail.lower()


async def test_a_connection_that_breaks_before_the_answer_is_a_failed_connection():
    async def script(call: Call) -> None:
        call.cut()

    failure = (await outcome(script)).failure
    assert failure is not None
    assert failure.kind == "connection"


async def test_a_connection_serves_one_request_after_another():
    with serving(answers) as server:
        client = Client(Address(server.url, "completions"), KEY, 10.0, hiding([KEY]))
        for _ in range(3):
            timeline = new_timeline()
            await client.send(request(), timeline)
            assert timeline.completed
        assert server.connections == 1
        await asyncio.gather(*(client.send(request(), new_timeline()) for _ in range(4)))
        assert server.connections == 4
        client.close()


async def test_a_connection_after_a_failure_or_a_long_idle_time_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch,
):
    async def fails_first(call: Call) -> None:
        if call.body["model"] == "bad":
            await call.refuse(400, b"no")
        else:
            await answers(call)

    with serving(fails_first) as server:
        client = Client(Address(server.url, "completions"), KEY, 10.0, hiding([KEY]))
        await client.send(request("bad"), new_timeline())
        await client.send(request(), new_timeline())
        assert server.connections == 2
        monkeypatch.setattr("gateway.bench.client.IDLE_S_MAX", 0.05)
        await asyncio.sleep(0.1)
        await client.send(request(), new_timeline())
        assert server.connections == 3
        client.close()


async def test_a_server_that_closes_after_each_stream_without_saying_so_fails_nothing():
    async def answers_and_closes(call: Call) -> None:
        await answers(call)
        await call.writer.drain()
        call.writer.close()

    with serving(answers_and_closes) as server:
        client = Client(Address(server.url, "completions"), KEY, 10.0, hiding([KEY]))
        for number in range(1, 6):
            timeline = new_timeline()
            await client.send(request(), timeline)
            assert timeline.completed
            assert (timeline.output_tokens, len(timeline.text_s)) == (3, 3)
            assert server.connections == number
        client.close()


async def test_a_connection_that_breaks_twice_is_a_failed_connection():
    async def answers_once(call: Call) -> None:
        if len(server.calls) == 1:
            await answers(call)
        else:
            call.cut()

    with serving(answers_once) as server:
        client = Client(Address(server.url, "completions"), KEY, 10.0, hiding([KEY]))
        await client.send(request(), new_timeline())
        timeline = new_timeline()
        await client.send(request(), timeline)
        assert timeline.failure is not None
        assert timeline.failure.kind == "connection"
        assert len(server.calls) == 3
        client.close()


async def test_a_connection_that_one_client_gives_up_is_not_in_the_hands_of_another():
    async def refuses(call: Call) -> None:
        await call.refuse(400, b"no")

    with serving(refuses) as server:
        client = Client(Address(server.url, "completions"), KEY, 5.0, hiding([KEY]))

        async def turns() -> list[Timeline]:
            timelines = [new_timeline() for _ in range(25)]
            for timeline in timelines:
                await client.send(request(), timeline)
            return timelines

        everyone = await asyncio.gather(*(turns() for _ in range(8)))
        client.close()
    assert {one.failure for each in everyone for one in each} == {("http_400", "400: no")}


@pytest.mark.parametrize(("later_s", "linger_s", "connections"), [(0.05, 5.0, 1), (30.0, 1.0, 3)])
async def test_the_end_of_a_response_may_come_after_that_of_its_stream(
    later_s: float, linger_s: float, connections: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("gateway.bench.stream.LINGER_S", linger_s)

    async def script(call: Call) -> None:
        await call.begin()
        await call.send(text("a"), DONE)
        await asyncio.sleep(later_s)
        await call.end()

    with serving(script) as server:
        client = Client(Address(server.url, "completions"), KEY, 10.0, hiding([KEY]))
        timelines = []
        for _ in range(3):
            timelines.append(new_timeline())
            await client.send(request(), timelines[-1])
        client.close()
        assert server.connections == connections
    assert all(one.completed and (one.e2e_s or 9.0) < linger_s for one in timelines)


async def test_requests_that_are_cancelled_stop_where_they_are_and_close():
    closed = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def script(call: Call) -> None:
        await call.begin()
        with suppress(ConnectionError):
            for _ in range(1000):
                await call.send(text("a"), after_s=0.01)
                if call.writer.transport.is_closing():
                    break
        loop.call_soon_threadsafe(closed.set)

    with serving(script) as server:
        client = Client(Address(server.url, "completions"), KEY, 10.0, hiding([KEY]))
        timeline = new_timeline()
        sending = asyncio.create_task(client.send(request(), timeline))
        await until(lambda: len(timeline.text_s) > 3)
        sending.cancel()
        with suppress(asyncio.CancelledError):
            await sending
        assert timeline.running
        assert timeline.failure is None
        arrived = len(timeline.text_s)
        await asyncio.wait_for(closed.wait(), 5)
        assert len(timeline.text_s) == arrived


async def test_each_request_has_the_key_of_its_model_or_the_common_one():
    with serving(answers) as server:
        await ask(server.url)
        await ask(server.url, api_key="another")
        keys = [
            line.split()[-1]
            for call in server.calls
            for line in call.head.splitlines()
            if line.startswith("authorization: Bearer ")
        ]
    assert keys == [KEY, "another"]


@pytest.mark.parametrize(
    ("url", "host", "port", "path"),
    [
        ("http://127.0.0.1:8080/v1", "127.0.0.1", 8080, "/v1/completions"),
        ("https://api.example.com/v1/", "api.example.com", 443, "/v1/completions"),
        ("http://[::1]/x/v1", "::1", 80, "/x/v1/completions"),
    ],
)
def test_an_address_is_read_from_a_url(url: str, host: str, port: int, path: str):
    address = Address(url, "completions")
    assert (address.host, address.port, address.path) == (host, port, path)


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8080",
        "ftp://host/v1",
        "http://",
        "http://user:password@host/v1",
        "http://host:port/v1",
        "http://host/v1?key=x",
        "http://host/v1 ",
        "http://host/\r\nx: y",
        "http://[::1/v1",
    ],
)
def test_what_is_no_address_is_refused(url: str):
    with pytest.raises(AddressError):
        Address(url, "completions")
