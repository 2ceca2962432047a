"""What is one pool worth, beside the same bytes split in two?

The same engine twice: once with its pool as it is, once with half of the pages for adapters and
half for KV, as engines with two budgets have it. The load is bound by KV: long prompts, few
adapters. Rounds alternate; the ratio is that of the median rates.

    python -m benchmarks unified [--rounds 3]
"""

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Container, Hashable, Iterator
from pathlib import Path

from benchmarks.drive import Drive
from benchmarks.machine import describe
from benchmarks.registered import register
from gateway.engine.engine import Engine
from gateway.engine.memory.pages import Kind
from gateway.engine.memory.supply import PageSupply
from gateway.engine.messages import AdapterRef, EngineSettings, Sampling, Submit

POOL_MIB = 96
"""131 pages of 16 tokens in float32, as much as 2,100 tokens of KV."""
ADAPTERS = 2
RANK = 8
REQUESTS = 32
PROMPT_TOKENS = (96, 160)
OUTPUT_TOKENS = (32, 64)


class SplitSupply(PageSupply):
    """Two budgets: half of the pages for KV and prefixes, half for adapters."""

    @property
    def kv_pages(self) -> int:
        return self._pool.total // 2

    def missing(self, adapter_pages: int, kv_pages: int, idle_kept: int = 0) -> int:
        kept_adapters = min(idle_kept, self._pager.idle_pages)
        used_kv = self._pool.owned("kv") + self._radix.locked_pages
        adapters = self._pager.held_pages + kept_adapters + adapter_pages
        return max(
            used_kv + kv_pages + idle_kept - kept_adapters - self.kv_pages,
            adapters - (self._pool.total - self.kv_pages),
        )

    def secure(self, pages: int, kind: Kind, keep: Container[Hashable] = ()) -> None:
        budget = self._pool.total - self.kv_pages if kind == "adapter" else self.kv_pages
        while self._used(kind) + pages > budget or self._pool.free < pages:
            key = self._reclaim.cheapest(_Others(kind, keep))
            assert key is not None, "nothing of this budget is idle"
            self.evict(key)

    def kv_roof(self, more_adapter_pages: int = 0) -> int:
        return self.kv_pages - self._radix.locked_pages

    def _used(self, kind: Kind) -> int:
        if kind == "adapter":
            return self._pool.owned("adapter")
        return self._pool.owned("kv") + self._pool.owned("prefix")


class _Others(Container[Hashable]):
    """What does not count against the budget of `kind`, and what is to be kept."""

    def __init__(self, kind: Kind, keep: Container[Hashable]) -> None:
        self._adapters = kind == "adapter"
        self._keep = keep

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) == self._adapters or key in self._keep


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks unified", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the base model's GGUF")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    settings = EngineSettings(model=str(options.model), pool_mib=POOL_MIB)
    unified, split = Engine(settings), Engine(settings, supply=SplitSupply)
    with tempfile.TemporaryDirectory() as folder:
        refs = register(Path(folder), unified, ADAPTERS, RANK)
        rates: dict[str, list[float]] = {"unified": [], "split": []}
        running: dict[str, int] = {}
        for turn in range(options.rounds + 1):  # the first warms both up
            for name, engine in (("unified", unified), ("split", split)):
                rate, running[name] = _round(engine, refs, turn)
                if turn:
                    rates[name].append(rate)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, rate in medians.items():
        print(f"{name:>8}: {rate:6.1f} output tokens/s, at most {running[name]} at a time")
    ratio = medians["unified"] / medians["split"]
    print(f"unified ÷ split: {ratio:.2f}")
    result = {"benchmark": "unified", "ratio": ratio, "rates": rates, "running": running}
    print(json.dumps(result | describe()))


def _round(engine: Engine, refs: list[AdapterRef], turn: int) -> tuple[float, int]:
    drive, most = Drive(engine), 0
    for request in _requests(refs, turn, engine.info.vocab_size):
        drive.submit(request)
    started = min(answer.submitted_s for answer in drive.answers.values())
    while engine.scheduler.waiting or engine.scheduler.running:
        drive.step()
        most = max(most, len(engine.scheduler.running))
    ended = max(answer.ended_s or 0.0 for answer in drive.answers.values())
    return drive.tokens / (ended - started), most


def _requests(refs: list[AdapterRef], turn: int, vocabulary: int) -> Iterator[Submit]:
    chance = random.Random(turn)
    for index in range(REQUESTS):
        prompt = [chance.randrange(100, vocabulary) for _ in range(chance.randint(*PROMPT_TOKENS))]
        output = chance.randint(*OUTPUT_TOKENS)
        yield Submit(
            f"{turn}-{index}", prompt, output, Sampling(temperature=0), refs[index % len(refs)]
        )
