"""The bytes of the pool: one flat tensor cut into equal pages, and copies into it.

A page is one KV block. Its elements, when it holds KV:

    [layer][key, value][block_tokens][kv_heads][head_dim]

N pages, P elements of a page, B tokens of a block, K KV heads, E head dimension.
"""

from dataclasses import dataclass

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

    @property
    def page_bytes(self) -> int:
        return self.shape.page_elements * self.dtype.itemsize

    @staticmethod
    def pages_in(pool_bytes: int, shape: KvShape, dtype: torch.dtype) -> int:
        return pool_bytes // (shape.page_elements * dtype.itemsize)

    def load(self, slab: Slab, pages: list[int]) -> None:
        """Copy an adapter from host memory into these pages."""
        index = torch.tensor(pages, device=self.device)
        self.pages_NP[index] = slab.pages_NP.to(self.device, non_blocking=True)


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
