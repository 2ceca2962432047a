"""From an adapter version's files to a slab: its rank rows, laid out as pages of the pool."""

import hashlib
from collections.abc import Mapping
from functools import lru_cache
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
from gateway.engine.model import page_file


def read_adapter(
    ref: AdapterRef,
    projections: Mapping[str, tuple[int, int]],
    page_elements: int,
    dtype: torch.dtype,
    pin: bool = False,
) -> Slab:
    """Read a version's manifest and weights into a slab of pages (pages, page_elements).

    Values are cast to `dtype`; B is stored transposed. The pages are kept beside the weights
    (`page_file`) and read from there the next time. Raises AdapterError.
    """
    folder = Path(ref.folder)
    try:
        text = (folder / MANIFEST_FILE).read_bytes()
        manifest = msgspec.json.decode(text, type=AdapterManifest)
        layout = _layout(_ranks(manifest), tuple(projections.items()), page_elements)

        def make() -> Slab:
            data = (folder / WEIGHTS_FILE).read_bytes()
            if hashlib.sha256(data).hexdigest() != manifest.weights_sha256:
                raise AdapterError(
                    "its weights file is damaged: the checksum differs from the upload's"
                )
            pages_NP = torch.zeros(layout.pages, page_elements, dtype=dtype, pin_memory=pin)
            # not safe_open, which for torch never frees two integers of each tensor
            # (safetensors 0.8)
            _fill(pages_NP, layout, manifest, load(data))
            return Slab(layout, pages_NP)

        source = hashlib.sha256(text).hexdigest()
        return page_file.read_through(folder, source, layout, page_elements, dtype, pin, make)
    except FileNotFoundError as error:
        raise AdapterError(
            f"its file {Path(error.filename).name} is missing from the store"
        ) from error
    except RowLayoutError as error:
        raise AdapterError(str(error)) from error
    except (OSError, msgspec.MsgspecError, SafetensorError, KeyError) as error:
        raise AdapterError(f"its files can't be read: {error}") from error


Ranks = tuple[tuple[tuple[int, str], TargetRank], ...]


def _ranks(manifest: AdapterManifest) -> Ranks:
    return tuple(((t.layer, t.target), TargetRank(t.rank, t.scale)) for t in manifest.targets)


@lru_cache(maxsize=256)
def _layout(
    ranks: Ranks, projections: tuple[tuple[str, tuple[int, int]], ...], page_elements: int
) -> RowLayout:
    """Adapters trained with the same config have the same layout: kept once, planned once."""
    return RowLayout.plan(dict(ranks), dict(projections), page_elements)


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
        return values

    for (layer, _), rows in layout.groups.items():
        items: list[TargetWeights] = [by_target[layer, part.target] for part in rows.expand]
        a_RD = [tensor(item.a, (item.rank, rows.shrink.width)) for item in items]
        store(pages_NP, pages, rows.shrink, torch.cat(a_RD))
        for part, item in zip(rows.expand, items, strict=True):
            b_CR = tensor(item.b, (part.rows.width, item.rank))
            store(pages_NP, pages, part.rows, b_CR.T)
    if not torch.isfinite(pages_NP).all():
        raise AdapterError(f"its weights hold NaN or Inf, or overflow {pages_NP.dtype}")
