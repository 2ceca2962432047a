"""Random weights and adapters for decoders of any config, and steps that have all kinds of rows."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from gateway.engine.memory.buffer import KvShape, PageBuffer
from gateway.engine.memory.pager import Resident
from gateway.engine.memory.pages import Owner
from gateway.engine.memory.rows import RowLayout, TargetRank
from gateway.engine.messages import EMBEDDINGS, AdapterRef, Sampling, Submit
from gateway.engine.model.batch import Batch
from gateway.engine.model.compiled_decoder import CompiledDecoder
from gateway.engine.model.config import ModelConfig
from gateway.engine.model.decoder import Decoder
from gateway.engine.model.weights import LayerWeights, Weights
from gateway.engine.scheduling.plan import Slice
from gateway.engine.scheduling.sequence import Sequence

PAGES = 400
PAGES_OF_SEQUENCE = 16
RANKS: dict[str, dict[str, int]] = {
    "all nine": {
        "q_proj": 1,
        "k_proj": 3,
        "v_proj": 17,
        "o_proj": 33,
        "gate_proj": 7,
        "up_proj": 16,
        "down_proj": 5,
        "embed_tokens": 2,
        "lm_head": 9,
    },
    "some": {"k_proj": 70, "up_proj": 12, "down_proj": 64},
}
TOKENS = [(None, 5), ("all nine", 9), ("all nine", 1), ("some", 23), (None, 30), ("some", 2)]
"""Of the sequences: their adapter and the length of their prompt."""
CHUNK = 11


def random_weights(config: ModelConfig, seed: int = 0) -> Weights:
    """In float32, of a size that keeps what passes through them at its own."""
    torch.manual_seed(seed)
    hidden, inner = config.hidden_size, config.intermediate_size
    q_columns, kv_columns = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def matrix(columns: int, width: int) -> Tensor:
        return torch.randn(columns, width) / math.sqrt(width)

    def norm(width: int) -> Tensor:
        return torch.rand(width) + 0.5

    layers = [
        LayerWeights(
            input_norm_D=norm(hidden),
            qkv_ND=matrix(q_columns + 2 * kv_columns, hidden),
            qkv_bias_N=torch.randn(q_columns + 2 * kv_columns) if config.qkv_bias else None,
            q_norm_H=norm(config.head_dim) if config.qk_norm else None,
            k_norm_H=norm(config.head_dim) if config.qk_norm else None,
            o_DN=matrix(hidden, q_columns),
            post_norm_D=norm(hidden),
            gate_up_FD=matrix(2 * inner, hidden),
            down_DF=matrix(hidden, inner),
        )
        for _ in range(config.layers)
    ]
    embed_VD = torch.randn(config.vocab_size, hidden)
    head_VD = embed_VD if config.tie_embeddings else matrix(config.vocab_size, hidden)
    return Weights(embed_VD, layers, norm(hidden), head_VD)


def in_dtype(weights: Weights, dtype: torch.dtype) -> Weights:
    """The same, rounded; tied embeddings stay one tensor, and the list of layers is another."""

    def cast(layer: LayerWeights) -> LayerWeights:
        rounded: dict[str, Any] = {}
        for field in fields(layer):
            value = getattr(layer, field.name)
            rounded[field.name] = value if value is None else value.to(dtype)
        return LayerWeights(**rounded)

    embed_VD = weights.embed_VD.to(dtype)
    tied = weights.head_VD is weights.embed_VD
    return Weights(
        embed_VD,
        [cast(layer) for layer in weights.layers],
        weights.final_norm_D.to(dtype),
        embed_VD if tied else weights.head_VD.to(dtype),
    )


def targets_of(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(out_features, in_features) of all nine."""
    hidden, vocabulary = config.hidden_size, config.vocab_size
    return {
        **config.projections,
        "embed_tokens": (hidden, vocabulary),
        "lm_head": (vocabulary, hidden),
    }


def buffer_for(config: ModelConfig, block_tokens: int, dtype: torch.dtype) -> PageBuffer:
    """A pool in which what nobody wrote is NaN."""
    shape = KvShape(config.layers, block_tokens, config.kv_heads, config.head_dim)
    buffer = PageBuffer(PAGES, shape, dtype, "cpu")
    buffer.pages_NP.fill_(torch.nan)
    return buffer


class Placed:
    """Random adapters on the last pages of a decoder's pool."""

    def __init__(self, buffer: PageBuffer, config: ModelConfig) -> None:
        self._free = list(range(PAGES))
        self.residents = {
            name: self._place(name, ranks, buffer, config) for name, ranks in RANKS.items()
        }

    def _place(
        self, name: str, ranks: Mapping[str, int], buffer: PageBuffer, config: ModelConfig
    ) -> Resident:
        of_layers = {
            (layer, target): TargetRank(rank, 0.5 if layer else 0.7)
            for layer in range(config.layers)
            for target, rank in ranks.items()
            if layer == 0 or target not in EMBEDDINGS
        }
        page_elements = buffer.shape.page_elements
        layout = RowLayout.plan(of_layers, targets_of(config), page_elements)
        pages = [self._free.pop() for _ in range(layout.pages)]
        generator = torch.Generator().manual_seed(len(ranks))
        slab = torch.randn(layout.pages, page_elements, generator=generator) / 12
        # rounded in any pool, so that decoders of different dtypes have the same adapters
        buffer.pages_NP[pages] = slab.bfloat16().to(buffer.dtype)
        return Resident(layout, pages, Owner("adapter", name))


@torch.inference_mode()
def mixed_steps(decoder: Decoder | CompiledDecoder) -> Iterator[Tensor]:
    """Logits of steps that mix chunks of prompts, whole prompts and decodes, with the base and
    adapters; what they sample is left aside, so that all decoders compute the same tokens."""
    config, block_tokens = decoder.config, decoder.buffer.shape.block_tokens
    residents = Placed(decoder.buffer, config).residents
    sequences = []
    for index, (name, tokens) in enumerate(TOKENS):
        generator = torch.Generator().manual_seed(index)
        prompt = torch.randint(config.vocab_size, (tokens,), generator=generator).tolist()
        ref = AdapterRef(name, "") if name else None
        sequence = Sequence(Submit(str(index), prompt, 9, Sampling(), ref), index)
        first = PAGES_OF_SEQUENCE * index
        sequence.pages = list(range(first + PAGES_OF_SEQUENCE - 1, first - 1, -1))
        sequence.adapter = residents[name] if name else None
        sequences.append(sequence)
    for running in sequences[:3], sequences[1:5], sequences, sequences, sequences:
        order = sorted(running, key=lambda sequence: sequence.digest or "")
        slices = [Slice(sequence, min(sequence.pending, CHUNK)) for sequence in order]
        yield decoder.forward(Batch.pack(slices, block_tokens, "cpu")).float().clone()
        for sequence, count in slices:
            sequence.computed += count
            if not sequence.pending:
                sequence.tokens.append((7 * sequence.computed) % config.vocab_size)
