"""A decoder of two tiny layers with random weights, for any implementation of the ops."""

from collections.abc import Iterable, Iterator
from types import ModuleType

import torch
from torch import Tensor

from gateway.engine.memory.buffer import KvShape, PageBuffer
from gateway.engine.memory.pager import Resident
from gateway.engine.memory.pages import Owner
from gateway.engine.memory.rows import RowLayout, TargetRank
from gateway.engine.messages import EMBEDDINGS, AdapterRef, Sampling, Submit
from gateway.engine.model.batch import Batch
from gateway.engine.model.config import ModelConfig
from gateway.engine.model.decoder import Decoder
from gateway.engine.model.rope import Rope
from gateway.engine.model.weights import LayerWeights, Weights
from gateway.engine.scheduling.plan import Slice
from gateway.engine.scheduling.sequence import Sequence

CONFIG = ModelConfig(
    architecture="qwen3",
    layers=2,
    hidden_size=32,
    intermediate_size=48,
    heads=6,
    kv_heads=2,
    head_dim=16,
    vocab_size=50,
    context_tokens=64,
    rms_eps=1e-6,
    rope_theta=10000.0,
    rope_scaling=None,
    tie_embeddings=True,
    qkv_bias=True,
    qk_norm=True,
    sliding_window=None,
    eos_token_ids=[2],
    bos_token_id=1,
)
MODEL_PROJECTIONS = {
    "q_proj": (96, 32),
    "k_proj": (32, 32),
    "v_proj": (32, 32),
    "o_proj": (32, 96),
    "gate_proj": (48, 32),
    "up_proj": (48, 32),
    "down_proj": (32, 48),
    "embed_tokens": (32, 50),
    "lm_head": (50, 32),
}


def decoder_with(ops: ModuleType, block_tokens: int = 4) -> Decoder:
    """The same random weights for the same config, and a pool of its own."""
    torch.manual_seed(0)
    layers = [
        LayerWeights(
            input_norm_D=torch.rand(32),
            qkv_ND=torch.randn(160, 32) / 6,
            qkv_bias_N=torch.randn(160),
            q_norm_H=torch.rand(16),
            k_norm_H=torch.rand(16),
            o_DN=torch.randn(32, 96) / 10,
            post_norm_D=torch.rand(32),
            gate_up_FD=torch.randn(96, 32) / 6,
            down_DF=torch.randn(32, 48) / 7,
        )
        for _ in range(CONFIG.layers)
    ]
    embed_VD = torch.randn(50, 32)
    loaded = Weights(embed_VD, layers, torch.rand(32), embed_VD)
    buffer = PageBuffer(60, KvShape(2, block_tokens, 2, 16), torch.float32, "cpu")
    return Decoder(CONFIG, loaded, Rope(CONFIG, 64, "cpu"), buffer, ops)


def leased(
    buffer: PageBuffer, rank: int, pages: list[int], targets: Iterable[str] = MODEL_PROJECTIONS
) -> Resident:
    places = [
        (layer, target)
        for layer in range(2)
        for target in targets
        if layer == 0 or target not in EMBEDDINGS
    ]
    layout = RowLayout.plan(
        dict.fromkeys(places, TargetRank(rank, 0.5)),
        MODEL_PROJECTIONS,
        buffer.shape.page_elements,
    )
    slab = torch.randn(layout.pages, buffer.shape.page_elements, generator=seeded(rank)) / 5
    buffer.pages_NP[pages[: layout.pages]] = slab
    return Resident(layout, pages[: layout.pages], Owner("adapter", f"rank {rank}"))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mixed_steps(decoder: Decoder) -> Iterator[Tensor]:
    """Logits of two steps: a prompt of the base and two of adapters, then their decodes beside a
    late prompt."""
    adapters = {
        "a": leased(decoder.buffer, 1, list(range(59, 39, -1))),
        "b": leased(decoder.buffer, 5, list(range(20, 40))),
    }
    sequences = []
    for index, (digest, tokens) in enumerate([(None, 5), ("a", 9), ("b", 4), ("b", 7)]):
        ref = AdapterRef(digest, "") if digest else None
        prompt = torch.randint(50, (tokens,), generator=seeded(index)).tolist()
        sequence = Sequence(Submit(str(index), prompt, 4, Sampling(), ref), index)
        sequence.pages = list(range(4 * index, 4 * index + 4))
        sequence.adapter = adapters[digest] if digest else None
        sequences.append(sequence)
    for running in sequences[:3], sequences:
        slices = [Slice(sequence, sequence.pending) for sequence in running]
        yield decoder.forward(Batch.pack(slices, decoder.buffer.shape.block_tokens, "cpu"))
        for sequence, count in slices:
            sequence.computed += count
            sequence.tokens.append(7)
