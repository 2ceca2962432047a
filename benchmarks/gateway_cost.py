"""What does the gateway process spend on a request and on each token that it streams?

The real gateway, behind a socket, with a worker that computes nothing (`scripted_worker`): CPU time
of all its threads, from answers of two lengths. The difference is the tokens', the rest is the
request's: the key, the adapter's name, a prompt of 80 tokens, the answer's head and its end. Also
how long the first ten requests after the start wait for their first byte.

    python -m benchmarks gateway_cost
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import httpx

from benchmarks.running_gateway import BASE, Gateway, running
from tests.adapters.making import config, weights

WORKER = "benchmarks.scripted_worker"
ADAPTER = "cost-of-an-adapter"
PROMPT = "Explain in a few sentences why the sea is salt, and what a river has to do with it. " * 4
"""80 tokens with the chat template's."""
STREAMS = 32
TOKENS_FEW, TOKENS_MANY = 1, 61
ANSWER_BYTES_MAX = 2**20


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks gateway_cost", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the base model's GGUF")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(arguments)
    with (
        tempfile.TemporaryDirectory() as folder,
        running(options.model, Path(folder), WORKER) as gateway,
    ):
        first_ms = asyncio.run(_first_bytes_ms(gateway, 10))
        print("ms to the first byte:", *(f"{each:.1f}" for each in first_ms))
        _upload(gateway)
        result: dict[str, object] = {"benchmark": "gateway_cost", "first_bytes_ms": first_ms}
        for stream in (True, False):
            for model in (BASE, ADAPTER):
                for streams in (1, STREAMS):
                    request_ms, token_us = asyncio.run(
                        _cost(gateway, model, stream, streams, options.repeats)
                    )
                    kind = "streamed" if stream else "whole"
                    name = f"{kind}, {'base' if model == BASE else 'adapter'}, {streams} at a time"
                    print(f"{name:30} {request_ms:6.2f} ms a request {token_us:6.1f} µs a token")
                    result[name] = {"request_ms": request_ms, "token_us": token_us}
    result |= {"cores": len(os.sched_getaffinity(0)), "load_1min": round(os.getloadavg()[0], 2)}
    print(json.dumps(result))


async def _cost(
    gateway: Gateway, model: str, stream: bool, streams: int, repeats: int
) -> tuple[float, float]:
    """Milliseconds of CPU time a request, and microseconds a token; medians."""
    clients = [await Client.connect(gateway) for _ in range(streams)]
    few, many = [], []
    for _ in range(repeats):
        # as many requests of one token as one would have in the long ones' time
        rounds = max(1, 64 // streams)
        few.append(await _cpu_s(gateway, clients, model, stream, TOKENS_FEW, rounds))
        many.append(await _cpu_s(gateway, clients, model, stream, TOKENS_MANY, 1))
    for client in clients:
        client.close()
    token_s = (statistics.median(many) - statistics.median(few)) / (TOKENS_MANY - TOKENS_FEW)
    return 1e3 * (statistics.median(few) - TOKENS_FEW * token_s), 1e6 * token_s


async def _cpu_s(
    gateway: Gateway, clients: list["Client"], model: str, stream: bool, tokens: int, rounds: int
) -> float:
    """CPU seconds per request."""
    started = gateway.cpu_s()
    for _ in range(rounds):
        answers = (client.ask(model, stream, tokens) for client in clients)
        assert all(await asyncio.gather(*answers)), "an answer was not complete"
    return (gateway.cpu_s() - started) / (rounds * len(clients))


class Client:
    """One connection, kept alive; reads as little of an answer as it can."""

    def __init__(
        self, gateway: Gateway, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._reader, self._writer = reader, writer
        self._head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
            f"authorization: Bearer {gateway.key}\r\ncontent-type: application/json\r\n"
        )
        self.first_byte_at = 0.0

    @classmethod
    async def connect(cls, gateway: Gateway) -> "Client":
        ends = await asyncio.open_connection("127.0.0.1", gateway.port, limit=ANSWER_BYTES_MAX)
        return cls(gateway, *ends)

    async def ask(self, model: str, stream: bool, tokens: int) -> bool:
        """Whether the answer came, as far as can be seen."""
        messages = [{"role": "user", "content": PROMPT}]
        body = json.dumps(
            {"model": model, "messages": messages, "stream": stream, "max_tokens": tokens}
        )
        self._writer.write(f"{self._head}content-length: {len(body)}\r\n\r\n{body}".encode())
        head = await self._reader.readuntil(b"\r\n\r\n")
        self.first_byte_at = time.perf_counter()
        if stream:
            text = await self._reader.readuntil(b"\r\n0\r\n\r\n")
            return b"data: [DONE]" in text and text.count(b"data: ") > tokens // 2
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        return b'"completion_tokens":%d' % tokens in await self._reader.readexactly(length)

    def close(self) -> None:
        self._writer.close()


async def _first_bytes_ms(gateway: Gateway, count: int) -> list[float]:
    client = await Client.connect(gateway)
    taken = []
    for _ in range(count):
        asked = time.perf_counter()
        await client.ask(BASE, True, TOKENS_FEW)
        taken.append(1e3 * (client.first_byte_at - asked))
    client.close()
    return taken


def _upload(gateway: Gateway) -> None:
    answer = httpx.post(
        f"http://127.0.0.1:{gateway.port}/v1/adapters",
        headers={"authorization": f"Bearer {gateway.key}"},
        files={
            "name": (None, ADAPTER),
            "config": ("adapter_config.json", json.dumps(config()).encode()),
            "weights": ("adapter_model.safetensors", weights()),
        },
    )
    assert answer.is_success, answer.text
