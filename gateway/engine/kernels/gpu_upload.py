"""Tables made on the host, brought to the device in one copy that nothing waits for."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

Table = np.ndarray[Any, np.dtype[Any]]

ALIGNMENT_BYTES = 16
"""Every table begins at a multiple: Triton compiles a kernel again for pointers that don't."""
HEAD_ENTRIES = 2
NO_ROWS: Table = np.zeros((0, 0), dtype=np.int64)


class WorkList(NamedTuple):
    """A table that a launch walks: program p takes rows p, p + programs, p + 2 · programs, …"""

    head: Tensor
    """int64 (2,): how many rows there are now, and how many entries from here the first lies."""
    rows_max: int
    """Rows that there can be; what is written per row has room for as many."""
    exact: bool = True
    """Whether there are always that many. If not, the head is filled again from batch to batch."""

    def programs(self, columns: int, enough: int) -> int:
        """Programs along the rows of a launch that has `columns` of them side by side. One per
        row, but where most rows may be missing no more than `enough` in all."""
        if self.exact:
            return self.rows_max
        return min(self.rows_max, max(1, enough // columns))


def packed(tables: Sequence[Table]) -> Table:
    """The heads of all tables, then the rows of all, as one run of int64."""
    stops = np.cumsum([HEAD_ENTRIES * len(tables), *(each.size for each in tables)]).tolist()
    heads = [
        (len(each), first - HEAD_ENTRIES * index)
        for index, (each, first) in enumerate(zip(tables, stops, strict=False))
    ]
    return np.concatenate([np.array(heads, dtype=np.int64), *tables], axis=None)


def lists_in(run: Tensor, tables: Sequence[Table]) -> list[WorkList]:
    """The lists of a run that was packed of these tables."""
    return [
        WorkList(run[HEAD_ENTRIES * index :][:HEAD_ENTRIES], len(each))
        for index, each in enumerate(tables)
    ]


def upload(tables: Sequence[Table], device: torch.device) -> list[Tensor]:
    """The same tables as tensors on the device."""
    rounded = [-(-each.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for each in tables]
    starts = np.cumsum([0, *rounded]).tolist()
    there = staged(starts[-1], device)
    for each, start in zip(tables, starts, strict=False):
        there.numpy()[start : start + each.nbytes] = each.reshape(-1).view(np.uint8)
    there = there.to(device, non_blocking=True)
    return [
        there[start : start + each.nbytes].view(torch.from_numpy(each).dtype).view(each.shape)
        for each, start in zip(tables, starts, strict=False)
    ]


def staged(bytes_: int, device: torch.device) -> Tensor:
    """Host memory to copy from without waiting. Torch gives it to nobody else before the copy
    is done, so none of it is ever overwritten on its way."""
    return torch.empty(bytes_, dtype=torch.uint8, pin_memory=device.type == "cuda")
