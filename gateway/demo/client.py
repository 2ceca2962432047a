"""The demo's HTTP client: what a tenant's program would send, and nothing else."""

import json
from pathlib import Path
from typing import Any, Self

import httpx

from gateway.demo.content import ANSWER_TOKENS_MAX

ANSWER_S_MAX = 300.0


class Client:
    """One tenant's view of the gateway. Every failure raises httpx.HTTPStatusError."""

    def __init__(self, base_url: str, key: str) -> None:
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers={"authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(ANSWER_S_MAX, connect=10.0),
            trust_env=False,  # a proxy for the internet has no business with 127.0.0.1
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def models(self) -> list[str]:
        answer = await self._get("/v1/models")
        return [model["id"] for model in answer["data"]]

    async def adapters(self) -> list[str]:
        answer = await self._get("/v1/adapters")
        return [adapter["name"] for adapter in answer["data"]]

    async def adapter(self, name: str) -> dict[str, Any]:
        return await self._get(f"/v1/adapters/{name}")

    async def upload(self, name: str, folder: Path) -> None:
        """Upload a PEFT folder."""
        files = {
            "config": (folder / "adapter_config.json").read_bytes(),
            "weights": (folder / "adapter_model.safetensors").read_bytes(),
        }
        response = await self._http.post("/v1/adapters", data={"name": name}, files=files)
        response.raise_for_status()

    async def ask(self, model: str, question: str) -> str:
        """One greedy answer, as one response."""
        response = await self._http.post(
            "/v1/chat/completions", json=_chat(model, question, stream=False)
        )
        response.raise_for_status()
        text: str = response.json()["choices"][0]["message"]["content"]
        return text

    async def ask_streaming(self, model: str, question: str) -> list[str]:
        """The same answer as the pieces it came in. Raises ValueError if the stream was cut."""
        pieces: list[str] = []
        request = _chat(model, question, stream=True)
        async with self._http.stream("POST", "/v1/chat/completions", json=request) as response:
            if response.is_error:
                await response.aread()
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return pieces
                if line.startswith("data: "):
                    pieces += _pieces(json.loads(line.removeprefix("data: ")))
        raise ValueError("the stream ended without [DONE]")

    async def _get(self, path: str) -> dict[str, Any]:
        response = await self._http.get(path)
        response.raise_for_status()
        body: dict[str, Any] = response.json()
        return body


def _chat(model: str, question: str, *, stream: bool) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": ANSWER_TOKENS_MAX,
        "temperature": 0,
        "stream": stream,
    }


def _pieces(event: dict[str, Any]) -> list[str]:
    if "error" in event:
        raise ValueError(f"the stream ended with an error: {event['error']['message']}")
    texts = [choice["delta"].get("content") for choice in event["choices"]]
    return [text for text in texts if text]
