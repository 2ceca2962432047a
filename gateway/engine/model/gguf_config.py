"""ModelConfig from the metadata of a GGUF file. Needs no torch."""

from typing import Any

from gateway.engine.model.config import GGUF_ARCHITECTURES, ModelConfig
from gateway.engine.model.errors import ModelError
from gateway.engine.model.gguf import GgufFile
from gateway.engine.model.gguf_header import Metadata

END_TOKENS = ("eos", "eot", "eom")
"""End of sequence, of turn, of message: an answer ends at any of them."""
ROPE_FACTORS = "rope_freqs.weight"
"""A tensor, if the file has llama3's rope: what each inverse frequency is divided by."""


def read_gguf(file: GgufFile) -> ModelConfig:
    """Raises ModelError, also for an architecture that is not supported."""
    metadata = file.metadata
    architecture = metadata.text("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise ModelError(
            f"{file.path} has architecture {architecture!r}; supported are "
            f"{', '.join(GGUF_ARCHITECTURES)}."
        )
    key = f"{architecture}.".__add__
    if metadata.integer(key("expert_count"), 0):
        raise ModelError(f"{file.path} is a mixture of experts, which is not supported.")
    layers = metadata.integer(key("block_count"))
    hidden_size = metadata.integer(key("embedding_length"))
    heads = _same_in_all_layers(metadata, key("attention.head_count"))
    head_dim = metadata.integer(key("attention.key_length"), hidden_size // max(1, heads))
    if metadata.integer(key("attention.value_length"), head_dim) != head_dim:
        raise ModelError(f"{file.path} has key and value heads of different sizes.")
    if metadata.integer(key("rope.dimension_count"), head_dim) != head_dim:
        raise ModelError(f"{file.path} applies rope to a part of each head; not supported.")
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path} has no tensor token_embd.weight.")
    window = metadata.integer(key("attention.sliding_window"), 0)
    return ModelConfig(
        architecture=architecture,
        layers=layers,
        hidden_size=hidden_size,
        intermediate_size=_same_in_all_layers(metadata, key("feed_forward_length")),
        heads=heads,
        kv_heads=_same_in_all_layers(metadata, key("attention.head_count_kv"), heads),
        head_dim=head_dim,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        context_tokens=metadata.integer(key("context_length")),
        rms_eps=metadata.number(key("attention.layer_norm_rms_epsilon")),
        rope_theta=metadata.number(key("rope.freq_base"), 10_000.0),
        rope_scaling=_rope_scaling(file, key("rope.scaling."), head_dim),
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        sliding_window=window or None,
        eos_token_ids=end_tokens(metadata),
        bos_token_id=(
            metadata.integer("tokenizer.ggml.bos_token_id")
            if "tokenizer.ggml.bos_token_id" in metadata
            else None
        ),
    ).checked()


def end_tokens(metadata: Metadata) -> list[int]:
    """The ids that end an answer, without repeats."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in END_TOKENS]
    return list(dict.fromkeys(metadata.integer(key) for key in keys if key in metadata))


def _same_in_all_layers(metadata: Metadata, key: str, default: int | None = None) -> int:
    """A count that GGUF may also write as one number a layer."""
    if isinstance(metadata.get(key), int) or key not in metadata:
        return metadata.integer(key, default)
    values = set(metadata.integers(key))
    if len(values) != 1:
        raise ModelError(f"{metadata.path}: {key} differs between layers; not supported.")
    return values.pop()


def _rope_scaling(file: GgufFile, prefix: str, head_dim: int) -> dict[str, Any] | None:
    metadata = file.metadata
    kind = metadata.text(prefix + "type", "none")
    if ROPE_FACTORS in file.tensors:
        if kind != "none" or file.tensors[ROPE_FACTORS].shape != (head_dim // 2,):
            raise ModelError(f"{file.path} has a {ROPE_FACTORS} that does not fit its metadata.")
        factors = [float(value) for value in file.rows(ROPE_FACTORS, 0, 1)[0]]
        if not all(factor > 0 for factor in factors):
            raise ModelError(f"{file.path} has a {ROPE_FACTORS} that is not positive.")
        return {"rope_type": "factors", "factors": factors}
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{file.path} has rope scaling {kind!r}; supported are linear and yarn.")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": metadata.number(prefix + "factor")}
    if not scaling["factor"] > 0:
        raise ModelError(f"{file.path}: {prefix}factor must be positive.")
    if kind == "yarn":
        original = metadata.integer(prefix + "original_context_length")
        scaling["original_max_position_embeddings"] = original
    return scaling
