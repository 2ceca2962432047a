"""An engine without torch, and a tokenizer whose tokens are bytes, for tests of the HTTP side."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gateway.engine.client import Account, EndReason, EngineFailure, NoAccount
from gateway.engine.messages import (
    EMBEDDINGS,
    FailureCode,
    Finished,
    ModelInfo,
    Place,
    Stats,
    Submit,
    Tokens,
)

IM_START, IM_END, END_OF_TEXT = 256, 257, 258
SPECIAL_TOKENS = {"<|im_start|>": IM_START, "<|im_end|>": IM_END, "<|endoftext|>": END_OF_TEXT}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def model_info(
    model_path: Path | str = "",
    *,
    digest: str = "ba5e" * 16,
    name: str = "smollm2-135m-instruct",
    context_tokens: int = 2048,
    dtype: str = "float32",
) -> ModelInfo:
    """SmolLM2-135M's shapes."""
    return ModelInfo(
        digest=digest,
        name=name,
        model_path=str(model_path),
        architecture="llama",
        layers=30,
        hidden_size=576,
        vocab_size=49152,
        context_tokens=context_tokens,
        eos_token_ids=[IM_END],
        projections={
            "q_proj": (576, 576),
            "k_proj": (192, 576),
            "v_proj": (192, 576),
            "o_proj": (576, 576),
            "gate_proj": (1536, 576),
            "up_proj": (1536, 576),
            "down_proj": (576, 1536),
        },
        embeddings_sha256=dict.fromkeys(EMBEDDINGS, "e3bed" + "0" * 59),
        dtype=dtype,
        device="cpu",
    )


def byte_ids(text: str) -> list[int]:
    """The tokens of `text` for `byte_tokenizer_folder`'s tokenizer: its UTF-8 bytes."""
    return list(text.encode())


def byte_tokenizer_folder(folder: Path) -> Path:
    """Write a Hugging Face tokenizer folder in which the id of a byte is the byte."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {character: byte for byte, character in _byte_characters().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHAT_TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    model = {"model_type": "llama", "eos_token_id": IM_END, "bos_token_id": IM_START}
    (folder / "config.json").write_text(json.dumps(model))
    return folder


def _byte_characters() -> dict[int, str]:
    """GPT-2's map from bytes to printable characters."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    characters = {byte: chr(byte) for byte in printable}
    rest = [byte for byte in range(256) if byte not in characters]
    return characters | {byte: chr(256 + place) for place, byte in enumerate(rest)}


@dataclass
class Script:
    """What the fake engine does with one request."""

    steps: Sequence[Sequence[int]] = ()
    """Token ids of each iteration."""
    delay_s: float = 0.0
    """Before each iteration."""
    first_delay_s: float = 0.0
    """Before the first iteration, on top."""
    failure: tuple[FailureCode, str] | None = None
    """Raised after the steps, instead of an end."""
    reason: Literal["stop", "length"] = "stop"
    cached_tokens: int = 0
    """Of the prompt."""
    hang: bool = False
    """After the steps, neither end nor fail."""
    raises: BaseException | None = None
    """Raised after the steps; for what an engine should never do."""


def says(text: str, *, per_step: int = 4, **more: object) -> Script:
    """A script that answers `text`, `per_step` bytes an iteration."""
    ids = byte_ids(text)
    steps = [ids[start : start + per_step] for start in range(0, len(ids), per_step)]
    return Script(steps, **more)  # type: ignore[arg-type]  # fields of Script, checked at run time


def _answer(request: Submit) -> Script:
    return says(f"Hello from {request.adapter.digest[:8] if request.adapter else 'the base'}.")


