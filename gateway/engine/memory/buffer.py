"""The bytes of the pool: one flat tensor cut into equal pages, and copies into it.

On a GPU adapters are copied on a stream of their own, so that a batch that does not use them runs
meanwhile. Both orders that matter are kept by the streams themselves:

    compute   … batch, may read old pages ┐                 ┌ settle: batch with the adapter …
    copies                                └ load: new bytes ┘

A page is one KV block. Its elements, when it holds KV:

    [layer][key, value][block_tokens][kv_heads][head_dim]

N pages, P elements of a page, B tokens of a block, K KV heads, E head dimension.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gateway.engine.memory.rows import RowLayout, Rows


@dataclass(frozen=True, slots=True)
class KvShape:
    layers: int
    block_tokens: int
    kv_heads: int
    head_dim: int

    @property
    def page_elements(self) -> int:
        return self.layers * 2 * self.block_tokens * self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Slab:
    """An adapter in host memory, laid out exactly as its pages will be in the pool."""

    layout: RowLayout
    pages_NP: Tensor

    @property
    def bytes(self) -> int:
        return self.pages_NP.nbytes


class PageBuffer:
    def __init__(self, pages: int, shape: KvShape, dtype: torch.dtype, device: str) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = device
        self.pages_NP = torch.zeros(pages, shape.page_elements, dtype=dtype, device=device)
        kv = self.pages_NP.view(
            pages, shape.layers, 2, shape.block_tokens, shape.kv_heads, shape.head_dim
        )
        self.kv_layers: list[Tensor] = [kv[:, layer] for layer in range(shape.layers)]
        """Per layer a view (N, 2, B, K, E)."""
        self._copies = _StreamCopies() if device == "cuda" else _Copies()

    @property
    def pages(self) -> int:
        return len(self.pages_NP)

    @property
    def page_bytes(self) -> int:
        return self.shape.page_elements * self.dtype.itemsize

    @staticmethod
    def pages_in(pool_bytes: int, shape: KvShape, dtype: torch.dtype) -> int:
        return pool_bytes // (shape.page_elements * dtype.itemsize)

    def load(self, slab: Slab, pages: list[int]) -> None:
        """Copy an adapter from host memory into these pages. `settle` comes before their use,
        and before they are given back."""
        self._copies.load(self.pages_NP, slab.pages_NP, pages)

    def settle(self, pages: list[int]) -> None:
        """What is computed from here on comes after what was loaded into these pages."""
        self._copies.settle(pages)


class _Copies:
    """Copies that are done when `load` returns."""

    def load(self, pages_NP: Tensor, from_NP: Tensor, pages: list[int]) -> None:
        first = 0
        for index in range(1, len(pages) + 1):
            if index == len(pages) or pages[index] != pages[index - 1] + 1:
                to = slice(pages[first], pages[index - 1] + 1)
                pages_NP[to].copy_(from_NP[first:index], non_blocking=True)
                first = index

    def settle(self, pages: list[int]) -> None:
        pass


class _StreamCopies(_Copies):
    """Copies on a stream of their own."""

    def __init__(self) -> None:
        stream: Any = torch.cuda.Stream  # has no annotations
        self._stream = stream()
        self._landing: dict[int, Any] = {}
        """By first page, the end of a copy that the compute stream does not wait for yet."""

    def load(self, pages_NP: Tensor, from_NP: Tensor, pages: list[int]) -> None:
        if not pages:
            return
        # what was computed before may still read, or write, what lay in these pages
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            super().load(pages_NP, from_NP, pages)
            self._landing[pages[0]] = self._stream.record_event()

    def settle(self, pages: list[int]) -> None:
        landing = self._landing.pop(pages[0], None) if pages else None
        if landing is not None:
            torch.cuda.current_stream().wait_event(landing)


def matrix(pages_NP: Tensor, pages: list[int], rows: Rows) -> Tensor:
    """A stored matrix (rows, width); a view where it lies in one piece, else a copy."""
    pieces = [
        pages_NP[pages[run.page], run.offset : run.offset + run.rows * rows.width].view(
            run.rows, rows.width
        )
        for run in rows.runs
    ]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def store(pages_NP: Tensor, pages: list[int], rows: Rows, values: Tensor) -> None:
    """Write a matrix (rows, width) where `matrix` reads it."""
    row = 0
    for run in rows.runs:
        piece = pages_NP[pages[run.page], run.offset : run.offset + run.rows * rows.width]
        piece.view(run.rows, rows.width).copy_(values[row : row + run.rows])
        row += run.rows
