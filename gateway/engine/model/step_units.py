"""A batch's work, cut into what one thread does at a time on a CPU.

T tokens · U units of LoRA · G adapters · A units of attention · Y pages of all sequences
"""

import numpy as np
import torch

from gateway.engine.kernels.segments import AttentionSpan, LoraSegment, Work
from gateway.engine.kernels.step_data import Array, Attention, Units, flat

ATTENTION_ROWS = 32
"""Query rows of an attention unit: tokens times the query heads of a KV head. They share one pass
over keys and values; their scores stay in the second-level cache up to some thousand tokens."""
UNIT_TOKENS = 16
UNITS_OF_THREAD = 4
"""As many give every thread its share."""


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
    parts = -(-UNITS_OF_THREAD * threads // max(1, len(units)))
    return Units(start_U, stop_U, segment_U, table_G7, rank_max, parts)


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


def attention_units(
    spans: Work[AttentionSpan], rows: int, heads: int, kv_heads: int, block_tokens: int
) -> Attention:
    tokens_max = max(1, ATTENTION_ROWS // (heads // kv_heads))
    tiles: list[tuple[int, int, int, int]] = []
    page = 0
    for span in spans:
        before = span.context - span.stop
        tiles += (
            (start, min(tokens_max, span.stop - start), before + start, page)
            for start in range(span.start, span.stop, tokens_max)
        )
        page += -(-span.context // block_tokens)
    # the costliest first, so that nobody is left with one at the end
    tiles.sort(key=lambda tile: -tile[1] * (tile[1] + tile[2]))
    of_heads = np.repeat(np.array(tiles, dtype=np.int64), kv_heads, axis=0)
    row_A, tokens_A, position_A, first_page_A = of_heads.T.copy()
    kv_head_A = np.tile(np.arange(kv_heads), len(tiles))
    pages = flat(torch.cat([span.pages for span in spans]))
    return Attention(rows, row_A, tokens_A, position_A, first_page_A, kv_head_A, pages)
