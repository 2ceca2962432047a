import json
import shlex
from pathlib import Path

from gateway.demo.content import BASE_NAME
from gateway.demo.welcome import curl, welcome

KEYS = {"acme": "lg_sk_acme", "globex": "lg_sk_globex"}


def test_a_pasted_curl_line_holds_a_streaming_request() -> None:
    words = shlex.split(curl("http://127.0.0.1:9", "lg_sk_x", "pirate").replace("\\\n", " "))
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:9/v1/chat/completions"]
    assert "Authorization: Bearer lg_sk_x" in words
    request = json.loads(words[words.index("-d") + 1])
    assert request["model"] == "pirate"
    assert request["stream"] is True


def test_each_tenant_gets_lines_with_its_own_key_and_adapter() -> None:
    shown = welcome("http://127.0.0.1:9", KEYS, Path("server.log"))
    acme, globex = shown.split("Tenant globex")
    assert "lg_sk_acme" in acme
    assert '"model": "pirate"' in acme
    assert "lg_sk_globex" not in acme
    assert "lg_sk_globex" in globex
    assert '"model": "legal"' in globex
    assert f"everybody: {BASE_NAME}" in shown


def test_the_sdk_example_is_named_where_it_is_there() -> None:
    assert "examples/chat.py pirate" in welcome("http://127.0.0.1:9", KEYS, Path("server.log"))
