"""ModelConfig from a Hugging Face folder. Needs no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gateway.engine.model.config import ARCHITECTURES, ROPE_TYPES, ModelConfig
from gateway.engine.model.errors import ModelError

T = TypeVar("T")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the model folder. Raises ModelError."""
    try:
        content = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object.")
    return content


def read_folder(folder: Path) -> ModelConfig:
    """Read config.json, and the end tokens of generation_config.json where there is one."""
    fields = Fields(folder / "config.json", read_json(folder / "config.json"))
    architecture = fields.text("model_type")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{fields.origin} has model_type {architecture!r}; supported are "
            f"{', '.join(ARCHITECTURES)}."
        )
    _refuse_unsupported(architecture, fields)
    layers = fields.integer("num_hidden_layers")
    heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    theta, scaling = _rope(architecture, fields)
    # Qwen3's own default of the head size is 128, whatever the hidden size.
    head_dim = 128 if architecture == "qwen3" else hidden_size // max(1, heads)
    return ModelConfig(
        architecture=architecture,
        layers=layers,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        heads=heads,
        kv_heads=_kv_heads(architecture, fields, heads),
        head_dim=fields.integer("head_dim", head_dim),
        vocab_size=fields.integer("vocab_size"),
        context_tokens=fields.integer("max_position_embeddings"),
        rms_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_embeddings=fields.flag("tie_word_embeddings", architecture == "smollm3"),
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
        sliding_window=_sliding_window(architecture, fields, layers),
        eos_token_ids=end_tokens(folder, fields),
        bos_token_id=fields.optional_integer("bos_token_id"),
    ).checked()


def _refuse_unsupported(architecture: str, fields: "Fields") -> None:
    for name in ("attention_bias", "mlp_bias"):
        if architecture != "qwen2" and fields.flag(name, False):
            raise ModelError(f"{fields.origin} sets {name}, which is not supported.")
    if (activation := fields.text("hidden_act", "silu")) != "silu":
        raise ModelError(f"{fields.origin} has hidden_act {activation!r}; only silu is supported.")
    if fields.get("quantization_config"):
        raise ModelError(
            f"{fields.origin} has a quantization_config; use the unquantized folder or a GGUF file."
        )
    if architecture == "smollm3":
        rope = fields.get("no_rope_layers")
        if not isinstance(rope, list) or not all(rope):
            raise ModelError(
                f"{fields.origin} has layers without rope (no_rope_layers), "
                "which are not supported."
            )


def _kv_heads(architecture: str, fields: "Fields", heads: int) -> int:
    """As many as heads if the field is null, or not there in a Llama of the time before it."""
    if architecture != "llama" and "num_key_value_heads" not in fields.values:
        raise ModelError(f"{fields.origin} has no num_key_value_heads.")
    return fields.integer("num_key_value_heads", heads)


def _sliding_window(architecture: str, fields: "Fields", layers: int) -> int | None:
    """The window of all layers. Raises ModelError where layers differ."""
    default = None if architecture == "smollm3" else 4096
    window = (
        fields.optional_integer("sliding_window") if "sliding_window" in fields.values else default
    )
    if architecture == "llama":
        return None
    if architecture == "mistral":
        return window
    if not fields.flag("use_sliding_window", False) or window is None:
        return None
    kinds = fields.get("layer_types")
    if not isinstance(kinds, list):
        first = fields.integer("max_window_layers", 28)
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if len(set(kinds)) != 1:
        raise ModelError(
            f"{fields.origin} mixes layers with and without a sliding window, "
            "which is not supported."
        )
    return window if kinds[0] == "sliding_attention" else None


def _rope(architecture: str, fields: "Fields") -> tuple[float, dict[str, Any] | None]:
    """Base and scaling, from `rope_parameters` (transformers 5) or the older pair of fields."""
    raw = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(raw, dict):
        raise ModelError(f"{fields.origin}: rope parameters must be an object.")
    if "full_attention" in raw or "sliding_attention" in raw:
        raise ModelError(f"{fields.origin} has rope parameters per layer type; not supported.")
    default_theta = 2_000_000.0 if architecture == "smollm3" else 10_000.0
    outer_theta = fields.number("rope_theta", default_theta)
    theta = Fields(fields.origin, raw).number("rope_theta", outer_theta)
    kind = raw.get("rope_type", raw.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ModelError(
            f"{fields.origin} has rope type {kind!r}; supported are {', '.join(ROPE_TYPES)}."
        )
    partial = raw.get("partial_rotary_factor", fields.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ModelError(f"{fields.origin} has partial_rotary_factor; it is not supported.")
    if kind == "default":
        return theta, None
    dropped = ("type", "rope_theta", "partial_rotary_factor")
    scaling = {name: value for name, value in raw.items() if name not in dropped}
    scaling["rope_type"] = kind
    if kind in ("llama3", "yarn"):
        # transformers' own order: a top-level value wins, then the object's, then the context.
        outer = fields.optional_integer("original_max_position_embeddings")
        inner = Fields(fields.origin, raw).integer(
            "original_max_position_embeddings", fields.integer("max_position_embeddings")
        )
        scaling["original_max_position_embeddings"] = outer or inner
    _check_scaling(fields.origin, scaling)
    return theta, scaling


def _check_scaling(origin: Path, scaling: dict[str, Any]) -> None:
    needed = ["factor"]
    if scaling["rope_type"] == "llama3":
        needed += ["low_freq_factor", "high_freq_factor"]
    for name in needed:
        if not Fields(origin, scaling).number(name) > 0:
            raise ModelError(f"{origin}: rope scaling needs a positive {name}.")


def end_tokens(folder: Path, fields: "Fields") -> list[int]:
    """End tokens: those of generation_config.json, else of config.json."""
    generation = folder / "generation_config.json"
    values = read_json(generation).get("eos_token_id") if generation.is_file() else None
    if values is None:
        values = fields.get("eos_token_id")
    if values is None:
        return []
    ids = values if isinstance(values, list) else [values]
    if not all(type(value) is int and value >= 0 for value in ids):
        raise ModelError(f"{folder}: eos_token_id must be a token id or a list of them.")
    return list(dict.fromkeys(ids))


class Fields:
    """A JSON object's fields with their types checked; null counts as absent."""

    def __init__(self, origin: Path, values: Mapping[str, Any]) -> None:
        self.origin = origin
        self.values = values

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def text(self, name: str, default: str | None = None) -> str:
        return self._typed(name, str, default)

    def integer(self, name: str, default: int | None = None) -> int:
        return self._typed(name, int, default)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name)
        return float(self._typed(name, int if type(value) is int else float, default))

    def flag(self, name: str, default: bool) -> bool:
        return self._typed(name, bool, default)

    def optional_integer(self, name: str) -> int | None:
        return None if self.values.get(name) is None else self.integer(name)

    def _typed(self, name: str, kind: type[T], default: T | None) -> T:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.origin} has no {name}.")
        # bool is an int to isinstance, and never one here.
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelError(f"{self.origin}: {name} must be of type {kind.__name__}.")
        return value
