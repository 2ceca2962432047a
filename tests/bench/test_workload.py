import json
import math
from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest

from gateway.bench.shape import Range, SharedPrefix
from gateway.bench.targets import Target
from gateway.bench.workload import WARM_UP, Request, arrivals, popularity, requests
from tests.bench.scripted import shape

ONE = [Target("one")]
SIGMAS = 4.0
"""A correct draw is outside of so many standard errors once in 16 000 times; seeds are fixed."""


def drawn(count: int, seed: int = 0, targets: list[Target] = ONE, **changes: Any) -> list[Request]:
    return list(islice(requests(shape(**changes), targets, seed), count))


def prompts(asked: list[Request]) -> list[list[int]]:
    return [json.loads(one.body)["prompt"] for one in asked]


@pytest.mark.parametrize(("rate", "cv"), [(0.5, 1.0), (4.0, 1.0), (4.0, 0.25), (20.0, 3.0)])
def test_arrivals_have_the_rate_and_the_variation_asked_for(rate: float, cv: float):
    count = 40_000
    between = np.diff([0.0, *islice(arrivals(rate, cv, seed=1), count)])
    mean = between.mean()
    assert (between >= 0).all()
    assert abs(mean * rate - 1) < SIGMAS * cv / math.sqrt(count)
    # of a Gamma distribution of variance cv², the excess kurtosis is 6 cv²
    error = 0.5 * math.sqrt((2 + 6 * cv**2) / count + 4 * cv**2 / count)
    assert abs(between.std() / mean / cv - 1) < SIGMAS * error


def test_arrivals_of_variation_one_are_exponential():
    count = 20_000
    between = np.sort(np.diff([0.0, *islice(arrivals(2.0, 1.0, seed=3), count)]))
    expected = 1 - np.exp(-2.0 * between)
    distance = np.abs(expected - (np.arange(count) + 0.5) / count).max()
    assert distance < 1.95 / math.sqrt(count)  # Kolmogorov-Smirnov at 0.1 %


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 2.0])
def test_the_rth_model_is_asked_in_proportion_to_a_power_of_its_rank(alpha: float):
    models, count = 12, 20_000
    targets = [Target(f"m{rank}") for rank in range(1, models + 1)]
    asked = Counter(one.target.model for one in drawn(count, 5, targets, alpha=alpha))
    total = sum(rank**-alpha for rank in range(1, models + 1))
    for rank in range(1, models + 1):
        share = rank**-alpha / total
        error = math.sqrt(share * (1 - share) / count)
        assert abs(asked[f"m{rank}"] / count - share) < SIGMAS * error, rank
    assert popularity(models, alpha).sum() == pytest.approx(1.0)


def test_lengths_are_uniform_with_both_ends():
    asked = drawn(9000, prompt_tokens=Range(5, 10), output_tokens=Range(1, 3))
    for counts, values in (
        (Counter(one.prompt_tokens for one in asked), range(5, 11)),
        (Counter(one.output_tokens for one in asked), range(1, 4)),
    ):
        assert sorted(counts) == list(values)
        share = 1 / len(values)
        error = math.sqrt(share * (1 - share) / len(asked))
        assert all(abs(counts[value] / len(asked) - share) < SIGMAS * error for value in values)


def test_a_request_says_what_its_body_holds():
    for one in drawn(50, vocabulary=Range(7, 9)):
        body = json.loads(one.body)
        assert len(body["prompt"]) == one.prompt_tokens
        assert body["max_tokens"] == one.output_tokens
        assert body["stream"] is True
        assert body["stream_options"] == {"include_usage": True}
        assert set(body["prompt"]) <= {7, 8, 9}


def test_a_seed_makes_the_same_requests_and_another_others():
    assert drawn(20, 7) == drawn(20, 7)
    assert not set(map(tuple, prompts(drawn(20, 7)))) & set(map(tuple, prompts(drawn(20, 8))))
    first = list(islice(arrivals(3, 1, 7), 5))
    assert first == list(islice(arrivals(3, 1, 7), 5))
    assert first != list(islice(arrivals(3, 1, 8), 5))


def test_changing_the_models_leaves_prompts_and_lengths_alone():
    many = [Target("one"), Target("two"), Target("three")]
    assert prompts(drawn(20)) == prompts(drawn(20, 0, many, alpha=0.0))


def test_the_warm_up_asks_nothing_that_is_asked_later():
    warm = list(islice(requests(shape(), ONE, 0, WARM_UP), 20))
    assert not set(map(tuple, prompts(warm))) & set(map(tuple, prompts(drawn(200))))


def test_a_group_shares_its_prefix_and_nothing_more():
    count, groups = 2000, 4
    found = prompts(drawn(count, shared_prefix=SharedPrefix(8, groups)))
    shared = Counter(tuple(prompt[:8]) for prompt in found)
    assert len(shared) == groups
    error = math.sqrt(0.25 * 0.75 / count)
    assert all(abs(times / count - 0.25) < SIGMAS * error for times in shared.values())
    assert all(10 <= len(prompt) <= 20 for prompt in found)
    assert len({tuple(prompt[8:]) for prompt in found}) == count


def test_extras_are_merged_the_models_own_last_and_null_leaves_out():
    target = Target("m", {"lora": [{"id": 3, "scale": 1.0}], "temperature": 1})
    extra = {"temperature": 0, "ignore_eos": True, "stream_options": None}
    (one,) = drawn(1, 0, [target], extra=extra)
    body = json.loads(one.body)
    assert body["lora"] == [{"id": 3, "scale": 1.0}]
    assert body["temperature"] == 1
    assert body["ignore_eos"] is True
    assert "stream_options" not in body


def test_chat_is_sent_words():
    changes: dict[str, Any] = {"endpoint": "chat", "shared_prefix": SharedPrefix(5, 1)}
    bodies = [json.loads(one.body) for one in drawn(10, **changes)]
    texts = [body["messages"][0]["content"].split() for body in bodies]
    assert [len(words) for words in texts] == [one.prompt_tokens for one in drawn(10, **changes)]
    assert len({tuple(words[:5]) for words in texts}) == 1
    assert all(body["messages"][0]["role"] == "user" and "prompt" not in body for body in bodies)
