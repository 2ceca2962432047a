"""Batches of requests with an adapter each, and the rate at which they are answered."""

import os
import time

import pytest

from benchmarks.peers.loads import Load
from benchmarks.peers.static_batch import OUTPUT_TOKENS, PROMPT_TOKENS, Batch, batch_of, rate


def test_every_request_of_a_batch_has_an_adapter_of_its_own():
    batch = batch_of(32, seed=0)
    assert len(set(batch.adapters)) == 32
    assert {len(prompt) for prompt in batch.prompts} == {PROMPT_TOKENS}
    assert batch == batch_of(32, seed=0)
    assert batch != batch_of(32, seed=1)


def test_the_rate_is_of_whole_batches_without_the_one_that_warms_up():
    asked: list[Batch] = []

    def answer(batch: Batch) -> None:
        asked.append(batch)
        time.sleep(1.0 if len(asked) == 1 else 0.1)

    reading = rate(answer, os.getpid(), Load("static", 8), seconds=0.25, round=0)
    warm, *measured = asked
    assert warm.tokens < OUTPUT_TOKENS
    assert len(measured) == reading.report["batches"] == 3
    assert len({str(prompt) for batch in asked for prompt in batch.prompts}) == 4 * 8
    assert reading.tokens_per_s == pytest.approx(3 * 8 * OUTPUT_TOKENS / 0.3, rel=0.2)


def test_a_batch_that_takes_longer_than_the_time_is_measured_whole():
    reading = rate(lambda _: time.sleep(0.1), os.getpid(), Load("static", 8), seconds=0.0, round=0)
    assert reading.report["batches"] == 1
    assert reading.tokens_per_s < 8 * OUTPUT_TOKENS / 0.1
