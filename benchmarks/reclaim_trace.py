"""Requests as the page pool sees them: made up with a seed, or read from a file.

A trace is a file of JSON lines, one request a line, in order of arrival:

    {"at": 12.5, "adapter": "a17", "rank": 16, "blocks": ["a17/s0", "a17/s1", "r93/0"], "prompt": 2,
     "runs_s": 1.9}

    at       seconds since the trace began
    adapter  its name, or null for the base model; `rank` is its rank (0 without)
    blocks   names of the KV blocks that the request ends with, from its first token on. A block's
             name stands for all tokens up to its end, under this adapter: a later request whose
             blocks begin with the same names could use them again
    prompt   how many of the blocks are its prompt's; the others it generates
    runs_s   seconds from its start to its end
"""

import random
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from pathlib import Path

import msgspec

RANKS = (8, 16, 32, 64)


class Request(msgspec.Struct, frozen=True):
    at: float
    adapter: str | None
    rank: int
    blocks: list[str]
    prompt: int
    runs_s: float


def read(path: Path) -> list[Request]:
    decoder = msgspec.json.Decoder(Request)
    return [decoder.decode(line) for line in path.read_bytes().splitlines() if line.strip()]


def write(path: Path, requests: Iterable[Request]) -> None:
    encoder = msgspec.json.Encoder()
    path.write_bytes(b"".join(encoder.encode(request) + b"\n" for request in requests))


class Popularity:
    """Power law over `count` adapters (S-LoRA, arXiv 2311.03285, section 7.1): the i-th most
    popular one is asked for in proportion to i^-alpha."""

    def __init__(self, count: int, alpha: float, rng: random.Random) -> None:
        self._cumulated = list(accumulate((i + 1) ** -alpha for i in range(count)))
        self._names = list(range(count))
        self._rng = rng
        rng.shuffle(self._names)

    def draw(self) -> int:
        return self._names[bisect(self._cumulated, self._rng.random() * self._cumulated[-1])]

    def drift(self) -> None:
        """One adapter, popular or not, becomes the most popular; those above it sink by one."""
        self._names.insert(0, self._names.pop(self._rng.randrange(len(self._names))))


class Maker:
    """Draws the parts of requests. Every adapter has a system prompt of its own."""

    def __init__(self, seed: int, adapters: int, alpha: float, per_s: float = 3.0) -> None:
        self.rng = random.Random(seed)
        self.adapters = adapters
        self.popularity = Popularity(adapters, alpha, self.rng)
        self._ranks = [self.rng.choice(RANKS) for _ in range(adapters)]
        self._system = [self.rng.randint(2, 16) for _ in range(adapters)]
        self._per_s = per_s
        self._at = 0.0
        self._made = 0

    def fresh(self, adapter: int, blocks: int) -> list[str]:
        """Names of blocks that no other request has."""
        self._made += 1
        return [f"{adapter}/r{self._made}.{index}" for index in range(blocks)]

    def system(self, adapter: int) -> list[str]:
        return [f"{adapter}/s{index}" for index in range(self._system[adapter])]

    def request(self, adapter: int, prompt: list[str], output: int) -> Request:
        """The next one to arrive; gaps are drawn from a gamma distribution of shape 1/4, so they
        come in bursts."""
        self._at += self.rng.gammavariate(0.25, 4 / self._per_s)
        blocks = prompt + self.fresh(adapter, output)
        runs_s = 0.2 + 0.4 * output
        return Request(
            self._at, f"a{adapter}", self._ranks[adapter], blocks, len(prompt), round(runs_s, 3)
        )

    def single(self, adapter: int) -> Request:
        """A system prompt, a question, an answer."""
        question = self.fresh(adapter, self.rng.randint(1, 8))
        return self.request(adapter, self.system(adapter) + question, self.rng.randint(1, 8))


def popular(seed: int, count: int, alpha: float, adapters: int = 400) -> Iterator[Request]:
    maker = Maker(seed, adapters, alpha)
    for _ in range(count):
        yield maker.single(maker.popularity.draw())


def drifting(seed: int, count: int, alpha: float = 1.0, adapters: int = 400) -> Iterator[Request]:
    """Every twentieth request another adapter comes into fashion."""
    maker = Maker(seed, adapters, alpha)
    for index in range(count):
        if index % 20 == 0:
            maker.popularity.drift()
        yield maker.single(maker.popularity.draw())


def conversations(
    seed: int, count: int, alpha: float = 1.0, adapters: int = 200
) -> Iterator[Request]:
    """Most requests continue one of some sixty conversations, whose prompt is all that was said."""
    maker = Maker(seed, adapters, alpha)
    rng = maker.rng
    open_ones: list[tuple[int, list[str]]] = []
    for _ in range(count):
        if open_ones and rng.random() < 0.8:
            # who has just answered is the likelier to go on
            place = min(len(open_ones), 1 + int(rng.expovariate(1 / 20)))
            adapter, said = open_ones.pop(-place)
        else:
            adapter = maker.popularity.draw()
            said = maker.system(adapter)
        prompt = said + maker.fresh(adapter, rng.randint(1, 4))
        request = maker.request(adapter, prompt, rng.randint(1, 6))
        if len(request.blocks) < 120:
            open_ones.append((adapter, request.blocks))
        del open_ones[:-60]
        yield request


def scanned(seed: int, count: int, alpha: float = 1.0, adapters: int = 400) -> Iterator[Request]:
    """Power law, but twice somebody tries every adapter once, as a nightly evaluation does."""
    maker = Maker(seed, adapters, alpha)
    made = 0
    while made < count:
        if made in (count // 4, count // 2):
            for adapter in range(adapters):
                yield maker.single(adapter)
        yield maker.single(maker.popularity.draw())
        made += 1


TRACES: dict[str, Callable[[int, int], Iterator[Request]]] = {
    "alpha 0.6": lambda seed, count: popular(seed, count, 0.6),
    "alpha 0.9": lambda seed, count: popular(seed, count, 0.9),
    "alpha 1.2": lambda seed, count: popular(seed, count, 1.2),
    "drifting": drifting,
    "scanned": scanned,
    "conversations": conversations,
}
