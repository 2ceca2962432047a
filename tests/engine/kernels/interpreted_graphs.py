"""Decoding from fixed tables against the decoder, under Triton's interpreter.

Nothing can be recorded without a GPU; a replay here computes the same function again, with what its
fixed inputs hold then. Not collected with the other tests, see `interpreted.py`.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from msgspec import structs
from torch import Tensor

from tests.engine.kernels.interpreter import use_interpreter

use_interpreter()

from gateway.engine.kernels import gpu, gpu_attention, gpu_fixed, gpu_lora, gpu_upload  # noqa: E402
from gateway.engine.kernels.gpu_fixed import FixedTables  # noqa: E402
from gateway.engine.kernels.gpu_graphs import Record, Run  # noqa: E402
from gateway.engine.memory.pager import Resident  # noqa: E402
from gateway.engine.messages import EMBEDDINGS, AdapterRef, Sampling, Submit  # noqa: E402
from gateway.engine.model import graph_check  # noqa: E402
from gateway.engine.model.batch import Batch  # noqa: E402
from gateway.engine.model.decoder import Decoder  # noqa: E402
from gateway.engine.model.graph_check import checked_graphs  # noqa: E402
from gateway.engine.model.graphs import DecodeGraphs, NoGraphs, sizes  # noqa: E402
from gateway.engine.model.rope import Rope  # noqa: E402
from gateway.engine.scheduling.plan import Slice  # noqa: E402
from gateway.engine.scheduling.sequence import Sequence as Request  # noqa: E402
from tests.engine.kernels.tiny_decoder import (  # noqa: E402
    CONFIG,
    MODEL_PROJECTIONS,
    decoder_with,
    leased,
)

# rows of padding compute with whatever they find
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

BLOCK_TOKENS = 16
CONTEXT = 640
ROWS_MAX = 5
ADAPTER_PAGES = range(40, 60)
Row = tuple[str | None, int]
"""Adapter and context."""

MANY: list[Row] = [(None, 257), ("a", 1), ("b", 30), ("c", 17), ("c", 4)]
"""Ranks 1, 5 and 20, of which the last is more than a tile; contexts of one and of two splits. All
adapters but `b` have embeddings."""
ONE: list[Row] = [("b", 40), ("b", 2), ("b", 16)]
TWO: list[Row] = [("a", 256), ("c", 5)]
BASE: list[Row] = [(None, 3)]


@pytest.fixture(autouse=True)
def _inference(monkeypatch: pytest.MonkeyPatch):
    """Products row by row, so that padding can't change the bits of a row: whatever differs then
    is ours. And few programs, so that each has several rows of a list to walk."""

    def linear(x_TD: Tensor, weight_ND: Tensor, bias_N: Tensor | None = None) -> Tensor:
        rows = [weight_ND @ x_D for x_D in x_TD]
        return torch.stack(rows) if bias_N is None else torch.stack(rows) + bias_N

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    monkeypatch.setattr(gpu_attention, "PROGRAMS", 6)
    monkeypatch.setattr(gpu_lora, "PROGRAMS", 2)
    with torch.inference_mode():
        yield


def long_decoder(window: int | None = None) -> Decoder:
    decoder = decoder_with(gpu, BLOCK_TOKENS)
    config = structs.replace(CONFIG, sliding_window=window)
    return replace(decoder, config=config, rope=Rope(CONFIG, CONTEXT, "cpu"))


def random_pool(decoder: Decoder) -> dict[str, Resident]:
    """Fill the pool, and give its adapters."""
    pages = decoder.buffer.pages_NP
    pages.normal_(generator=torch.Generator().manual_seed(3))
    first = ADAPTER_PAGES.start
    adapters = {}
    for name, rank in ("a", 1), ("b", 5), ("c", 20):
        targets = [item for item in MODEL_PROJECTIONS if name != "b" or item not in EMBEDDINGS]
        pages_left = list(range(first, ADAPTER_PAGES.stop))
        adapters[name] = leased(decoder.buffer, rank, pages_left, targets)
        first += adapters[name].layout.pages
    return adapters


def slices_of(rows: Sequence[Row], adapters: dict[str, Resident]) -> list[Slice]:
    """Row r has a page of its own for its newest token, and what it finds in others before."""
    slices = []
    for row, (name, context) in enumerate(rows):
        ref = AdapterRef(name, "") if name else None
        prompt = [(11 * row + place) % CONFIG.vocab_size for place in range(context)]
        sequence = Request(Submit(str(row), prompt, 1, Sampling(), ref), row)
        sequence.computed = context - 1
        sequence.adapter = adapters[name] if name else None
        before = [5 + (3 * row + 7 * block) % 35 for block in range((context - 1) // BLOCK_TOKENS)]
        sequence.pages = [*before, row]
        slices.append(Slice(sequence, 1))
    return slices


def again(run: Run) -> Run:
    run()  # as a recording does, before any batch is filled in
    return run


def graphs_of(decoder: Decoder, rows_max: int = ROWS_MAX) -> DecodeGraphs:
    tables = FixedTables(
        decoder.buffer.pages_NP, BLOCK_TOKENS, MODEL_PROJECTIONS, rows_max, CONTEXT
    )
    graphs = DecodeGraphs(decoder, tables, rows_max)
    graphs.record(again)
    return graphs


def both(
    decoder: Decoder, graphs: DecodeGraphs, rows: Sequence[Row]
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Logits and pool, of the decoder and of the graphs."""
    slices = slices_of(rows, random_pool(decoder))
    expected = decoder.forward(Batch.pack(slices, BLOCK_TOKENS, "cpu"))
    expected_pool = decoder.buffer.pages_NP.clone()
    random_pool(decoder)
    got = graphs.forward(slices)
    assert got is not None
    return (expected, expected_pool), (got, decoder.buffer.pages_NP)


