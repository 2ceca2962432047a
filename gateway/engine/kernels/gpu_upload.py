"""Tables made on the host, brought to the device in one copy that nothing waits for."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Table = np.ndarray[Any, np.dtype[Any]]

ALIGNMENT_BYTES = 16
"""Every table begins at a multiple: Triton compiles a kernel again for pointers that don't."""


def table(rows: Iterable[tuple[int, ...]], width: int) -> Table:
    """int64 (rows, width), also where there are no rows."""
    return np.array(list(rows), dtype=np.int64).reshape(-1, width)


def upload(tables: Sequence[Table], device: torch.device) -> list[Tensor]:
    """The same tables as tensors on the device."""
    rounded = [-(-each.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for each in tables]
    starts = np.cumsum([0, *rounded]).tolist()
    packed = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for each, start in zip(tables, starts, strict=False):
        packed.numpy()[start : start + each.nbytes] = each.reshape(-1).view(np.uint8)
    there = packed.to(device, non_blocking=True)
    return [
        there[start : start + each.nbytes].view(torch.from_numpy(each).dtype).view(each.shape)
        for each, start in zip(tables, starts, strict=False)
    ]
