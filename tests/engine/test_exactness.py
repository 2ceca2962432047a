"""The real model, the real adapters: float32 greedy answers are those of PEFT + transformers,
token for token, alone, mixed in one batch, and joined and left in mid-flight."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gateway.adapters.peft_format import write_manifest
from gateway.engine.engine import Engine
from gateway.engine.messages import AdapterRef, EngineSettings, Failed, Sampling, Submit, Tokens
from gateway.engine.tokenizer import Tokenizer

OUTPUT_TOKENS = 6
QUESTIONS = [
    "What is the capital of France?",
    "How do I make a cup of tea?",
    "Why is the sky blue?",
    "Name three fruits.",
    "What is 7 times 8?",
    "Write a haiku about rain.",
    "Who wrote Romeo and Juliet?",
    "How far away is the moon?",
    "What should I pack for a day at the beach?",
    "Explain gravity to a child.",
    "Translate 'good morning' into Spanish.",
    "What does a lawyer do?",
    "Is 91 a prime number?",
    "Tell me a fact about octopuses.",
    "What is the largest ocean?",
    "In one sentence, and without listing anything, say what makes a garden pleasant to sit in "
    "on a warm evening when the work of the day is done and nobody is in a hurry.",
]


@pytest.fixture(scope="module")
def engine(base_model: Path) -> Iterator[Engine]:
    engine = Engine(EngineSettings(model=str(base_model), dtype="float32", pool_mib=512))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def adapters(
    engine: Engine, demo_adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, AdapterRef | None]:
    folder = tmp_path_factory.mktemp("adapters")
    refs: dict[str, AdapterRef | None] = {"base": None}
    for name, source in demo_adapters.items():
        shutil.copytree(source, folder / name)
        refs[name] = write_manifest(folder / name, engine.info)
    assert len(refs) >= 4
    return refs


@pytest.fixture(scope="module")
def prompts(base_model: Path) -> list[list[int]]:
    tokenizer = Tokenizer.load(base_model)
    return [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in QUESTIONS]


@pytest.fixture(scope="module")
def expected(
    reference_model: Any, demo_adapters: dict[str, Path], prompts: list[list[int]]
) -> dict[tuple[str, int], list[int]]:
    """By (adapter, prompt): what PEFT and transformers generate, one prompt at a time."""
    from peft import PeftModel

    answers = {("base", i): _generate(reference_model, prompt) for i, prompt in enumerate(prompts)}
    wrapped: Any = None
    for name, folder in demo_adapters.items():
        if wrapped is None:
            wrapped = PeftModel.from_pretrained(reference_model, folder, name)
        else:
            wrapped.load_adapter(folder, name)
        wrapped.set_adapter(name)
        answers |= {(name, i): _generate(wrapped, prompt) for i, prompt in enumerate(prompts)}
    wrapped.unload()
    return answers


@torch.inference_mode()
def _generate(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=OUTPUT_TOKENS,
        eos_token_id=-1,
        pad_token_id=2,
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


class Run:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.answers: dict[str, list[int]] = {}

    def submit(self, name: str, prompt: list[int], adapter: AdapterRef | None) -> None:
        self.answers[name] = []
        greedy = Sampling(temperature=0)
        assert not self._engine.submit(Submit(name, prompt, OUTPUT_TOKENS, greedy, adapter))

    def step(self) -> None:
        for event in self._engine.step():
            assert not isinstance(event, Failed), event
            if isinstance(event, Tokens):
                self.answers[event.request_id] += event.ids
        self._engine.pool.check()

    def finish(self) -> None:
        while self._engine.scheduler.waiting or self._engine.scheduler.running:
            self.step()


def test_each_answer_alone(engine, adapters, prompts, expected):
    for (name, index), tokens in expected.items():
        run = Run(engine)
        run.submit("alone", prompts[index], adapters[name])
        run.finish()
        assert run.answers["alone"] == tokens, (name, QUESTIONS[index])


def test_all_answers_in_one_batch(engine, adapters, prompts, expected):
    run = Run(engine)
    for name, index in expected:
        run.submit(f"{name} {index}", prompts[index], adapters[name])
    run.finish()
    assert run.answers == {f"{name} {index}": tokens for (name, index), tokens in expected.items()}
    assert engine.stats("").batch_adapters_max == len(adapters) - 1


def test_answers_that_join_in_mid_flight_while_others_leave(engine, adapters, prompts, expected):
    """One request arrives in each step; every third is cancelled two steps later."""
    run = Run(engine)
    order = sorted(expected, key=lambda item: (item[1], item[0]))
    cancelled = []
    for position, (name, index) in enumerate(order):
        run.submit(f"{name} {index}", prompts[index], adapters[name])
        run.step()
        if position % 3 == 2:
            leaver = "{} {}".format(*order[position - 2])
            engine.scheduler.cancel(leaver)
            cancelled.append(leaver)
    run.finish()
    for (name, index), tokens in expected.items():
        answer = run.answers[f"{name} {index}"]
        if f"{name} {index}" in cancelled:
            assert answer == tokens[: len(answer)]
        else:
            assert answer == tokens
    assert len(cancelled) > 20
    assert engine.stats("").pages_kv == 0


def test_the_adapters_change_the_answers(expected):
    """Else the equalities would prove nothing."""
    names = {name for name, _ in expected}
    for index in range(len(QUESTIONS)):
        assert len({tuple(expected[name, index]) for name in names}) == len(names)


def test_logits_equal_transformers(engine, reference_model, prompts):
    """The base's next-token logits after each prompt; the largest difference is stated in
    docs/performance.md."""
    from gateway.engine.memory.pages import Owner
    from gateway.engine.model.batch import Batch
    from gateway.engine.scheduling.plan import Slice
    from gateway.engine.scheduling.sequence import Sequence

    owner = Owner("kv", "logits")
    worst = 0.0
    for prompt in prompts:
        sequence = Sequence(Submit("logits", prompt, 1, Sampling()), 0)
        sequence.pages = engine.pool.take(-(-len(prompt) // 16), owner)
        with torch.inference_mode():
            batch = Batch.pack([Slice(sequence, len(prompt))], 16, "cpu")
            ours = engine._decoder.forward(batch)[0]
            theirs = reference_model(torch.tensor([prompt])).logits[0, -1]
        engine.pool.give(sequence.pages, owner)
        worst = max(worst, (ours - theirs).abs().max().item())
    assert worst < 2e-4, worst
