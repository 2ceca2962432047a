"""The engine: requests in, events out, one iteration at a time. No threads, no clock, no I/O
of its own but the adapter reader's."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gateway.engine import kernels, options
from gateway.engine.kernels.gpu_graphs import CudaGraphs
from gateway.engine.memory.buffer import KvShape, PageBuffer
from gateway.engine.memory.costs import Costs
from gateway.engine.memory.pager import AdapterPager
from gateway.engine.memory.pages import PagePool
from gateway.engine.memory.radix import RadixCache
from gateway.engine.memory.reclaim import ReclaimOrder
from gateway.engine.memory.supply import PageSupply
from gateway.engine.messages import EngineSettings, Event, Finished, ModelInfo, Stats, Submit
from gateway.engine.model import weights
from gateway.engine.model.adapter import read_adapter
from gateway.engine.model.batch import Batch
from gateway.engine.model.compiled_decoder import CompiledDecoder
from gateway.engine.model.compiled_sampler import CompiledSampler
from gateway.engine.model.config import ModelConfig
from gateway.engine.model.decoder import Decoder
from gateway.engine.model.errors import ModelError
from gateway.engine.model.graph_check import checked_graphs
from gateway.engine.model.graphs import DecodeGraphs, NoGraphs
from gateway.engine.model.rope import Rope
from gateway.engine.model.sampling import Draw, Sampler, sample
from gateway.engine.model.warm_up import warm_up
from gateway.engine.scheduling.admission import Memory
from gateway.engine.scheduling.lookahead import ObservedLengths
from gateway.engine.scheduling.plan import Slice
from gateway.engine.scheduling.scheduler import Scheduler
from gateway.engine.steplog import Share, StepRecord, Totals, shares


class Engine:
    """One base model, one page pool. `wake` is called from another thread when an adapter that
    requests wait for has been read; `log` gets a record of each iteration; `supply` decides
    where pages come from."""

    def __init__(
        self,
        settings: EngineSettings,
        wake: Callable[[], None] = lambda: None,
        log: Callable[[StepRecord], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        supply: type[PageSupply] = PageSupply,
    ) -> None:
        threads = options.threads(settings.threads)
        self.device = options.device(settings.device)
        dtype = options.dtype(settings.dtype, self.device)
        self.batch_invariant = options.batch_invariant(settings.batch_invariant, self.device, dtype)
        path = Path(settings.model)
        config, loaded, digest = weights.load(path, dtype)
        limits = options.limits(settings, config)
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
            projections=config.projections,
            embeddings_sha256=weights.embedding_digests(loaded),
            dtype=str(dtype).removeprefix("torch."),
            device=self.device,
        )
        if self.device != "cpu":
            loaded = loaded.to(self.device)
        buffer = self._buffer = _page_buffer(settings, config, dtype, self.device)
        self.pool = PagePool(buffer.pages)
        reclaim, self._costs = ReclaimOrder(), Costs()
        self.pager = AdapterPager(
            self.pool,
            reclaim,
            buffer,
            partial(
                read_adapter,
                projections=self.info.targets,
                page_elements=buffer.shape.page_elements,
                dtype=dtype,
                pin=self.device == "cuda",
            ),
            settings.host_adapters_mib * 2**20,
            wake,
            self._costs,
            clock=clock,
        )
        self.radix = RadixCache(
            self.pool,
            reclaim,
            lambda: self._costs.block_s(limits.block_tokens, limits.step_tokens),
        )
        self.scheduler = Scheduler(
            limits,
            Memory(
                self.pool,
                self.pager,
                self.radix,
                supply(self.pool, self.pager, self.radix, reclaim),
            ),
            ObservedLengths(),
            self._costs,
            clock,
        )
        self._log = log
        rope = Rope(config, limits.context_tokens, self.device)
        self._decoder: Decoder | CompiledDecoder
        self._sample: Sampler = sample
        if options.compiled(self.device, dtype):
            self._decoder = CompiledDecoder(config, loaded, rope, buffer, threads)
            self._sample = CompiledSampler(config.vocab_size, threads).sample
        else:
            ops = kernels.choose(self.device, self.batch_invariant)
            self._decoder = Decoder(config, loaded, rope, buffer, ops)
        warm_up(self._decoder, self.info.targets, self._sample)
        self._graphs: DecodeGraphs | NoGraphs = NoGraphs()
        if isinstance(self._decoder, Decoder) and self.device == "cuda" and settings.cuda_graphs:
            # each sequence has a page of its own at least
            rows_max = min(limits.running_max, buffer.pages)
            self._graphs = checked_graphs(
                self._decoder, self.info.targets, rows_max, limits.context_tokens, CudaGraphs
            )
        self._block_tokens = settings.block_tokens
        self._totals = Totals()

    def submit(self, request: Submit) -> list[Event]:
        return self.scheduler.submit(request)

    def unload(self, digest: str) -> None:
        """Forget an adapter version and all that was computed with it; running requests that use
        it end as they began."""
        self.pager.unload(digest)
        self.radix.forget(digest)

    @property
    def busy(self) -> bool:
        """Whether a step would compute; else only a command or `wake` can change anything."""
        return self.scheduler.busy

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """One iteration. Returns no events and computes nothing while all wait for adapters."""
        started, before = time.perf_counter(), self._counts()
        plan = self.scheduler.plan()
        planned = time.perf_counter()
        if not plan.slices:
            return plan.events
        logits_SV = self._forward(plan.slices)
        draws = [
            Draw(item.sequence.request.sampling, len(item.sequence.tokens))
            for item in plan.slices
            if item.samples
        ]
        sampled = self._sample(logits_SV, draws)
        computed = time.perf_counter()
        had = shares(plan) if self._log is not None else []
        self._totals.count(plan)
        events = plan.events + self.scheduler.commit(plan, sampled)
        self._costs.step.measured(sum(item.length for item in plan.slices), computed - started)
        self._totals.cached_tokens += sum(
            event.cached_tokens for event in events if isinstance(event, Finished)
        )
        if self._log is not None:
            seconds = planned - started, computed - planned, time.perf_counter() - computed
            self._log(self._record(had, before, seconds))
        return events

    def _forward(self, slices: list[Slice]) -> Tensor:
        for item in slices:
            if item.sequence.adapter is not None:
                self._buffer.settle(item.sequence.adapter.pages)
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
            pages_prefixes=self.pool.owned("prefix"),
            pages_adapters=self.pool.owned("adapter"),
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            iterations=self._totals.iterations,
            prefill_tokens=self._totals.prefill_tokens,
            decode_tokens=self._totals.decode_tokens,
            cached_tokens=self._totals.cached_tokens,
            preemptions=self.scheduler.preemptions,
            adapters_resident=self.pager.resident_count,
            adapters_host=self.pager.host_count,
            adapter_loads=self.pager.loads,
            adapter_reads=self.pager.reads,
            batch_adapters_max=self._totals.batch_adapters_max,
        )

    def close(self) -> None:
        self.pager.close()

    def _counts(self) -> tuple[int, int, int]:
        return self.pager.loads, self.pager.bytes_loaded, self.scheduler.preemptions

    def _record(
        self, had: list[Share], before: tuple[int, int, int], seconds: tuple[float, float, float]
    ) -> StepRecord:
        loads, bytes_loaded, preemptions = self._counts()
        return StepRecord(
            self._totals.iterations,
            had,
            self.pool.owned("kv"),
            self.pool.owned("prefix"),
            self.pool.owned("adapter"),
            loads - before[0],
            bytes_loaded - before[1],
            preemptions - before[2],
            *seconds,
        )


def _page_buffer(
    settings: EngineSettings, config: ModelConfig, dtype: torch.dtype, device: str
) -> PageBuffer:
    shape = KvShape(config.layers, settings.block_tokens, config.kv_heads, config.head_dim)
    pages = PageBuffer.pages_in(int(settings.pool_mib * 2**20), shape, dtype)
    if pages < 2:
        raise ModelError(f"engine.pool_mib = {settings.pool_mib} holds {pages} pages; raise it")
    try:
        return PageBuffer(pages, shape, dtype, device)
    except RuntimeError as error:  # also what torch raises when memory runs out
        raise ModelError(
            f"engine.pool_mib = {settings.pool_mib} is more than can be had; lower it"
        ) from error
