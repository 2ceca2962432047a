"""The two kinds of files that hold weights, under one set of names: Hugging Face's.

A checkpoint tells names and shapes without reading data, and copies one tensor at a time into
memory that the caller owns, in the caller's dtype and in Hugging Face's row order.
"""

from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open

from gateway.engine.model.config import ModelConfig
from gateway.engine.model.errors import ModelError
from gateway.engine.model.folder_config import read_folder, read_json
from gateway.engine.model.gguf import GgufFile
from gateway.engine.model.gguf_config import ROPE_FACTORS, read_gguf

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CHUNK_ELEMENTS = 1 << 22
"""Elements dequantised at a time, so that a large embedding never stands whole in float32."""

# GGUF's names of the parts of a layer, "blk.3.attn_q" + ".weight" or ".bias".
_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_WHOLE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_NAMES = {gguf: folder for folder, gguf in _PARTS.items()}
_MODEL_NAMES = {gguf: folder for folder, gguf in _WHOLE.items()}


class Checkpoint(Protocol):
    config: ModelConfig
    shapes: dict[str, tuple[int, ...]]
    """Every tensor that the files hold, except those that carry nothing to compute with."""
    files: list[Path]
    """What the content digest covers, in a fixed order."""

    def copy_into(self, name: str, out: torch.Tensor) -> None:
        """Write a tensor into `out`, which has its shape. Raises ModelError."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def open_checkpoint(path: Path) -> Checkpoint:
    """A Hugging Face folder or a GGUF file. Raises ModelError."""
    if path.is_dir():
        return FolderCheckpoint(path)
    if path.is_file():
        return GgufCheckpoint(path)
    raise ModelError(f"There is no model at {path}: name a Hugging Face folder or a GGUF file.")


class FolderCheckpoint:
    """config.json and safetensors files, one or many with an index."""

    def __init__(self, folder: Path) -> None:
        self.config = read_folder(folder)
        weights = _weight_files(folder)
        self.files = [folder / "config.json", *weights]
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._open: dict[str, Any] = {}
        for file in weights:
            try:
                handle: Any = safe_open(str(file), framework="pt")
                for name in handle.keys():  # noqa: SIM118 (not a mapping)
                    if name in self._open:
                        raise ModelError(f"{folder}: tensor {name} is in two files.")
                    self._open[name] = handle
                    self.shapes[name] = tuple(handle.get_slice(name).get_shape())
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file} cannot be read as safetensors: {error}.") from error
        # Old Llama checkpoints carry the rotary frequencies; with tied embeddings a stored head is
        # not used by transformers either.
        unused = [name for name in self.shapes if name.endswith("rotary_emb.inv_freq")]
        if self.config.tie_embeddings:
            unused.append("lm_head.weight")
        for name in unused:
            self.shapes.pop(name, None)

    def copy_into(self, name: str, out: torch.Tensor) -> None:
        try:
            tensor = self._open[name].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"Tensor {name} cannot be read: {error}.") from error
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise ModelError(
                f"Tensor {name} has dtype {tensor.dtype}; supported are float32, float16, bfloat16."
            )
        out.copy_(tensor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._open.clear()  # the handles close with their last reference


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{folder / INDEX} has no weight_map.")
        names = sorted({str(name) for name in weight_map.values()})
    else:
        names = [SINGLE]
    for name in names:
        if Path(name).name != name:
            raise ModelError(f"{folder / INDEX} names {name!r}, which is not a file beside it.")
        if not (folder / name).is_file():
            raise ModelError(f"{folder} has no {name}; the weights must be safetensors files.")
    return [folder / name for name in names]


class GgufCheckpoint:
    """One GGUF file; its tensors are dequantised as they are copied."""

    def __init__(self, path: Path) -> None:
        self.files = [path]
        self._file = GgufFile.open(path)
        try:
            self.config = read_gguf(self._file)
        except BaseException:
            self._file.close()
            raise
        self._names = {
            _folder_name(name): name for name in self._file.tensors if name != ROPE_FACTORS
        }
        self.shapes = {name: self._file.tensors[gguf].shape for name, gguf in self._names.items()}

    def copy_into(self, name: str, out: torch.Tensor) -> None:
        self._dequantise(self._names[name], out)
        # Llama files hold q and k with the rope pairs of a head side by side; see `_split_pairs`.
        if self.config.architecture == "llama":
            if ".q_proj." in name:
                _split_pairs(out, self.config.heads)
            elif ".k_proj." in name:
                _split_pairs(out, self.config.kv_heads)

    def _dequantise(self, name: str, out: torch.Tensor) -> None:
        rows = prod(out.shape[:-1])
        out_rows = out.view(rows, out.shape[-1])
        step = max(1, CHUNK_ELEMENTS // out.shape[-1])
        for first in range(0, rows, step):
            count = min(step, rows - first)
            values = torch.from_numpy(self._file.rows(name, first, count))
            out_rows[first : first + count].copy_(values)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


def _folder_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor; a name that is not known stays as it is."""
    stem, _, kind = name.rpartition(".")
    if stem in _MODEL_NAMES:
        return f"{_MODEL_NAMES[stem]}.{kind}"
    head, _, part = stem.partition(".")
    number, _, part = part.partition(".")
    if head == "blk" and part in _LAYER_NAMES:
        return f"model.layers.{number}.{_LAYER_NAMES[part]}.{kind}"
    return name


def _split_pairs(rows: torch.Tensor, heads: int) -> None:
    """Put the rows of each head from llama.cpp's order into Hugging Face's, in place.

    Rope turns pairs of rows. llama.cpp wants a pair side by side, Hugging Face half a head apart:
        0 0' 1 1' 2 2' …   →   0 1 2 … 0' 1' 2' …
    """
    pairs = rows.view(heads, -1, 2, *rows.shape[1:])
    rows.copy_(pairs.transpose(1, 2).reshape(rows.shape))
