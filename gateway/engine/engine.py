"""The engine: requests in, events out, one iteration at a time. No threads, no clock, no I/O
of its own but the adapter reader's."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numba
import torch
from torch import Tensor

from gateway.engine import kernels
from gateway.engine.kernels.gpu_graphs import CudaGraphs
from gateway.engine.memory.buffer import KvShape, PageBuffer
from gateway.engine.memory.pager import AdapterPager, Resident
from gateway.engine.memory.pages import PagePool
from gateway.engine.messages import EngineSettings, Event, ModelInfo, Stats, Submit
from gateway.engine.model import weights
from gateway.engine.model.adapter import read_adapter
from gateway.engine.model.batch import Batch
from gateway.engine.model.config import ModelConfig
from gateway.engine.model.decoder import Decoder
from gateway.engine.model.errors import ModelError
from gateway.engine.model.graph_check import checked_graphs
from gateway.engine.model.graphs import NoGraphs
from gateway.engine.model.rope import Rope
from gateway.engine.model.sampling import Draw, sample
from gateway.engine.model.warm_up import warm_up
from gateway.engine.scheduling.plan import Slice
from gateway.engine.scheduling.scheduler import Limits, Scheduler


class Engine:
    """One base model, one page pool. `wake` is called from another thread when an adapter that
    requests wait for has been read."""

    def __init__(self, settings: EngineSettings, wake: Callable[[], None] = lambda: None) -> None:
        _use_threads(settings.threads or _cores())
        self.device = _device(settings.device)
        dtype = _dtype(settings.dtype, self.device)
        path = Path(settings.model)
        config, loaded, digest = weights.load(path, dtype)
        if self.device != "cpu":
            loaded = loaded.to(self.device)
        limits = _limits(settings, config)
        shape = KvShape(config.layers, settings.block_tokens, config.kv_heads, config.head_dim)
        pages = PageBuffer.pages_in(int(settings.pool_mib * 2**20), shape, dtype)
        if pages < 2:
            raise ModelError(f"engine.pool_mib = {settings.pool_mib} holds {pages} pages; raise it")
        try:
            buffer = PageBuffer(pages, shape, dtype, self.device)
        except RuntimeError as error:  # also what torch raises when memory runs out
            raise ModelError(
                f"engine.pool_mib = {settings.pool_mib} is more than can be had; lower it"
            ) from error
        self._buffer = buffer
        projections = _projections(config)
        self.pool = PagePool(pages)
        self.pager = AdapterPager(
            self.pool,
            buffer,
            partial(
                read_adapter,
                projections=projections,
                page_elements=shape.page_elements,
                dtype=dtype,
                pin=self.device == "cuda",
            ),
            settings.host_adapters_mib * 2**20,
            wake,
        )
        self.scheduler = Scheduler(limits, self.pool, self.pager)
        self._decoder = Decoder(
            config,
            loaded,
            Rope(config, limits.context_tokens, self.device),
            buffer,
            kernels.choose(self.device),
        )
        warm_up(self._decoder, projections)
        self._graphs = (
            checked_graphs(
                self._decoder,
                projections,
                min(limits.running_max, pages),  # each sequence has a page of its own at least
                limits.context_tokens,
                CudaGraphs,
            )
            if self.device == "cuda" and settings.cuda_graphs
            else NoGraphs()
        )
        self._block_tokens = settings.block_tokens
        self.info = ModelInfo(
            digest=digest,
            name=settings.name or (path.stem if path.is_file() else path.name).lower(),
            model_path=settings.model,
            architecture=config.architecture,
            layers=config.layers,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            context_tokens=limits.context_tokens,
            eos_token_ids=config.eos_token_ids,
            projections=projections,
            dtype=str(dtype).removeprefix("torch."),
            device=self.device,
        )
        self._iterations = self._prefill_tokens = self._decode_tokens = 0
        self._batch_adapters_max = 0

    def submit(self, request: Submit) -> list[Event]:
        failure = self.scheduler.submit(request)
        return [failure] if failure else []

    @property
    def busy(self) -> bool:
        """Whether a step would compute; else only a command or `wake` can change anything."""
        return self.scheduler.busy

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """One iteration. Returns no events and computes nothing while all wait for adapters."""
        plan = self.scheduler.plan()
        if not plan.slices:
            return plan.events
        logits_SV = self._forward(plan.slices)
        draws = [
            Draw(item.sequence.request.sampling, len(item.sequence.tokens))
            for item in plan.slices
            if item.samples
        ]
        self._count(plan.slices)
        return plan.events + self.scheduler.commit(plan, sample(logits_SV, draws))

    def _forward(self, slices: list[Slice]) -> Tensor:
        for adapter in _adapters(slices).values():
            self._buffer.settle(adapter.pages)
        logits_SV = self._graphs.forward(slices)
        if logits_SV is None:
            batch = Batch.pack(slices, self._block_tokens, self.device)
            logits_SV = self._decoder.forward(batch)
        return logits_SV

    def stats(self, query_id: str) -> Stats:
        return Stats(
            query_id=query_id,
            pages_total=self.pool.total,
            pages_free=self.pool.free,
            pages_kv=self.pool.owned("kv"),
            pages_adapters=self.pool.owned("adapter"),
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            iterations=self._iterations,
            prefill_tokens=self._prefill_tokens,
            decode_tokens=self._decode_tokens,
            preemptions=self.scheduler.preemptions,
            adapters_resident=self.pager.resident_count,
            adapters_host=self.pager.host_count,
            adapter_loads=self.pager.loads,
            adapter_reads=self.pager.reads,
            batch_adapters_max=self._batch_adapters_max,
        )

    def close(self) -> None:
        self.pager.close()

    def _count(self, slices: list[Slice]) -> None:
        decodes = sum(item.sequence.generated > 0 and item.length == 1 for item in slices)
        self._iterations += 1
        self._decode_tokens += decodes
        self._prefill_tokens += sum(item.length for item in slices) - decodes
        self._batch_adapters_max = max(self._batch_adapters_max, len(_adapters(slices)))


def _adapters(slices: list[Slice]) -> dict[str, Resident]:
    """Those that these slices use, by digest."""
    return {
        item.sequence.digest: item.sequence.adapter
        for item in slices
        if item.sequence.digest is not None and item.sequence.adapter is not None
    }


def _projections(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(out_features, in_features) of every target module."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return {
        "q_proj": (q_rows, hidden),
        "k_proj": (kv_rows, hidden),
        "v_proj": (kv_rows, hidden),
        "o_proj": (hidden, q_rows),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }


def _use_threads(count: int) -> None:
    """Of torch and of the compiled loops; they never run at the same time."""
    if count > (os.cpu_count() or 1):
        raise ModelError(f"engine.threads = {count} is more than this machine has cores")
    torch.set_num_threads(count)
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _device(asked: str) -> str:
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cuda" and not torch.cuda.is_available():
        raise ModelError("engine.device = cuda, but torch sees no CUDA device")
    return asked


def _dtype(asked: str, device: str) -> torch.dtype:
    if asked == "auto":
        return torch.bfloat16 if device == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, asked)
    return dtype


def _limits(settings: EngineSettings, config: ModelConfig) -> Limits:
    if settings.step_tokens < settings.running_max:
        raise ModelError("engine.step_tokens must not be less than engine.running_max")
    if min(settings.block_tokens, settings.running_max, settings.waiting_max) < 1:
        raise ModelError("engine.block_tokens, running_max and waiting_max must be at least 1")
    context = settings.context_tokens or config.context_tokens
    return Limits(
        context_tokens=min(context, config.context_tokens),
        vocab_size=config.vocab_size,
        block_tokens=settings.block_tokens,
        step_tokens=settings.step_tokens,
        running_max=settings.running_max,
        waiting_max=settings.waiting_max,
    )