def test_w1_any_mix_after_any_other_has_the_bits_of_the_decoder():
    decoder = long_decoder()
    graphs = graphs_of(decoder)
    for rows in MANY, BASE, ONE, TWO, BASE * 3, MANY:
        for expected, got in zip(*both(decoder, graphs, rows), strict=True):
            assert torch.equal(got, expected), rows


def test_a_window_of_attention_is_kept_to():
    decoder = long_decoder(window=20)
    for expected, got in zip(*both(decoder, graphs_of(decoder, 3), TWO), strict=True):
        assert torch.equal(got, expected)


def test_a_batch_that_was_not_recorded_is_left_to_the_decoder(monkeypatch: pytest.MonkeyPatch):
    decoder = long_decoder()
    graphs = graphs_of(decoder, 3)
    adapters = random_pool(decoder)
    assert graphs.forward(slices_of(MANY, adapters)) is None
    prompt = slices_of(TWO, adapters)
    prompt[1].sequence.tokens.append(1)
    assert graphs.forward(prompt) is None
    two = slices_of([("a", 257), ("c", 5)], adapters)
    assert graphs.forward(two) is not None
    monkeypatch.setattr(gpu_fixed, "RANKS_PER_TOKEN", 31)  # q, k and v have 60 and 3 in two rows
    assert graphs.forward(two) is None
    monkeypatch.undo()
    monkeypatch.setattr(gpu_fixed, "ITEMS_AT_LEAST", 2 - 2 * gpu_fixed.ITEMS_PER_TOKEN)
    assert graphs.forward(two) is None


def checked(record: Record) -> tuple[Decoder, DecodeGraphs | NoGraphs]:
    decoder = decoder_with(gpu)
    return decoder, checked_graphs(decoder, MODEL_PROJECTIONS, 1, 6, lambda: record)


def test_an_engine_starts_with_graphs_that_are_right_and_an_empty_pool(
    caplog: pytest.LogCaptureFixture,
):
    decoder, graphs = checked(again)
    assert isinstance(graphs, DecodeGraphs), caplog.text
    assert not decoder.buffer.pages_NP.any()


def out_of_memory(run: Run) -> Run:
    raise torch.OutOfMemoryError("none left")


def stale(run: Run) -> Run:
    """Gives for ever what it gave for the first batch."""
    first: list[Tensor] = []

    def replay() -> Tensor:
        if not first:
            first.append(run())
        return first[0]

    run()
    return replay


@pytest.mark.parametrize("record", [out_of_memory, stale])
def test_an_engine_whose_graphs_fail_or_are_wrong_starts_without(
    record: Record, caplog: pytest.LogCaptureFixture
):
    decoder, graphs = checked(record)
    assert isinstance(graphs, NoGraphs)
    assert graphs.forward(slices_of(BASE, {})) is None
    assert "decoding runs without CUDA graphs" in caplog.text
    assert not decoder.buffer.pages_NP.any()


@pytest.mark.parametrize("index", [gpu_fixed.ITEMS, *range(gpu_fixed.LISTS - 6, gpu_fixed.LISTS)])
def test_one_row_too_few_in_a_list_is_noticed_at_the_start(
    index: int, monkeypatch: pytest.MonkeyPatch
):
    """Of the keys, and of one group within the layers and those outside of them."""
    packed = gpu_upload.packed

    def short(tables: list[np.ndarray]) -> np.ndarray:
        run = packed(tables)
        run[gpu_upload.HEAD_ENTRIES * index] -= len(tables[index]) > 0
        return run

    monkeypatch.setattr(gpu_fixed, "packed", short)
    assert isinstance(checked(again)[1], NoGraphs)


def test_sizes_are_few_whatever_the_largest_batch():
    assert [sizes(rows) for rows in (1, 2, 5, 64)] == [
        [1],
        [1, 2],
        [1, 2, 4, 5],
        [1, 2, 4, 8, 16, 32, 64],
    ]


def test_the_check_has_mixes_of_all_kinds_on_both_sides_of_a_split():
    sequences_max = 5
    decoder = long_decoder()
    kinds, splits = set(), set()
    for slices in graph_check._batches(
        decoder, MODEL_PROJECTIONS, sizes(sequences_max), CONTEXT
    ):  # fmt: skip
        sequences = [item.sequence for item in slices]
        digests = [sequence.digest for sequence in sequences]
        assert len({sequence.pages[-1] for sequence in sequences}) == len(sequences)
        assert digests == sorted(digests, key=lambda digest: digest or "")
        kinds.add((len(slices), len({digest for digest in digests if digest})))
        for sequence in sequences:
            assert sequence.pending == 1
            assert len(sequence.pages) == -(-len(sequence.tokens) // BLOCK_TOKENS)
            splits.add(-(-len(sequence.tokens) // gpu_attention.DECODE.split_keys))
    assert {(5, 5), (5, 2), (5, 1), (5, 0), (3, 3), (2, 1), (1, 1), (1, 0)} <= kinds
    assert splits == {1, 2, 3}
