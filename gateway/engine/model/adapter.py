"""From an adapter version's files to a slab: its rank rows, laid out as pages of the pool."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load

from gateway.engine.memory.buffer import Slab, store
from gateway.engine.memory.pager import AdapterError
from gateway.engine.memory.rows import RowLayout, RowLayoutError, TargetRank
from gateway.engine.messages import (
    MANIFEST_FILE,
    WEIGHTS_FILE,
    AdapterManifest,
    AdapterRef,
    TargetWeights,
)


def read_adapter(
    ref: AdapterRef,
    projections: Mapping[str, tuple[int, int]],
    page_elements: int,
    dtype: torch.dtype,
    pin: bool = False,
) -> Slab:
    """Read a version's manifest and weights into a slab of pages (pages, page_elements).

    Values are cast to `dtype`; B is stored transposed. Raises AdapterError.
    """
    folder = Path(ref.folder)
    try:
        manifest = msgspec.json.decode((folder / MANIFEST_FILE).read_bytes(), type=AdapterManifest)
        data = (folder / WEIGHTS_FILE).read_bytes()
        if hashlib.sha256(data).hexdigest() != manifest.weights_sha256:
            raise AdapterError(
                "its weights file is damaged: the checksum differs from the upload's"
            )
        layout = RowLayout.plan(
            {(t.layer, t.target): TargetRank(t.rank, t.scale) for t in manifest.targets},
            projections,
            page_elements,
        )
        pages_NP = torch.zeros(layout.pages, page_elements, dtype=dtype, pin_memory=pin)
        # not safe_open, which for torch never frees two integers of each tensor (safetensors 0.8)
        _fill(pages_NP, layout, manifest, load(data))
    except FileNotFoundError as error:
        raise AdapterError(
            f"its file {Path(error.filename).name} is missing from the store"
        ) from error
    except (OSError, msgspec.MsgspecError, SafetensorError, RowLayoutError, KeyError) as error:
        raise AdapterError(f"its files can't be read: {error}") from error
    return Slab(layout, pages_NP)


def _fill(
    pages_NP: torch.Tensor,
    layout: RowLayout,
    manifest: AdapterManifest,
    tensors: Mapping[str, torch.Tensor],
) -> None:
    by_target = {(item.layer, item.target): item for item in manifest.targets}
    pages = list(range(layout.pages))

    def tensor(name: str, shape: tuple[int, int]) -> torch.Tensor:
        values = tensors[name]
        if tuple(values.shape) != shape:
            raise AdapterError(f"{name} has shape {tuple(values.shape)}, expected {shape}")
        values = values.to(pages_NP.dtype)
        if not torch.isfinite(values).all():
            raise AdapterError(f"{name} holds NaN or Inf, or overflows {pages_NP.dtype}")
        return values

    for (layer, _), rows in layout.groups.items():
        items: list[TargetWeights] = [by_target[layer, part.target] for part in rows.expand]
        a_RD = [tensor(item.a, (item.rank, rows.shrink.width)) for item in items]
        store(pages_NP, pages, rows.shrink, torch.cat(a_RD))
        for part, item in zip(rows.expand, items, strict=True):
            b_CR = tensor(item.b, (part.rows.width, item.rank))
            store(pages_NP, pages, part.rows, b_CR.T)
