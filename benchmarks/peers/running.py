"""What a peer is to vs_peers: something that is started for some kinds of loads, and measured."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import httpx

from benchmarks.peers.child import Child, Failed
from benchmarks.peers.closed_loop import Model, closed_loop
from benchmarks.peers.loads import Load
from benchmarks.peers.results import Reading

ANSWER_S = 60.0


class Running(Protocol):
    def measure(self, load: Load, seconds: float, round: int) -> Reading:
        """Raises Failed."""

    def go_on(self, prompt: list[int], tokens: int) -> str:
        """Greedily, with the first adapter. Raises Failed."""


class Peer(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def starts(self) -> Sequence[tuple[str, ...]]:
        """The kinds of loads that it can take, those together that one start serves."""

    @property
    def start_s(self) -> float:
        """About how long a start takes, for the estimate."""

    def started(self, kinds: tuple[str, ...]) -> AbstractContextManager[Running]:
        """Ready to be measured. Raises Failed, also when it does not stop."""


class HttpServer:
    """A server with OpenAI's API."""

    def __init__(
        self,
        child: Child,
        url: str,
        models: Callable[[str], Sequence[Model]],
        key: str = "none",
    ) -> None:
        """`models`: who is asked in a kind of load."""
        self.url, self.key = url, key
        self.child = child
        self.models = models

    def measure(self, load: Load, seconds: float, round: int) -> Reading:
        models, pid = self.models(load.kind), self.child.process.pid
        return closed_loop(
            self.url, self.key, models, load.concurrency, seconds, load.seed(round), pid
        )

    def go_on(self, prompt: list[int], tokens: int) -> str:
        model = self.models("adapters-32")[0]
        body = {"model": model.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        try:
            response = httpx.post(
                f"{self.url}/v1/completions",
                json=body | {"ignore_eos": True} | model.extra,
                headers={"authorization": f"Bearer {self.key}"},
                timeout=ANSWER_S,
                trust_env=False,
            )
            response.raise_for_status()
            text: str = response.json()["choices"][0]["text"]
        except (httpx.HTTPError, LookupError, ValueError) as error:
            raise Failed(f"did not go on from a prompt: {error}") from None
        return text
