"""On a CPU every logit of a request has the same bits whatever its neighbours, the chunks of its
prompt, preemptions, pages and threads, and whatever the setting."""

import hashlib
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from gateway.adapters.peft_format import write_manifest
from gateway.engine.engine import Engine
from gateway.engine.kernels.team import team
from gateway.engine.messages import AdapterRef, EngineSettings, Failed, Sampling, Submit, Tokens
from gateway.engine.model.batch import Batch
from gateway.engine.model.compiled_decoder import CompiledDecoder
from gateway.engine.scheduling.plan import Plan
from tests.engine.tiny import CONFIGS, save_adapter, save_model

SAMPLED = Sampling(temperature=0.9, top_p=0.95, seed=5)
ALL_AT_ONCE = 100_000
RANKS = (1, 3, 6)
NEIGHBOURS_MAX = 15
OUTPUT_TOKENS = 14
THREADS_MAX = 4


class Recorder:
    """Stands between an engine and its decoder, has the logits of all tokens computed and keeps
    those of one request by position."""

    def __init__(self, engine: Engine, request_id: str) -> None:
        self._engine, self._request_id = engine, request_id
        self._decoder, self._plan = engine._decoder, engine.scheduler.plan
        self.logits: dict[int, bytes] = {}
        self.lengths: list[int] = []
        """Tokens of the request in each of its iterations."""

    def __enter__(self) -> "Recorder":
        changed: Any = self._engine
        changed._decoder, changed.scheduler.plan = self, self.plan
        return self

    def __exit__(self, *_: object) -> None:
        changed: Any = self._engine
        changed._decoder, changed.scheduler.plan = self._decoder, self._plan

    def plan(self) -> Plan:
        self._current = self._plan()
        return self._current

    def forward(self, batch: Batch) -> torch.Tensor:
        every = replace(batch, last_S=torch.arange(len(batch.tokens_T)))
        logits_TV = self._decoder.forward(every)
        for span, (sequence, length) in zip(batch.spans, self._current.slices, strict=True):
            if sequence.id == self._request_id:
                self.lengths.append(length)
                for token in range(span.start, span.stop):
                    position = int(batch.positions_T[token])
                    bits = logits_TV[token].contiguous().view(torch.uint8).numpy().tobytes()
                    known = self.logits.setdefault(position, bits)
                    assert known == bits, f"position {position} was computed anew, with other bits"
        return logits_TV[batch.last_S]

    @property
    def preempted(self) -> bool:
        return sum(self.lengths) > len(self.logits)

    def digest(self) -> str:
        assert sorted(self.logits) == list(range(len(self.logits)))
        return hashlib.sha256(b"".join(self.logits[i] for i in range(len(self.logits)))).hexdigest()


