"""Batches of requests with an adapter each, and the rate at which they are answered."""

import os
from dataclasses import dataclass

import pytest

from benchmarks.peers import static_batch
from benchmarks.peers.loads import Load
from benchmarks.peers.static_batch import OUTPUT_TOKENS, PROMPT_TOKENS, Batch, batch_of, rate


@dataclass
class Clock:
    now_s: float = 0.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    ours = Clock()
    monkeypatch.setattr(static_batch, "time", ours)
    return ours


def test_every_request_of_a_batch_has_an_adapter_of_its_own():
    batch = batch_of(32, seed=0)
    assert len(set(batch.adapters)) == 32
    assert {len(prompt) for prompt in batch.prompts} == {PROMPT_TOKENS}
    assert batch == batch_of(32, seed=0)
    assert batch != batch_of(32, seed=1)


def test_the_rate_is_of_whole_batches_without_the_one_that_warms_up(clock: Clock):
    asked: list[Batch] = []

    def answer(batch: Batch) -> None:
        asked.append(batch)
        clock.now_s += 100.0 if len(asked) == 1 else 2.0

    reading = rate(answer, os.getpid(), Load("static", 8), seconds=5.0, round=0)
    warm, *measured = asked
    assert warm.tokens < OUTPUT_TOKENS
    assert len(measured) == reading.report["batches"] == 3
    assert len({str(prompt) for batch in asked for prompt in batch.prompts}) == 4 * 8
    assert reading.tokens_per_s == 3 * 8 * OUTPUT_TOKENS / 6.0


def test_a_batch_that_takes_longer_than_the_time_is_measured_whole(clock: Clock):
    def answer(batch: Batch) -> None:
        clock.now_s += 30.0

    reading = rate(answer, os.getpid(), Load("static", 32), seconds=20.0, round=0)
    assert reading.report["batches"] == 1
    assert reading.tokens_per_s == 32 * OUTPUT_TOKENS / 30.0
