"""Packing matrices into panels, as `tiles.product` reads them."""

import torch
from torch import Tensor

from gateway.engine.kernels.tiles import PANEL


def elements(columns: int, width: int, dtype: torch.dtype) -> int:
    """Of the packed matrix."""
    return -(-columns // PANEL) * PANEL * row_elements(width, dtype)


def row_elements(width: int, dtype: torch.dtype) -> int:
    """Of a row with what is added to make it whole steps."""
    per_step = 4 // dtype.itemsize
    return -(-width // per_step) * per_step


def pack(weight_CD: Tensor, out: Tensor) -> None:
    """Write the matrix whose rows are columns of the product into `out`, flat, of its dtype."""
    columns, width = weight_CD.shape
    dtype = weight_CD.dtype
    per_step = 4 // dtype.itemsize
    steps = row_elements(width, dtype) // per_step
    panels_PKLS = out.view(-1, steps, PANEL, per_step)
    whole = columns // PANEL
    if width % per_step:
        weight_CD = torch.nn.functional.pad(weight_CD, (0, 1))
    rows = weight_CD[: whole * PANEL].view(whole, PANEL, steps, per_step)
    panels_PKLS[:whole].copy_(rows.transpose(1, 2))
    if whole < len(panels_PKLS):
        panels_PKLS[whole:] = 0
        rest = weight_CD[whole * PANEL :].view(-1, steps, per_step)
        panels_PKLS[whole, :, : len(rest)] = rest.transpose(0, 1)