def answer(
    engine: Engine,
    subject: Submit,
    others: list[Submit],
    wait: int,
    preempt_after: int | None = None,
) -> tuple[list[int], Recorder]:
    """Half the others come first; the subject `wait` iterations later, then the rest, one each
    iteration. Returns the subject's tokens. `preempt_after` so many of its iterations it is sent
    back to the queue; a short pool does the same, but not in every run."""
    tokens: list[int] = []

    def step() -> None:
        for event in engine.step():
            assert not isinstance(event, Failed), event
            if isinstance(event, Tokens) and event.request_id == subject.request_id:
                tokens.extend(event.ids)

    late = list(others[len(others) // 2 :])
    with Recorder(engine, subject.request_id) as recorder:
        for other in others[: len(others) // 2]:
            engine.submit(other)
        for _ in range(wait):
            step()
        engine.submit(subject)
        while engine.scheduler.waiting or engine.scheduler.running or late:
            if late:
                engine.submit(late.pop())
            step()
            if len(recorder.lengths) == preempt_after:
                preempt_after = None
                engine.scheduler._preempt(engine.scheduler.running[subject.request_id])
    engine.pool.check()
    return tokens, recorder


def random_tokens(draw: random.Random, count: int, vocabulary: int = 256) -> list[int]:
    return [draw.randrange(3, vocabulary) for _ in range(count)]


class Tiny:
    """A tiny model, three adapters and engines of different schedules."""

    def __init__(self, folder: Path, config: str, dtype: Any) -> None:
        model = save_model(CONFIGS[config], folder / "model")
        self.engines = [
            Engine(
                EngineSettings(
                    model=str(folder / "model"),
                    dtype=dtype,
                    block_tokens=4,
                    pool_mib=pages * self._page_bytes(dtype) / 2**20,
                    step_tokens=step_tokens,
                    running_max=16,
                )
            )
            for step_tokens in (16, 64, ALL_AT_ONCE)
            for pages in (56, 400)
        ]
        self.refs: list[AdapterRef | None] = [None]
        for rank in RANKS:
            adapter = folder / f"rank-{rank}"
            save_adapter(model, LoraConfig(r=rank, target_modules="all-linear"), adapter, seed=rank)
            self.refs.append(write_manifest(adapter, self.engines[0].info))

    @staticmethod
    def _page_bytes(dtype: str) -> int:
        itemsize: int = getattr(torch, dtype).itemsize
        return 2 * 2 * 4 * 2 * 16 * itemsize  # layers, k and v, block, KV heads, head dim

    def trial(self, seed: int, ref: AdapterRef | None) -> tuple[list[int], Recorder]:
        draw = random.Random(seed)
        prompt = random_tokens(random.Random("subject"), 40)
        subject = Submit("subject", prompt, OUTPUT_TOKENS, SAMPLED, ref, fairness_key="subject")
        others = [
            Submit(
                str(index),
                random_tokens(draw, draw.choice([1, 3, 8, 20, 40])),
                draw.randint(1, 12),
                Sampling(temperature=draw.choice([0.0, 1.0]), seed=index),
                draw.choice(self.refs),
                fairness_key=draw.choice(["a", "b", "subject"]),
            )
            for index in range(draw.randint(0, NEIGHBOURS_MAX))
        ]
        engine = self.engines[seed % len(self.engines)]
        assert isinstance(engine._decoder, CompiledDecoder)
        engine._decoder._team = team(draw.randint(1, THREADS_MAX))
        preempt_after = draw.choice([None, draw.randint(1, OUTPUT_TOKENS - 1)])
        return answer(engine, subject, others, draw.randint(0, 4), preempt_after)


@pytest.mark.parametrize(
    ("config", "dtype", "trials"),
    [("llama", "float32", 50), ("mistral-window", "float32", 12), ("qwen2", "bfloat16", 12)],
)
def test_all_logits_of_a_request_have_the_same_bits_in_any_company(
    tmp_path: Path, config: str, dtype: str, trials: int
):
    tiny = Tiny(tmp_path, config, dtype)
    seen: dict[AdapterRef | None, tuple[list[int], str]] = {}
    recorders = []
    for seed in range(trials):
        # the adapter stays while the engine changes
        ref = tiny.refs[seed // len(tiny.engines) % len(tiny.refs)]
        tokens, recorder = tiny.trial(seed, ref)
        assert len(tokens) == OUTPUT_TOKENS
        assert seen.setdefault(ref, (tokens, recorder.digest())) == (tokens, recorder.digest())
        recorders.append(recorder)
    for engine in tiny.engines:
        engine.close()
    assert len({digest for _, digest in seen.values()}) == len(seen)
    assert sum(recorder.preempted for recorder in recorders) >= trials // 4
    assert len({recorder.lengths[0] for recorder in recorders}) > 3


def test_what_follows_a_cached_prefix_has_the_same_bits(tmp_path: Path):
    tiny = Tiny(tmp_path, "llama", "float32")
    for engine in tiny.engines[1::2]:  # the pools that keep it
        for ref in tiny.refs:
            prompt = random_tokens(random.Random("subject"), 40)
            subject = Submit(
                "subject", prompt, OUTPUT_TOKENS, SAMPLED, ref, cache_namespace="tenant"
            )
            other = Submit("other", prompt[:9], 6, SAMPLED, ref, cache_namespace="tenant")
            cold_tokens, cold = answer(engine, subject, [], 0)
            warm_tokens, warm = answer(engine, subject, [other], 1)
            assert warm_tokens == cold_tokens
            assert min(warm.logits) >= 36  # all full blocks of 4 but the last token's
            assert all(cold.logits[position] == bits for position, bits in warm.logits.items())
        engine.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_real_models_logits_have_the_same_bits_in_company(base_model: Path, dtype: Any):
    settings = EngineSettings(
        model=str(base_model), device="cpu", dtype=dtype, pool_mib=64, batch_invariant="off"
    )
    engine = Engine(settings)
    assert engine.batch_invariant
    draw = random.Random(1)
    subject = Submit("subject", random_tokens(draw, 6, 40_000), 3, SAMPLED)
    company = [
        Submit(str(index), random_tokens(draw, draw.randint(1, 9), 40_000), 2, SAMPLED)
        for index in range(7)
    ]
    answers = [answer(engine, subject, others, 1) for others in ([], company)]
    alone, in_company = ((tokens, recorder.digest()) for tokens, recorder in answers)
    assert alone == in_company
    engine.close()
