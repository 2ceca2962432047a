"""The head of a request has an end, whoever sends it."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import urlsplit

import httpx
import pytest

from gateway.http_protocol import HEAD_BYTES_MAX
from tests.live import Live, live

READ_BYTES_MAX = 256 * 1024
"""What the loop reads at once."""
FAR_TOO_MUCH = 64 * 2**20


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with live(tmp_path_factory.mktemp("protocol")) as running:
        yield running


@pytest.mark.parametrize("line", [b"x-a: " + b"a" * 4000 + b"\r\n", b"a" * 4000])
def test_headers_without_an_end_are_cut(line: bytes, running: Live) -> None:
    """Many headers, and one."""
    address = urlsplit(running.url)
    with socket.create_connection((address.hostname, address.port), timeout=20.0) as connection:
        connection.sendall(b"GET /health/live HTTP/1.1\r\nhost: x\r\nx-b: ")
        sent, answer = 0, b""
        try:
            while sent < FAR_TOO_MUCH:
                sent += connection.send(line)
            answer = connection.recv(4096)
        except OSError:  # closed while we wrote; what it said may be lost with that
            pass
    assert sent < FAR_TOO_MUCH
    assert not answer.startswith(b"HTTP/1.1 2")


def test_the_refusal_has_the_shape_of_every_error(running: Live) -> None:
    address = urlsplit(running.url)
    with socket.create_connection((address.hostname, address.port), timeout=20.0) as connection:
        connection.sendall(b"GET /health/live HTTP/1.1\r\nx-b: ")
        connection.setblocking(False)
        answer = b""
        for _ in range(4 * HEAD_BYTES_MAX // 1024):
            connection.send(b"a" * 1024)
            time.sleep(0.002)  # small pieces, so that it reads each, and we its answer in time
            with suppress(BlockingIOError):
                answer = connection.recv(4096)
                break
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert json.loads(body)["error"]["code"] == "request_header_fields_too_large"


def test_large_headers_and_large_bodies_are_let_through(running: Live) -> None:
    with running.client() as client:
        headers = {f"x-{index}": "a" * 4000 for index in range(10)}
        assert client.get("/v1/models", headers=headers).status_code == 200
        chat = {"model": "smollm2-135m-instruct", "messages": [], "user": "a" * READ_BYTES_MAX}
        for _ in range(3):  # on one connection: a body is no head
            response: httpx.Response = client.post("/v1/chat/completions", json=chat)
            assert response.json()["error"]["code"] == "empty_array"
