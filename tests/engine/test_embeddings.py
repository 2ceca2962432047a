"""LoRA on the input and output embeddings, tied and untied: logits and answers are PEFT's."""

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file

from gateway.adapters.peft_format import write_manifest
from gateway.engine.engine import Engine
from gateway.engine.memory.pager import Resident
from gateway.engine.memory.pages import Owner
from gateway.engine.messages import (
    AdapterRef,
    EngineSettings,
    Failed,
    Finished,
    Sampling,
    Submit,
    Tokens,
)
from gateway.engine.model.adapter import read_adapter
from gateway.engine.model.batch import Batch
from gateway.engine.scheduling.plan import Slice
from gateway.engine.scheduling.sequence import Sequence
from tests.engine.tiny import CONFIGS, save_adapter, save_model

BLOCK = 4
ADAPTERS: dict[str, dict[str, Any]] = {
    "head": {"target_modules": ["lm_head"], "r": 5},
    "embeddings": {"target_modules": ["embed_tokens"], "lora_alpha": 3},
    "layers": {"target_modules": "all-linear", "r": 1},
    "all": {
        "target_modules": ["embed_tokens", "lm_head", "q_proj", "down_proj"],
        "rank_pattern": {"lm_head": 2, "embed_tokens": 7},
        "use_rslora": True,
    },
    "tied": {"target_modules": ["embed_tokens", "v_proj"], "ensure_weight_tying": True},
}


class World:
    """A tiny model in an engine, its adapters, and the same in PEFT: each adapter on a model of
    its own, as PEFT ties those of tied embeddings only in the first one that it loads."""

    def __init__(self, folder: Path, config: str) -> None:
        self.model = save_model(CONFIGS[config], folder / "model")
        self.settings = EngineSettings(
            model=str(folder / "model"), pool_mib=2, block_tokens=BLOCK, step_tokens=64
        )
        self.engine = Engine(self.settings)
        self.adapters: dict[str, AdapterRef] = {}
        for seed, (name, options) in enumerate(ADAPTERS.items()):
            save_adapter(self.model, LoraConfig(**options), folder / name, seed)
            self.adapters[name] = write_manifest(folder / name, self.engine.info)
        self.references: dict[str, Any] = {"base": self.model}
        for name, ref in self.adapters.items():
            model = copy.deepcopy(self.model)
            self.references[name] = PeftModel.from_pretrained(model, ref.folder)

    @torch.inference_mode()
    def logits(self, name: str, tokens: list[int]) -> torch.Tensor:
        logits: torch.Tensor = self.references[name](torch.tensor([tokens])).logits[0, -1]
        return logits

    def answer(self, name: str, prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(name, tokens).argmax()))
        return tokens[len(prompt) :]

    def resident(self, name: str) -> Resident:
        buffer = self.engine._decoder.buffer
        page_elements = buffer.shape.page_elements
        slab = read_adapter(
            self.adapters[name], self.engine.info.targets, page_elements, torch.float32
        )
        owner = Owner("adapter", name)
        pages = self.engine.pool.take(slab.layout.pages, owner)
        buffer.load(slab, pages)
        return Resident(slab.layout, pages, owner)


@pytest.fixture(scope="module", params=["llama", "llama-tied", "qwen3"])
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("world"), request.param)
    yield world
    world.engine.close()


def prompt(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 256, (length,), generator=generator).tolist()


