"""Whether recorded graphs compute what the decoder computes. Asked at every start, of random
batches on a pool of random numbers; an engine whose graphs do not stays without them.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from itertools import chain

import torch
from torch import Tensor

from gateway.engine.kernels.gpu_fixed import FixedTables
from gateway.engine.kernels.gpu_graphs import Record
from gateway.engine.memory.pager import Resident
from gateway.engine.memory.pages import Owner
from gateway.engine.memory.rows import RowLayout, TargetRank
from gateway.engine.messages import AdapterRef, Sampling, Submit
from gateway.engine.model.batch import Batch
from gateway.engine.model.decoder import Decoder
from gateway.engine.model.graphs import DecodeGraphs, NoGraphs
from gateway.engine.model.warm_up import storable
from gateway.engine.scheduling.plan import Slice
from gateway.engine.scheduling.sequence import Sequence

log = logging.getLogger(__name__)

RANKS = (8, 1, 24, 3, 64)
CONTEXTS = (1, 300, 17, 600, 256, 5, 257)
"""Before, at and after a border between two splits of the keys, beside short ones."""
SPARE_PAGES = 32
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Of the distance between two rows of logits ÷ the length of one. Products of padded batches are
rounded differently; a row that is wrong is off by as much as it is long."""


def checked_graphs(
    decoder: Decoder,
    projections: Mapping[str, tuple[int, int]],
    rows_max: int,
    context_tokens: int,
    recorder: Callable[[], Record],
) -> DecodeGraphs | NoGraphs:
    """Graphs that have shown to be right; none if they have not. Before anything lies in the
    pool: uses its first pages, and leaves them zero."""
    try:
        graphs = _recorded(decoder, projections, rows_max, context_tokens, recorder)
        batches = list(_batches(decoder, projections, graphs.sizes, context_tokens))
        found = largest_difference(decoder, graphs, batches)
    except Exception:  # whatever it is: the engine can serve without them
        log.warning("decoding runs without CUDA graphs: recording them failed", exc_info=True)
        return NoGraphs()
    allowed = TOLERANCE[decoder.buffer.dtype]
    if not found <= allowed:
        log.warning(
            "decoding runs without CUDA graphs: logits differ by %.2g, allowed is %.2g",
            found,
            allowed,
        )
        return NoGraphs()
    log.info("CUDA graphs of %s sequences; logits differ by %.2g", graphs.sizes, found)
    return graphs


@torch.inference_mode()
def _recorded(
    decoder: Decoder,
    projections: Mapping[str, tuple[int, int]],
    rows_max: int,
    context_tokens: int,
    recorder: Callable[[], Record],
) -> DecodeGraphs:
    buffer = decoder.buffer
    tables = FixedTables(
        buffer.pages_NP, buffer.shape.block_tokens, projections, rows_max, context_tokens
    )
    graphs = DecodeGraphs(decoder, tables, rows_max)
    graphs.record(recorder())
    return graphs


@torch.inference_mode()
def largest_difference(decoder: Decoder, graphs: DecodeGraphs, batches: Seq[list[Slice]]) -> float:
    """Over all rows, see TOLERANCE; NaN where any number is, infinite where a graph is missing."""
    shape, pages_NP = decoder.buffer.shape, decoder.buffer.pages_NP
    used_NP = pages_NP[: 1 + max(chain.from_iterable(_pages(item) for item in chain(*batches)))]
    differences: list[Tensor] = []
    try:
        for slices in batches:
            _randomize(used_NP)
            batch = Batch.pack(slices, shape.block_tokens, decoder.buffer.device)
            expected_SV = decoder.forward(batch).float()
            _randomize(used_NP)
            got_SV = graphs.forward(slices)
            if got_SV is None:
                return float("inf")
            distance_S = (got_SV.float() - expected_SV).norm(dim=-1)
            differences.append(distance_S / expected_SV.norm(dim=-1))
        return float(torch.cat(differences).max())
    finally:
        used_NP.zero_()


def _pages(item: Slice) -> list[int]:
    adapter = item.sequence.adapter
    return [*item.sequence.pages, *(adapter.pages if adapter else [])]


def _randomize(pages_NP: Tensor) -> None:
    """The same numbers each time."""
    pages_NP.normal_(generator=torch.Generator(pages_NP.device).manual_seed(0))


def _batches(
    decoder: Decoder,
    projections: Mapping[str, tuple[int, int]],
    sizes: list[int],
    context_tokens: int,
) -> Iterator[list[Slice]]:
    """Of each size, with no adapter, 1, 2 and as many as rows; from much to little and back, full
    and with as much padding as there can be."""
    pages = min(len(decoder.buffer.pages_NP), sizes[-1] + SPARE_PAGES)
    adapters = _adapters(decoder, projections, sizes[-1], pages)
    full = [
        (size, count)
        for size in reversed(sizes)
        for count in sorted({size, min(2, size), 1, 0}, reverse=True)
    ]
    padded = [
        (rows, count)
        for rows in (size // 2 + 1 for size in sizes)
        for count in sorted({rows, min(2, rows), 1, 0})
    ]
    for number, (rows, count) in enumerate(full + padded):
        # never the same batch twice: a replay that repeats itself is wrong
        some = [adapters[(number + index) % len(adapters)] for index in range(count)]
        yield _batch(decoder, rows, some, pages, context_tokens, number)


def _adapters(
    decoder: Decoder, projections: Mapping[str, tuple[int, int]], count: int, pages: int
) -> list[Resident]:
    """Each reads other numbers of the pool, or the same in another layout; whatever its rank, its
    part is too large to be missed."""
    page_elements = decoder.buffer.shape.page_elements
    layouts = [
        RowLayout.plan(
            {
                (layer, target): TargetRank(rank, 2 * (_summed(target, projections) * rank) ** -0.5)
                for layer, target in storable(decoder, projections)
            },
            projections,
            page_elements,
        )
        for rank in RANKS[:count]
    ]
    return [
        Resident(
            layout,
            [(index + page) % pages for page in range(layout.pages)],
            Owner("adapter", str(index)),
        )
        for index, layout in ((index, layouts[index % len(layouts)]) for index in range(count))
    ]


def _summed(target: str, projections: Mapping[str, tuple[int, int]]) -> int:
    """Products in each element of the rank intermediate."""
    return 1 if target == "embed_tokens" else projections[target][1]


def _batch(
    decoder: Decoder,
    rows: int,
    adapters: list[Resident],
    pages: int,
    context_tokens: int,
    number: int,
) -> list[Slice]:
    """Row r has the page r for its newest token, and reads what it finds in others. All rows but
    the first have adapters if these are fewer than rows."""
    block_tokens = decoder.buffer.shape.block_tokens
    first_adapted = int(len(adapters) < rows) if adapters else rows
    slices = []
    for row in range(rows):
        context = min(CONTEXTS[(row + number) % len(CONTEXTS)], context_tokens)
        adapted = row - first_adapted
        which = adapted * len(adapters) // (rows - first_adapted) if adapted >= 0 else None
        ref = None if which is None else AdapterRef(str(which), "")
        tokens = [(7 * row + 3 * number + place) % decoder.config.vocab_size
                  for place in range(context)]  # fmt: skip
        sequence = Sequence(Submit(str(row), tokens, 1, Sampling(), ref), row)
        sequence.computed = context - 1
        sequence.adapter = None if which is None else adapters[which]
        before = [(row + 3 * block) % pages for block in range((context - 1) // block_tokens)]
        sequence.pages = [*before, row]
        slices.append(Slice(sequence, 1))
    return slices
