"""The decoder on a CPU: weights packed once, each step one compiled call on all threads.

T tokens · S sampling tokens · D hidden size · V vocabulary · U units · G adapters
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gateway.engine.kernels import compiled_step, panels
from gateway.engine.kernels.segments import AttentionSpan, LoraSegment, Work
from gateway.engine.kernels.step_data import (
    Array,
    Attention,
    Model,
    Pool,
    Scratch,
    Tokens,
    Units,
)
from gateway.engine.kernels.team import OVER, team
from gateway.engine.memory.buffer import PageBuffer
from gateway.engine.model.batch import Batch
from gateway.engine.model.config import ModelConfig
from gateway.engine.model.rope import Rope
from gateway.engine.model.weights import Weights

ATTENTION_ROWS = 32
"""Query rows of an attention unit: tokens times the query heads of a KV head. They share one pass
over keys and values; their scores stay in the second-level cache up to some thousand tokens."""
UNIT_TOKENS = 16


class CompiledDecoder:
    """Does what `Decoder` does, in float32 or bfloat16. Takes the layers' weights out of `weights`,
    one by one, so that the model never lies in memory twice."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        rope: Rope,
        buffer: PageBuffer,
        threads: int,
    ) -> None:
        self.config = config
        self.buffer = buffer
        self._team = team(threads)
        self._model = _packed(config, weights, rope)
        self._pool = Pool(
            flat(buffer.pages_NP), buffer.shape.page_elements, buffer.shape.block_tokens
        )
        self._stages = compiled_step.stages(config.layers)
        self._over: Array = np.zeros(len(self._stages), dtype=np.int64)
        self._room = 0, 0, 0
        self._make_room(1, 1, 1)

    def forward(self, batch: Batch) -> Tensor:
        """See `Decoder.forward`. The logits are float32, and good until the next call."""
        rows, samples = len(batch.tokens_T), len(batch.last_S)
        units = self._units(batch.lora, rows)
        sampling = self._units(batch.head, samples if batch.head else 0)
        self._make_room(rows, samples, max(units.rank_max, sampling.rank_max))
        tokens = Tokens(
            flat(batch.tokens_T),
            flat(batch.positions_T),
            flat(batch.page_T),
            flat(batch.last_S),
        )
        attention = attention_units(batch.spans, rows, self.config.heads, self.config.kv_heads)
        claims = self._team.run(
            len(self._stages),
            compiled_step.forward,
            self._model,
            self._pool,
            tokens,
            units,
            sampling,
            attention,
            self._scratch,
        )
        self._over = claims[:, OVER]
        logits = torch.from_numpy(self._scratch.logits_SV)
        vocabulary = self.config.vocab_size
        return logits[: samples * vocabulary].view(samples, vocabulary)

    def stages(self) -> dict[str, float]:
        """Share of each stage in the time of the last forward pass; what lies between two stages,
        waiting for others included, counts with the second. On x86."""
        spent = np.diff(self._over)
        shares: dict[str, float] = {}
        for name, ticks in zip(self._stages[1:], spent / spent.sum(), strict=True):
            shares[name] = shares.get(name, 0.0) + float(ticks)
        return shares

    def _units(self, segments: Work[LoraSegment], rows: int) -> Units:
        return lora_units(segments, rows, self._team.threads, self._pool.page)

    def _make_room(self, rows: int, samples: int, rank: int) -> None:
        had = self._room
        room = max(had[0], rows), max(had[1], samples), max(had[2], rank)
        if room != self._room:
            self._room = room
            self._scratch = _scratch(self.config, self.buffer.dtype, *room)


