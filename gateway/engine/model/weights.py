"""The weights of a base model in memory, fused as the decoder wants them.

Dimension suffixes: V vocabulary, D hidden size, N rows of q, k and v together, H size of a head,
F twice the intermediate size in `gate_up_FD` and once in `down_DF`.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from gateway.engine.model.checkpoint import Checkpoint, open_checkpoint
from gateway.engine.model.config import ModelConfig
from gateway.engine.model.errors import ModelError

Progress = Callable[[float], None]
"""Told the share of the work that is done, from 0 to 1."""

DIGEST_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One decoder layer; rows of q and k in Hugging Face's order (rope turns half-heads)."""

    input_norm_D: torch.Tensor
    qkv_ND: torch.Tensor
    """Rows of q, then k, then v."""
    qkv_bias_N: torch.Tensor | None
    q_norm_H: torch.Tensor | None
    k_norm_H: torch.Tensor | None
    o_DN: torch.Tensor
    """N here: the rows of q only (heads * head_dim)."""
    post_norm_D: torch.Tensor
    gate_up_FD: torch.Tensor
    """Rows of gate, then up."""
    down_DF: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    embed_VD: torch.Tensor
    layers: list[LayerWeights]
    final_norm_D: torch.Tensor
    head_VD: torch.Tensor
    """The very tensor `embed_VD` if the model's embeddings are tied."""

    def to(self, device: str) -> "Weights":
        """The same weights on another device; tied embeddings stay one tensor."""
        embed_VD = self.embed_VD.to(device)
        tied = self.head_VD is self.embed_VD
        return Weights(
            embed_VD,
            [_moved(layer, device) for layer in self.layers],
            self.final_norm_D.to(device),
            embed_VD if tied else self.head_VD.to(device),
        )


def _moved(layer: LayerWeights, device: str) -> LayerWeights:
    tensors: dict[str, Any] = {field.name: getattr(layer, field.name) for field in fields(layer)}
    moved: dict[str, Any] = {
        name: tensor if tensor is None else tensor.to(device) for name, tensor in tensors.items()
    }
    return LayerWeights(**moved)


def load(
    path: Path, dtype: torch.dtype, progress: Progress | None = None
) -> tuple[ModelConfig, Weights, str]:
    """Read a Hugging Face folder or a GGUF file into CPU tensors of `dtype`.

    The third value is the content digest, 64 hex digits: SHA-256 over the content of the
    files that decide the numbers, each as its length (8 bytes, little-endian) and its bytes:
    config.json and then the weight files in the order of their names; of a GGUF the one file. The
    tokenizer of a folder is not covered.

    Beside the result, memory for one tensor is needed. Raises ModelError.
    """
    report = progress or _ignore
    with open_checkpoint(path) as checkpoint:
        config = checkpoint.config
        _check_shapes(path, tensor_shapes(config), checkpoint.shapes)
        weights = _Builder(checkpoint, dtype).build(lambda share: report(0.9 * share))
        digest = _digest(checkpoint.files)
    report(1.0)
    return config, weights, digest


def embedding_digests(weights: Weights) -> dict[str, str]:
    """SHA-256 of the input and of the output embeddings; see `ModelInfo.embeddings_sha256`."""
    embed = _sha256(weights.embed_VD)
    head = embed if weights.head_VD is weights.embed_VD else _sha256(weights.head_VD)
    return {"embed_tokens": embed, "lm_head": head}


def _sha256(values: torch.Tensor) -> str:
    return hashlib.sha256(values.view(torch.uint8).numpy().data).hexdigest()


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of this config has, by Hugging Face's name."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for i in range(config.layers):
        layer = f"model.layers.{i}."
        shapes |= {
            layer + "input_layernorm.weight": (hidden,),
            layer + "self_attn.q_proj.weight": (q_rows, hidden),
            layer + "self_attn.k_proj.weight": (kv_rows, hidden),
            layer + "self_attn.v_proj.weight": (kv_rows, hidden),
            layer + "self_attn.o_proj.weight": (hidden, q_rows),
            layer + "post_attention_layernorm.weight": (hidden,),
            layer + "mlp.gate_proj.weight": (inner, hidden),
            layer + "mlp.up_proj.weight": (inner, hidden),
            layer + "mlp.down_proj.weight": (hidden, inner),
        }
        if config.qkv_bias:
            shapes |= {
                layer + "self_attn.q_proj.bias": (q_rows,),
                layer + "self_attn.k_proj.bias": (kv_rows,),
                layer + "self_attn.v_proj.bias": (kv_rows,),
            }
        if config.qk_norm:
            shapes |= {
                layer + "self_attn.q_norm.weight": (config.head_dim,),
                layer + "self_attn.k_norm.weight": (config.head_dim,),
            }
    return shapes


def _check_shapes(
    path: Path, expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]
) -> None:
    """Names and shapes must be exactly those of the config: what is left over is not computed."""
    if missing := [name for name in expected if name not in found]:
        raise ModelError(f"{path} has no {_some(missing)}.")
    if extra := [name for name in found if name not in expected]:
        raise ModelError(f"{path} has tensors that the model does not use: {_some(extra)}.")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelError(
                f"{path}: tensor {name} has shape {list(found[name])}; "
                f"its config asks for {list(shape)}."
            )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(name[:200] for name in names[:5]) + more


class _Builder:
    """Copies tensors from a checkpoint straight to their place in the fused ones."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype

    def build(self, report: Progress) -> Weights:
        config = self._checkpoint.config
        embed_VD = self._read("model.embed_tokens.weight")
        layers = []
        for i in range(config.layers):
            layers.append(self._layer(f"model.layers.{i}.", config))
            report((i + 1) / config.layers)
        return Weights(
            embed_VD=embed_VD,
            layers=layers,
            final_norm_D=self._read("model.norm.weight"),
            head_VD=embed_VD if config.tie_embeddings else self._read("lm_head.weight"),
        )

    def _layer(self, layer: str, config: ModelConfig) -> LayerWeights:
        qkv = [f"{layer}self_attn.{name}_proj" for name in "qkv"]
        gate_up = [f"{layer}mlp.{name}_proj.weight" for name in ("gate", "up")]
        return LayerWeights(
            input_norm_D=self._read(layer + "input_layernorm.weight"),
            qkv_ND=self._read(*(f"{name}.weight" for name in qkv)),
            qkv_bias_N=self._read(*(f"{name}.bias" for name in qkv)) if config.qkv_bias else None,
            q_norm_H=self._read(layer + "self_attn.q_norm.weight") if config.qk_norm else None,
            k_norm_H=self._read(layer + "self_attn.k_norm.weight") if config.qk_norm else None,
            o_DN=self._read(layer + "self_attn.o_proj.weight"),
            post_norm_D=self._read(layer + "post_attention_layernorm.weight"),
            gate_up_FD=self._read(*gate_up),
            down_DF=self._read(layer + "mlp.down_proj.weight"),
        )

    def _read(self, *names: str) -> torch.Tensor:
        """The named tensors, one below the other."""
        shapes = [self._checkpoint.shapes[name] for name in names]
        rows = [shape[0] for shape in shapes]
        out = torch.empty(sum(rows), *shapes[0][1:], dtype=self._dtype)
        first = 0
        for name, count in zip(names, rows, strict=True):
            self._checkpoint.copy_into(name, out[first : first + count])
            first += count
        return out


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.stat().st_size.to_bytes(8, "little"))
        with path.open("rb") as file:
            while chunk := file.read(DIGEST_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def _ignore(share: float) -> None:
    pass
