"""Decoding steps of some layers: as recorded graphs are they what they are launched one by one,
and how much sooner are they done? Needs what `benchmarks.gpu_check` needs."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from types import ModuleType
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gateway.engine.kernels.gpu_fixed import Decode, FixedTables, Step
from gateway.engine.kernels.gpu_graphs import Record, Run
from gateway.engine.kernels.gpu_upload import upload
from gateway.engine.kernels.segments import AttentionSpan, LoraSegment, Work
from gateway.engine.memory.buffer import KvShape, PageBuffer
from gateway.engine.memory.rows import RowLayout, TargetRank

LAYERS = 2
VOCABULARY = 100
ALLOWED = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Distance of two rows ÷ the length of one: products of padded batches are rounded differently."""
RANKS = (16, 8, 64, 3)


class Model(Protocol):
    @property
    def hidden(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def projections(self) -> dict[str, tuple[int, int]]: ...


class Rows(NamedTuple):
    """A batch: as many sequences, of this context, with as many adapters."""

    rows: int
    context: int
    adapters: int


class Steps:
    """Layers with random weights over a pool of random numbers."""

    def __init__(
        self,
        kernels: ModuleType,
        model: Model,
        dtype: torch.dtype,
        device: str,
        rows_max: int,
        context_max: int,
    ) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.kernels, self.model = kernels, model
        self.rows_max, self.context_max = rows_max, context_max

        def random(*shape: int) -> Tensor:
            values = torch.randn(*shape, generator=generator, device=device)
            return values.div_(shape[-1] ** 0.5).to(dtype)

        shape = KvShape(LAYERS, model.block_tokens, model.kv_heads, model.head_dim)
        blocks = -(-context_max // model.block_tokens)
        self.buffer = PageBuffer(rows_max * blocks, shape, dtype, device)
        self.embed_VD = random(VOCABULARY, model.hidden) * model.hidden**0.5
        self.head_VD = random(VOCABULARY, model.hidden)
        self.norm_D = torch.ones(model.hidden, dtype=dtype, device=device)
        self.widths = widths = model.projections | {
            "embed_tokens": (model.hidden, VOCABULARY),
            "lm_head": (VOCABULARY, model.hidden),
        }
        qkv = sum(widths[name][0] for name in ("q_proj", "k_proj", "v_proj"))
        self.layers = [
            (
                random(qkv, model.hidden),
                random(*widths["o_proj"]),
                random(2 * widths["up_proj"][0], model.hidden),
                random(*widths["down_proj"]),
            )
            for _ in range(LAYERS)
        ]
        angle = torch.rand(context_max, model.head_dim // 2, generator=generator, device=device)
        both = torch.cat((angle, angle), dim=-1) * 6
        self.cos_PE, self.sin_PE = both.cos().to(dtype), both.sin().to(dtype)
        page_elements = shape.page_elements
        storable = [name for name, size in widths.items() if max(size) <= page_elements]
        summed = {name: size[1] for name, size in widths.items()} | {"embed_tokens": 1}
        self.layouts = [
            RowLayout.plan(
                {
                    (layer, name): TargetRank(rank, 2 * (summed[name] * rank) ** -0.5)
                    for layer in range(LAYERS)
                    for name in storable
                    if layer == 0 or name not in ("embed_tokens", "lm_head")
                },
                widths,
                page_elements,
            )
            for rank in RANKS
        ]
        self.tables: dict[int, dict[str, object]] = {}

    def randomize(self) -> None:
        """The same numbers each time."""
        generator = torch.Generator(self.buffer.device).manual_seed(0)
        self.buffer.pages_NP.normal_(generator=generator)

    def forward(self, step: Step, spans: Work[AttentionSpan], lora: Work[LoraSegment]) -> Tensor:
        """Logits (T, V) after all layers, as the decoder computes them."""
        kernels, model, pages_NP = self.kernels, self.model, self.buffer.pages_NP
        x_TD = F.embedding(step.tokens_T, self.embed_VD)
        if lora:
            gathered = kernels.lora_gather(step.tokens_T, pages_NP, lora, 0, "embed")
            kernels.lora_expand(gathered, pages_NP, lora, 0, "embed", x_TD)
        rope = self.cos_PE[step.positions_T], self.sin_PE[step.positions_T]

        def adapted(x_TD: Tensor, weight_CD: Tensor, group: str, layer: int) -> Tensor:
            y_TC = F.linear(x_TD, weight_CD)
            if lora:
                shrunk = kernels.lora_shrink(x_TD, pages_NP, lora, layer, group)
                kernels.lora_expand(shrunk, pages_NP, lora, layer, group, y_TC)
            return y_TC

        for index, (qkv_CD, o_DC, gate_up_FD, down_DF) in enumerate(self.layers):
            cache = self.buffer.kv_layers[index]
            normed_TD = kernels.rms_norm(x_TD, self.norm_D, 1e-5)
            qkv_TC = adapted(normed_TD, qkv_CD, "qkv", index)
            qkv_TXE = qkv_TC.view(len(x_TD), -1, model.head_dim)
            keys = model.heads + model.kv_heads
            q_THE, k_TKE, v_TKE = qkv_TXE.tensor_split([model.heads, keys], dim=1)
            q_THE, k_TKE = kernels.rotate(q_THE, *rope), kernels.rotate(k_TKE, *rope)
            kernels.write_kv(k_TKE, v_TKE, cache, step.page_T, step.slot_T)
            scale = model.head_dim**-0.5
            out_THE = kernels.paged_attention(q_THE, cache, spans, scale, None)
            x_TD = x_TD + adapted(out_THE.flatten(1), o_DC, "o", index)
            normed_TD = kernels.rms_norm(x_TD, self.norm_D, 1e-5)
            gate_up_TC = adapted(normed_TD, gate_up_FD, "gate_up", index)
            gate_TF, up_TF = gate_up_TC.chunk(2, dim=-1)
            x_TD = x_TD + adapted(F.silu(gate_TF) * up_TF, down_DF, "down", index)
        return adapted(kernels.rms_norm(x_TD, self.norm_D, 1e-5), self.head_VD, "head", 0)

    # --- batches --------------------------------------------------------------------------------

    def decodes(self, batch: Rows) -> list[Decode]:
        """Sequences of about that length, whose pages lie apart."""
        block_tokens, total = self.model.block_tokens, len(self.buffer.pages_NP)
        decodes = []
        for row in range(batch.rows):
            position = max(0, batch.context - 1 - row % 3)
            pages = range(row, total, self.rows_max)[: position // block_tokens + 1]
            decodes.append(Decode(row % VOCABULARY, position, list(pages)))
        return decodes

    def segments(self, batch: Rows) -> list[LoraSegment]:
        """One adapter after another; the first row has none if there are fewer than rows."""
        first = int(batch.adapters < batch.rows)
        borders = [
            first + (batch.rows - first) * index // batch.adapters
            for index in range(batch.adapters + 1)
        ] if batch.adapters else []  # fmt: skip
        segments = []
        for index, (start, stop) in enumerate(pairwise(borders)):
            layout = self.layouts[index % len(self.layouts)]
            pages = [(index + page) % len(self.buffer.pages_NP) for page in range(layout.pages)]
            tables = self.tables.setdefault(index, {})
            segments.append(LoraSegment(start, stop, layout, pages, tables))
        return segments

    # --- both ways ------------------------------------------------------------------------------

    def launched(self, batch: Rows) -> Tensor:
        decodes, block_tokens = self.decodes(batch), self.model.block_tokens
        inputs = [
            (item.token, item.position, item.pages[-1], item.position % block_tokens)
            for item in decodes
        ]
        columns = [np.array(column) for column in zip(*inputs, strict=True)]
        pages_of_all = np.concatenate([item.pages for item in decodes])
        *step, pages = upload([*columns, pages_of_all], self.buffer.pages_NP.device)
        stops = np.cumsum([len(item.pages) for item in decodes]).tolist()
        spans = [
            AttentionSpan(row, row + 1, item.position + 1, its_pages)
            for row, (item, its_pages) in enumerate(
                zip(decodes, pages.tensor_split(stops[:-1]), strict=True)
            )
        ]
        return self.forward(Step(*step), Work(spans), Work(self.segments(batch)))

    def recorded(self, record: Record) -> Callable[[Rows], Tensor]:
        """What computes a batch from fixed tables, with room for the largest."""
        model, rows = self.model, self.rows_max
        tables = FixedTables(
            self.buffer.pages_NP, model.block_tokens, self.widths, rows, self.context_max
        )
        step, spans, lora = tables.step(rows), tables.spans(rows), tables.lora(rows)
        nothing: Work[LoraSegment] = Work([])
        adapted: Run = record(lambda: self.forward(step, spans, lora))
        bare: Run = record(lambda: self.forward(step, spans, nothing))

        def replayed(batch: Rows) -> Tensor:
            assert tables.fill(rows, self.decodes(batch), self.segments(batch))
            return (adapted if batch.adapters else bare)()[: batch.rows]

        return replayed


def difference(steps: Steps, record: Record, batches: Sequence[Rows]) -> float:
    """The largest of all rows, as a share of what is allowed."""
    replayed = steps.recorded(record)
    found = []
    for batch in batches:
        steps.randomize()
        expected = steps.launched(batch).float()
        steps.randomize()
        distance = (replayed(batch).float() - expected).norm(dim=-1)
        found.append(float((distance / expected.norm(dim=-1)).max()))
    return max(found) / ALLOWED[steps.buffer.dtype]


def times(steps: Steps, record: Record, batch: Rows) -> Iterator[float]:
    """Seconds of a step with all that it takes on the host: launched, then replayed."""
    replayed = steps.recorded(record)
    for computed in steps.launched, replayed:
        took = []
        for _ in range(12):
            torch.cuda.synchronize()
            start = time.perf_counter()
            computed(batch)
            torch.cuda.synchronize()
            took.append(time.perf_counter() - start)
        yield statistics.median(took[2:])