def test_logits_equal_pefts_whatever_the_chunks_and_whoever_samples(world: World) -> None:
    """Each step computes a random part of each sequence, so that some sample and some do not."""
    draw = random.Random(0)
    sequences = []
    pool = world.engine.pool
    for name in ["base", *ADAPTERS]:
        adapter = None if name == "base" else world.resident(name)
        for index in range(3):
            ref = None if name == "base" else world.adapters[name]
            tokens = prompt(index, draw.choice([1, 5, 9, 40]))
            sequence = Sequence(Submit(f"{name} {index}", tokens, 1, Sampling(), ref), 0)
            sequence.pages = pool.take(-(-len(tokens) // BLOCK), Owner("kv", name))
            sequence.adapter = adapter
            sequences.append((name, sequence))
    sampled = 0
    while pending := [item for item in sequences if item[1].pending]:
        running = [
            (name, Slice(sequence, draw.randint(1, sequence.pending)))
            for name, sequence in pending
            if draw.random() < 0.8
        ]
        with torch.inference_mode():
            batch = Batch.pack([item for _, item in running], BLOCK, "cpu")
            rows = iter(world.engine._decoder.forward(batch))
        for name, item in running:
            if item.samples:
                expected = world.logits(name, item.sequence.tokens)
                torch.testing.assert_close(next(rows), expected, atol=2e-4, rtol=0)
                sampled += 1
        for _, item in running:
            item.sequence.computed += item.length
    assert sampled == len(sequences)
    for name, sequence in sequences:
        pool.give(sequence.pages, Owner("kv", name))
    for name, adapter in {name: sequence.adapter for name, sequence in sequences}.items():
        if adapter is not None:
            pool.give(adapter.pages, Owner("adapter", name))


def finished(engine: Engine) -> tuple[dict[str, list[int]], dict[str, Finished | Failed]]:
    tokens: dict[str, list[int]] = {}
    ends: dict[str, Finished | Failed] = {}
    while engine.scheduler.waiting or engine.scheduler.running:
        for event in engine.step():
            if isinstance(event, Tokens):
                tokens.setdefault(event.request_id, []).extend(event.ids)
            elif isinstance(event, Finished | Failed):
                ends[event.request_id] = event
        engine.pool.check()
    return tokens, ends


def test_greedy_answers_in_one_batch_are_pefts(world: World) -> None:
    expected = {}
    for name in ["base", *ADAPTERS]:
        for index, length in enumerate((2, 33)):
            ref = None if name == "base" else world.adapters[name]
            request = f"{name} {index}"
            tokens = prompt(index, length)
            assert not world.engine.submit(Submit(request, tokens, 8, Sampling(temperature=0), ref))
            expected[request] = world.answer(name, tokens, 8)
    assert len({tuple(answer) for answer in expected.values()}) > 2 * len(ADAPTERS) - 2
    assert finished(world.engine)[0] == expected


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_an_adapter_that_overflows_fails_only_its_own_requests(
    world: World, tmp_path: Path, target: str
) -> None:
    fresh = save_model(world.model.config, tmp_path / "model")
    save_adapter(fresh, LoraConfig(r=2, target_modules=[target]), tmp_path / "adapter", 1)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file(
        {
            name: values * (1e30 if ".lora_" in name else 1)
            for name, values in load_file(file).items()
        },
        file,
    )
    huge = write_manifest(tmp_path / "adapter", world.engine.info)
    greedy = Sampling(temperature=0)
    for name, ref in {"huge": huge, "base": None, **world.adapters}.items():
        world.engine.submit(Submit(name, prompt(1, 4), 5, greedy, ref))
    tokens, ends = finished(world.engine)
    failed = ends.pop("huge")
    assert isinstance(failed, Failed)
    assert failed.code == "not_finite"
    assert tokens == {name: world.answer(name, prompt(1, 4), 5) for name in ends}


def test_rows_longer_than_a_page_are_refused_with_what_to_change(world: World) -> None:
    engine = Engine(EngineSettings(model=world.settings.model, pool_mib=2, block_tokens=1))
    page = engine._decoder.buffer.shape.page_elements
    assert page < 256
    for name in ("head", "layers"):
        engine.submit(Submit(name, prompt(1, 4), 2, Sampling(temperature=0), world.adapters[name]))
    tokens, ends = finished(engine)
    refused = ends["head"]
    assert isinstance(refused, Failed)
    assert refused.code == "adapter_failed"
    assert refused.detail.endswith(f"raise engine.block_tokens {-(-256 // page)}-fold")
    assert tokens["layers"] == world.answer("layers", prompt(1, 4), 2)
    engine.close()