def lora_units(segments: Work[LoraSegment], rows: int, threads: int, page_elements: int) -> Units:
    """Tiles of `rows` rows; rows between segments have no adapter."""
    tokens = max(1, min(UNIT_TOKENS, -(-rows // threads)))
    units: list[tuple[int, int, int]] = []
    end = 0
    for index, item in enumerate(segments):
        units += _tiles(end, item.start, tokens, -1)
        units += _tiles(item.start, item.stop, tokens, index)
        end = item.stop
    units += _tiles(end, rows, tokens, -1)
    start_U, stop_U, segment_U = np.array(units, dtype=np.int64).reshape(-1, 3).T.copy()
    tables = [_table(item, page_elements) for item in segments]
    table_G7 = np.array([row for row, _, _ in tables], dtype=np.int64).reshape(-1, 7)
    rank_max = max((rank for _, rank, _ in tables), default=0)
    return Units(start_U, stop_U, segment_U, table_G7, rank_max)


def _table(segment: LoraSegment, page_elements: int) -> tuple[list[int], int, Array]:
    """Made once while the adapter stays in its pages: addresses and largest rank; the places
    of its rows, so that their memory stays."""
    known = segment.tables.get("compiled")
    if known is None:
        table = segment.layout.table
        pages = np.array(segment.pages, dtype=np.int64)
        at_X = pages[table.page_X] * page_elements + table.offset_X
        of_rows: list[Array] = [at_X, table.scale_X, table.column_X, table.width_X]
        addresses = [array.ctypes.data for array in (*of_rows, table.first_LG, table.rank_LG)]
        known = [*addresses, len(table.first_LG)], int(table.rank_LG.max(initial=0)), at_X
        segment.tables["compiled"] = known
    found: tuple[list[int], int, Array] = known
    return found


def _tiles(start: int, stop: int, tokens: int, segment: int) -> list[tuple[int, int, int]]:
    return [(at, min(at + tokens, stop), segment) for at in range(start, stop, tokens)]


def attention_units(spans: Work[AttentionSpan], rows: int, heads: int, kv_heads: int) -> Attention:
    tokens_max = max(1, ATTENTION_ROWS // (heads // kv_heads))
    tiles: list[tuple[int, int, int, int]] = []
    pages, page = [], 0
    for span in spans:
        before = span.context - span.stop
        tiles += (
            (start, min(tokens_max, span.stop - start), before + start, page)
            for start in range(span.start, span.stop, tokens_max)
        )
        pages.append(span.pages.numpy())
        page += len(span.pages)
    # the costliest first, so that nobody is left with one at the end
    tiles.sort(key=lambda tile: -tile[1] * (tile[1] + tile[2]))
    of_heads = np.repeat(np.array(tiles, dtype=np.int64), kv_heads, axis=0)
    row_A, tokens_A, position_A, first_page_A = of_heads.T.copy()
    kv_head_A = np.tile(np.arange(kv_heads), len(tiles))
    page_Y = np.concatenate(pages)
    return Attention(rows, row_A, tokens_A, position_A, first_page_A, kv_head_A, page_Y)


def _packed(config: ModelConfig, weights: Weights, rope: Rope) -> Model:
    dtype = weights.embed_VD.dtype
    hidden, inner = config.hidden_size, config.intermediate_size
    q_columns, kv_columns = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes = {
        "qkv_ND": (q_columns + 2 * kv_columns, hidden),
        "o_DN": (hidden, q_columns),
        "gate_up_FD": (2 * inner, hidden),
        "down_DF": (hidden, inner),
    }
    sizes = [panels.elements(*shape, dtype) for shape in shapes.values()]
    at_L4 = np.cumsum([0, *sizes * config.layers])[:-1].reshape(config.layers, 4)
    packed = torch.empty(sum(sizes) * config.layers, dtype=dtype)
    small: dict[str, list[Tensor | None]] = {
        name: [] for name in ("input_norm_D", "post_norm_D", "qkv_bias_N", "q_norm_H", "k_norm_H")
    }
    for index in range(config.layers):
        layer = weights.layers.pop(0)
        for name, at, size in zip(shapes, at_L4[index], sizes, strict=True):
            panels.pack(getattr(layer, name), packed[at : at + size])
        for name, values in small.items():
            values.append(getattr(layer, name))
    head = torch.empty(panels.elements(config.vocab_size, hidden, dtype), dtype=dtype)
    panels.pack(weights.head_VD, head)
    tied = weights.head_VD is weights.embed_VD
    return Model(
        layers=config.layers,
        hidden=hidden,
        inner=inner,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocabulary=config.vocab_size,
        eps=np.float32(config.rms_eps),
        scale=np.float32(config.head_dim**-0.5),
        window=config.sliding_window or 2**62,
        panels=flat(packed),
        panels_at_L4=at_L4,
        head=flat(head),
        embed_VD=flat(weights.embed_VD[:0] if tied else weights.embed_VD),
        input_norm_LD=_joined(small["input_norm_D"]),
        post_norm_LD=_joined(small["post_norm_D"]),
        final_norm_D=_joined([weights.final_norm_D]),
        qkv_bias_LN=_joined(small["qkv_bias_N"]),
        q_norm_LE=_joined(small["q_norm_H"]),
        k_norm_LE=_joined(small["k_norm_H"]),
        turn_PE=flat(rope.half_turns()),
    )


def _joined(values: Sequence[Tensor | None]) -> Array:
    """One after another in float32; nothing if they are none."""
    given = [value.float() for value in values if value is not None]
    return flat(torch.cat(given)) if given else np.zeros(0, dtype=np.float32)


def _scratch(
    config: ModelConfig, dtype: torch.dtype, rows: int, samples: int, rank: int
) -> Scratch:
    """Zeros: what fills a row up to whole pairs is read, and never written."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_columns, kv_columns = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def elements(width: int) -> Array:
        return flat(torch.zeros(rows * panels.row_elements(width, dtype), dtype=dtype))

    def floats(size: int) -> Array:
        return np.zeros(size, dtype=np.float32)

    return Scratch(
        x_TD=floats(rows * hidden),
        input_TD=elements(hidden),
        attended_TO=elements(q_columns),
        hidden_TF=elements(inner),
        y_TC=floats(rows * max(q_columns + 2 * kv_columns, 2 * inner, hidden)),
        q_TO=flat(torch.zeros(rows * q_columns, dtype=dtype)),
        shrunk_TR=floats(rows * rank),
        logits_SV=floats(samples * config.vocab_size),
    )


def flat(tensor: Tensor) -> Array:
    """The contiguous tensor's memory as numpy sees it; bfloat16, which it does not know, as
    uint16."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    assert tensor.is_contiguous(), "a copy would be written to, and lost"
    array: Any = tensor.numpy().reshape(-1)
    found: Array = array
    return found