@dataclass
class FakeEngine:
    """Implements `gateway.engine.client.Engine`; keeps a record of everything asked of it."""

    model: ModelInfo = field(default_factory=model_info)
    script: Callable[[Submit], Script] = _answer
    """Chooses what to do with a request; replace it whenever a test likes."""
    ready: bool = True
    """False: loading, or lost."""
    load_failure: str = ""
    """Makes `wait_ready` fail with this detail."""

    submits: list[Submit] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    unloads: list[str] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    produced: dict[str, int] = field(default_factory=dict)
    """Tokens made for each request, whether anybody got them or not."""
    started: bool = False
    closed: bool = False

    def __post_init__(self) -> None:
        self._changed = asyncio.Event()

    def reset(self) -> None:
        """As new, but for the model and what still runs."""
        self.script = _answer
        self.submits.clear()
        self.cancels.clear()
        self.unloads.clear()
        self.produced.clear()
        self.ready = True

    async def start(self) -> None:
        self.started = True

    async def wait_ready(self) -> ModelInfo:
        while not self.ready:
            if self.load_failure:
                raise EngineFailure("engine_lost", self.load_failure)
            self._changed.clear()
            await self._changed.wait()
        return self.model

    def set_ready(self, ready: bool) -> None:
        self.ready = ready
        self._changed.set()

    @property
    def info(self) -> ModelInfo | None:
        return self.model if self.ready else None

    def submit(self, request: Submit, account: Account | None = None) -> "FakeStream":
        return FakeStream(self, request, account or NoAccount())

    async def stats(self) -> Stats:
        if not self.ready:
            raise EngineFailure("engine_lost", "the worker is not there")
        return Stats(
            query_id="",
            pages_total=100,
            pages_free=100 - len(self.running),
            pages_kv=len(self.running),
            pages_prefixes=0,
            pages_adapters=0,
            running=len(self.running),
            waiting=0,
            iterations=0,
            prefill_tokens=0,
            decode_tokens=0,
            cached_tokens=0,
            preemptions=0,
            adapters_resident=0,
            adapters_host=0,
            adapter_loads=0,
            adapter_reads=0,
            batch_adapters_max=0,
        )

    async def places(self, digests: Sequence[str]) -> Mapping[str, Place]:
        """In the pool, if it had a request with it that was not unloaded since."""
        if not self.ready:
            raise EngineFailure("engine_lost", "the worker is not there")
        used = {submit.adapter.digest for submit in self.submits if submit.adapter is not None}
        loaded = used - set(self.unloads)
        return {digest: "pool" if digest in loaded else "store" for digest in digests}

    async def unload(self, digest: str) -> None:
        self.unloads.append(digest)

    async def close(self) -> None:
        self.closed = True


class FakeStream:
    """Plays the script of one request. One that is left early makes the step that had begun, which
    nobody reads, before it acknowledges that."""

    def __init__(self, engine: FakeEngine, request: Submit, account: Account) -> None:
        self._engine = engine
        self._request = request
        self._account = account
        self._script = engine.script(request)
        self._steps = 0
        self._produced = 0
        self._ended = False
        self._events = self._play()

    async def __aenter__(self) -> Self:
        if not self._engine.ready:
            raise EngineFailure("engine_lost", "the worker is not there")
        self._engine.submits.append(self._request)
        self._engine.running.add(self._request.request_id)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._engine.running.discard(self._request.request_id)
        if not self._ended:
            self._engine.cancels.append(self._request.request_id)
            asyncio.get_running_loop().call_soon(self._acknowledge)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Tokens | Finished:
        return await anext(self._events)

    async def _play(self) -> AsyncIterator[Tokens | Finished]:
        request, script = self._request, self._script
        await asyncio.sleep(script.first_delay_s)
        while self._goes_on:
            await asyncio.sleep(script.delay_s)
            yield Tokens(request.request_id, self._step())
        if script.hang:
            await asyncio.Event().wait()
        self._ended = True
        if script.raises is not None or script.failure is not None:
            self._finish("failed")
            raise script.raises or EngineFailure(*(script.failure or ("internal", "")))
        reason = script.reason if self._room else "length"
        self._finish(reason)
        yield Finished(request.request_id, reason, len(request.prompt), self._produced)

    @property
    def _room(self) -> int:
        return self._request.max_tokens - self._produced

    @property
    def _goes_on(self) -> bool:
        return self._room > 0 and self._steps < len(self._script.steps)

    def _step(self) -> list[int]:
        ids = list(self._script.steps[self._steps])[: self._room]
        self._steps += 1
        if ids and not self._produced:
            self._account.begin(len(self._request.prompt), self._script.cached_tokens)
        self._produced += len(ids)
        self._engine.produced[self._request.request_id] = self._produced
        self._account.produced(len(ids))
        return ids

    def _acknowledge(self) -> None:
        if self._produced and self._goes_on:
            self._step()
        self._finish("cancelled")

    def _finish(self, reason: EndReason) -> None:
        prompt = len(self._request.prompt) if self._produced or reason in ("stop", "length") else 0
        cached = self._script.cached_tokens if prompt else 0
        self._account.finish(reason, prompt, self._produced, cached)
