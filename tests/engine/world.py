"""A tiny model with its adapters, PEFT's answers, and an engine driven iteration by iteration."""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel

from gateway.adapters.peft_format import write_manifest
from gateway.engine.engine import Engine
from gateway.engine.messages import (
    AdapterRef,
    EngineSettings,
    Event,
    Failed,
    Finished,
    Sampling,
    Submit,
    Tokens,
)
from gateway.engine.steplog import StepRecord
from tests.engine.tiny import CONFIGS, save_adapter, save_model

GREEDY = Sampling(temperature=0)
ADAPTERS = {
    "rank 1, q and v": LoraConfig(r=1, lora_alpha=2, target_modules=["q_proj", "v_proj"]),
    "rank 3, all seven": LoraConfig(r=3, lora_alpha=3, target_modules="all-linear"),
    "rank 12, rank-stabilised": LoraConfig(
        r=12, lora_alpha=6, use_rslora=True, target_modules=["o_proj", "gate_proj", "k_proj"]
    ),
    "patterns": LoraConfig(
        r=4,
        lora_alpha=4,
        target_modules=["q_proj", "up_proj", "down_proj"],
        rank_pattern={"q_proj": 7, r"layers\.1\.mlp\.up_proj": 2},
        alpha_pattern={"down_proj": 16},
    ),
    "one layer": LoraConfig(
        r=8, lora_alpha=8, target_modules=["v_proj", "down_proj"], layers_to_transform=[1]
    ),
    "embeddings": LoraConfig(
        r=3, lora_alpha=2, target_modules=["embed_tokens", "lm_head", "k_proj"]
    ),
}


class World:
    """A tiny model, its adapters, and what PEFT answers."""

    def __init__(self, folder: Path) -> None:
        self.model_folder = folder / "model"
        self._model = save_model(CONFIGS["llama"], self.model_folder)
        self.info = self.engine().info
        self.refs: list[AdapterRef | None] = [None]
        self._wrapped: PeftModel | None = None
        for index, config in enumerate(ADAPTERS.values()):
            adapter = folder / f"adapter-{index}"
            save_adapter(self._model, config, adapter, seed=index)
            self.refs.append(write_manifest(adapter, self.info))
        for ref in self.refs[1:]:
            assert ref is not None
            if self._wrapped is None:
                self._wrapped = PeftModel.from_pretrained(self._model, ref.folder, ref.digest)
            else:
                self._wrapped.load_adapter(ref.folder, ref.digest)
        self._answers: dict[tuple[str, tuple[int, ...], int], list[int]] = {}

    def engine(
        self,
        pages: int = 200,
        clock: Callable[[], float] = time.monotonic,
        log: Callable[[StepRecord], None] | None = None,
        **options: Any,
    ) -> Engine:
        page_bytes = 2 * 2 * 4 * 2 * 16 * 4  # layers, k and v, block, KV heads, head dim, float32
        settings = EngineSettings(
            model=str(self.model_folder),
            block_tokens=4,
            pool_mib=pages * page_bytes / 2**20,
            **{"step_tokens": 16, "running_max": 8, "threads": 1} | options,
        )
        engine = Engine(settings, log=log, clock=clock)
        assert engine.pool.total == pages
        return engine

    @torch.inference_mode()
    def answer(self, ref: AdapterRef | None, prompt: list[int], count: int) -> list[int]:
        """Greedy tokens by PEFT and transformers, the whole sequence anew for each token."""
        assert self._wrapped is not None
        key = (ref.digest if ref else "", tuple(prompt), count)
        if key not in self._answers:
            tokens = list(prompt)
            for _ in range(count):
                tokens.append(int(self._logits(ref, tokens).argmax()))
            self._answers[key] = tokens[len(prompt) :]
        return self._answers[key]

    @torch.inference_mode()
    def would_answer(self, request: Submit, answer: Sequence[int]) -> bool:
        """Whether these are the request's greedy tokens by PEFT and transformers: one pass over
        all of them, as each follows from those before it."""
        length = len(request.prompt)
        tokens = [*request.prompt, *answer]
        chosen = self._all_logits(request.adapter, tokens[:-1]).argmax(-1)[length - 1 :]
        return chosen.tolist() == list(answer)

    def _logits(self, ref: AdapterRef | None, tokens: list[int]) -> torch.Tensor:
        return self._all_logits(ref, tokens)[-1]

    def _all_logits(self, ref: AdapterRef | None, tokens: list[int]) -> torch.Tensor:
        assert self._wrapped is not None
        if ref is not None:
            self._wrapped.set_adapter(ref.digest)
        with self._wrapped.disable_adapter() if ref is None else nullcontext():
            logits: torch.Tensor = self._wrapped(torch.tensor([tokens])).logits[0]
        return logits


def prompt(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 256, (length,), generator=generator).tolist()


class Driver:
    """Steps an engine, keeps what each request got, and checks its memory after every step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        self.ends: dict[str, Finished | Failed] = {}

    def submit(self, request: Submit) -> None:
        self.tokens[request.request_id] = []
        self.take(self.engine.submit(request))

    def step(self) -> None:
        if self.engine.busy:
            self.take(self.engine.step())
        else:
            time.sleep(1e-4)  # all wait for adapters; let them be read
        self.check()

    def check(self) -> None:
        pool, pager, radix = self.engine.pool, self.engine.pager, self.engine.radix
        pool.check()
        radix.check()
        assert pager.idle_pages + pager.held_pages == pool.owned("adapter")
        assert radix.idle_pages + radix.locked_pages == pool.owned("prefix")

    def finish(self) -> None:
        scheduler = self.engine.scheduler
        while scheduler.waiting or scheduler.running:
            self.step()
        assert self.engine.stats("").pages_kv == 0

    def take(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Tokens):
                self.cached.setdefault(event.request_id, event.cached_tokens)
                self.tokens[event.request_id] += event.ids
            elif isinstance(event, Finished | Failed):
                assert event.request_id not in self.ends, "a request ended twice"
                self.ends[event.request_id] = event
