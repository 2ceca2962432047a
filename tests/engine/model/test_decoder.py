"""The decoder's logits against transformers' own, on tiny random models of every family."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedConfig

from gateway.engine import kernels
from gateway.engine.memory.buffer import KvShape, PageBuffer
from gateway.engine.memory.pages import Owner, PagePool
from gateway.engine.messages import Sampling, Submit
from gateway.engine.model import weights
from gateway.engine.model.batch import Batch
from gateway.engine.model.decoder import Decoder
from gateway.engine.model.rope import Rope
from gateway.engine.scheduling.plan import Slice
from gateway.engine.scheduling.sequence import Sequence
from tests.engine.tiny import CONFIGS, save_model

BLOCK = 4
TOLERANCE = 2e-4


class Bench:
    """A decoder over a pool of its own."""

    def __init__(self, folder: Path) -> None:
        config, loaded, _ = weights.load(folder, torch.float32)
        shape = KvShape(config.layers, BLOCK, config.kv_heads, config.head_dim)
        self.pool = PagePool(200)
        self.buffer = PageBuffer(200, shape, torch.float32, "cpu")
        self.buffer.pages_NP.fill_(torch.nan)
        ops = kernels.choose("cpu", batch_invariant=True)
        self.decoder = Decoder(config, loaded, Rope(config, 512, "cpu"), self.buffer, ops)

    def sequence(self, tokens: list[int]) -> Sequence:
        sequence = Sequence(Submit("r", tokens, 1, Sampling()), 0)
        sequence.pages = self.pool.take(-(-len(tokens) // BLOCK), Owner("kv", "r"))
        return sequence

    @torch.inference_mode()
    def step(self, slices: list[Slice]) -> torch.Tensor:
        logits = self.decoder.forward(Batch.pack(slices, BLOCK, "cpu"))
        for sequence, count in slices:
            sequence.computed += count
        return logits


def random_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), generator=generator).tolist()


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    config: PreTrainedConfig = CONFIGS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return save_model(config, folder), folder


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_logits_equal_transformers_whatever_the_chunks(model, chunk: int):
    reference, folder = model
    bench = Bench(folder)
    tokens = random_tokens(41, seed=1)
    sequence = bench.sequence(tokens)
    while sequence.pending:
        logits = bench.step([Slice(sequence, min(chunk, sequence.pending))])
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0, -1]
    torch.testing.assert_close(logits[0], expected, atol=TOLERANCE, rtol=0)


def test_sequences_of_any_lengths_share_a_batch(model):
    """Prefills and decodes together; each row is what its sequence gets alone."""
    reference, folder = model
    bench = Bench(folder)
    prompts = [random_tokens(length, seed=length) for length in (1, 2, 5, 30, 13)]
    sequences = [bench.sequence(prompt) for prompt in prompts]
    for sequence in sequences[2:4]:  # these are one token from done: they decode
        bench.step([Slice(sequence, sequence.pending - 1)])
    logits = bench.step([Slice(sequence, sequence.pending) for sequence in sequences])
    for row, prompt in zip(logits, prompts, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).logits[0, -1]
        torch.testing.assert_close(row, expected, atol=TOLERANCE, rtol=0)
