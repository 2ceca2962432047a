"""adapter_config.json: every field that PEFT writes is honoured, without effect here, or refused.

The table below is the whole decision. A field that it doesn't know may be absent, null, false or
empty; anything else could change the answers, and is refused by name.
"""

import json
import math
import re
from collections.abc import Callable
from typing import Any, NoReturn

from msgspec import Struct

from gateway.adapters.patterns import (
    PATTERN_CHARS_MAX,
    WAYS_MAX,
    UnboundedPattern,
    compile_bounded,
    count_ways,
    has_outer_alternatives,
)
from gateway.errors import InvalidAdapter

CONFIG_BYTES_MAX = 2**20
PATTERNS_MAX = 4096
RANK_MAX = 2**16
DEFAULT_RANK, DEFAULT_ALPHA = 8, 8
"""PEFT's own, for a config that leaves them out."""

HONOURED = {
    "peft_type", "task_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern",
    "bias", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
    "init_lora_weights", "ensure_weight_tying",
}  # fmt: skip

WITHOUT_EFFECT = {
    "auto_mapping": "says how to find the base model's class",
    "base_model_name_or_path": "the shapes decide whether the adapter fits this base model",
    "revision": "of the base model's repository",
    "peft_version": "who wrote the file",
    "inference_mode": "we only serve",
    "lora_dropout": "active in training only",
    "fan_in_fan_out": "PEFT resets it for nn.Linear, and all projections here are nn.Linear",
    "megatron_core": "a module name, used only with megatron_config",
    "loftq_config": "used only to initialise",
    "eva_config": "used only to initialise",
    "corda_config": "used only to initialise",
    "lora_ga_config": "used only to initialise",
    "qalora_group_size": "used only with use_qalora",
    "runtime_config": "where PEFT keeps weights while it computes",
    "merge_weights": "early PEFT: whether to merge at load",
}

REFUSED = {
    "modules_to_save": "Train without it: whole replaced modules are not served yet. LoRA on "
    "them is: embed_tokens or lm_head in target_modules.",
    "trainable_token_indices": "Train without it: replaced rows of embeddings are not served yet. "
    "LoRA on them is: embed_tokens in target_modules.",
    "target_parameters": "Target nn.Linear modules with target_modules instead.",
    "use_dora": "Train with use_dora=False: DoRA is not served yet.",
    "lora_bias": "Train with lora_bias=False.",
    "use_qalora": "Train with use_qalora=False.",
    "use_bdlora": "Train without it.",
    "alora_invocation_tokens": "Activated LoRA is not served yet.",
    "layer_replication": "It changes the number of the base model's layers.",
    "megatron_config": "Megatron layers are not served.",
    "velora_config": "Train without it.",
    "monteclora_config": "Train without it.",
    "arrow_config": "Upload the single adapters instead of their router.",
    "kasa_config": "It changes the base model's weights.",
    "enable_lora": "It belongs to fused projections of GPT-2-like models.",
}

PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Loaded onto the unchanged base model, as PEFT does. The others change the base at load."""
CONVERT = (
    "It changes the base model's weights. Convert the adapter with save_pretrained(folder, "
    "path_initial_model_for_weight_conversion=…), which makes it an ordinary LoRA."
)
LORA_GA_WARNING = (
    "Trained with LoRA-GA: unless it was converted when saved, it answers here and in PEFT on the "
    "unchanged base model, which differs from the model at training."
)


class PeftConfig(Struct, frozen=True):
    """What of a config decides the answers, and where it says that the adapter applies."""

    rank: int
    alpha: float
    rslora: bool
    rank_pattern: list[tuple[re.Pattern[str], int]]
    alpha_pattern: list[tuple[re.Pattern[str], float]]
    target_modules: list[str] | str | None
    exclude_modules: list[str] | str | None
    layers: frozenset[int] | None
    layers_pattern: list[str]
    ties_embeddings: bool
    """Whether LoRA on tied embeddings is to be tied, too."""
    base_model_name: str
    canonical: bytes
    """The same config as JSON that doesn't depend on how the file was written."""
    warnings: list[str]

    def rank_of(self, module: str) -> int:
        return next((rank for key, rank in self.rank_pattern if key.match(module)), self.rank)

    def scale_of(self, module: str) -> float:
        """alpha ÷ r, or alpha ÷ √r with rsLoRA; first matching pattern wins, as in PEFT."""
        alphas = (alpha for key, alpha in self.alpha_pattern if key.match(module))
        alpha, rank = next(alphas, self.alpha), self.rank_of(module)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank


def read_config(text: bytes) -> PeftConfig:
    """Raises InvalidAdapter naming the field that cannot be served, and what to do about it."""
    try:
        return _read_config(_parse(text))
    except RecursionError:
        _refuse("is nested too deeply.")


def _read_config(fields: dict[str, Any]) -> PeftConfig:
    _check_kind(fields)
    for name, value in fields.items():
        _check_known(name, value)
    warnings = _check_init(fields.get("init_lora_weights"))
    target_modules = _read(fields, "target_modules", _modules, None)
    exclude_modules = _read(fields, "exclude_modules", _modules, None) or None
    if _unchecked(target_modules) or _unchecked(exclude_modules):
        # the tensors decide what is adapted; the config only confirms it
        warnings.append(
            "The pattern of target_modules or exclude_modules is too costly to match, so it was "
            "not checked against the weights: every projection that has weights is served."
        )
        target_modules = exclude_modules = None
    return PeftConfig(
        rank=_read(fields, "r", _rank, DEFAULT_RANK),
        alpha=_read(fields, "lora_alpha", _number, DEFAULT_ALPHA),
        rslora=_read(fields, "use_rslora", _boolean, False),
        rank_pattern=_patterns(fields, "rank_pattern", _rank),
        alpha_pattern=_patterns(fields, "alpha_pattern", _number),
        target_modules=target_modules,
        exclude_modules=exclude_modules,
        layers=_read(fields, "layers_to_transform", _layers, None),
        layers_pattern=_read(fields, "layers_pattern", _layers_pattern, []),
        ties_embeddings=_read(fields, "ensure_weight_tying", _boolean, False),
        base_model_name=str(fields.get("base_model_name_or_path") or "")[:100],
        canonical=_canonical(fields),
        warnings=warnings,
    )


def _parse(text: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            _refuse("names a field twice.")
        return found

    try:
        fields = json.loads(
            text.decode("utf-8-sig"),
            object_pairs_hook=once,
            parse_constant=_not_json,
            parse_float=_finite,
        )
    except ValueError:
        _refuse("is not JSON.")
    if not isinstance(fields, dict):
        _refuse("is not a JSON object.")
    for name, value in fields.items():
        _check_unicode(name, value)
    return fields


def _check_unicode(name: str, value: object) -> None:
    """Half of a surrogate pair can be neither matched with a name nor shown in an answer."""
    try:
        json.dumps({name: value}, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        known = name in HONOURED or name in WITHOUT_EFFECT or name in REFUSED
        _refuse(
            f"has half of a surrogate pair, which is no Unicode text, in the field {_show(name)}.",
            name if known else None,
        )


def _not_json(constant: str) -> NoReturn:
    raise ValueError(constant)


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(text)
    return number


def _check_kind(fields: dict[str, Any]) -> None:
    kind = fields.get("peft_type")
    if kind is None and "model_type" in fields:
        _refuse(
            "is the base model's config.json. Upload the adapter_config.json that PEFT's "
            "model.save_pretrained(folder) writes."
        )
    if kind != "LORA":
        _refuse(f"has peft_type {_show(kind)}; only LORA adapters are served.", "peft_type")
    if (task := fields.get("task_type")) not in (None, "CAUSAL_LM"):
        _refuse(f"has task_type {_show(task)}; only CAUSAL_LM adapters are served.", "task_type")
    if (bias := fields.get("bias", "none")) not in (None, "none"):
        _refuse(f"has bias {_show(bias)}. Train with bias='none'.", "bias")


def _check_known(name: str, value: object) -> None:
    if name in HONOURED or name in WITHOUT_EFFECT or not value:
        return
    if name in REFUSED:
        _refuse(f"sets {name} to {_show(value)}, which is not served. {REFUSED[name]}", name)
    _refuse(
        f"sets the field {_show(name)} to {_show(value)}, which this server does not know. It "
        "could change the answers, so the adapter is refused: train without it."
    )


def _check_init(init: object) -> list[str]:
    if not (init is None or isinstance(init, bool) or init in PLAIN_INITS):
        _refuse(f"has init_lora_weights {_show(init)}. {CONVERT}", "init_lora_weights")
    return [LORA_GA_WARNING] if init == "lora_ga" else []


def _patterns(
    fields: dict[str, Any], name: str, read: Callable[[object], Any]
) -> list[tuple[re.Pattern[str], Any]]:
    patterns = fields.get(name) or {}
    if not isinstance(patterns, dict) or len(patterns) > PATTERNS_MAX:
        _refuse(f"has a {name} that is not an object of at most {PATTERNS_MAX} entries.", name)
    found, ways = [], 0
    for key, value in patterns.items():
        try:
            ways += count_ways(key)
            if ways > WAYS_MAX:
                raise UnboundedPattern("together they have too many repeats and alternatives")
            # PEFT: utils/other.py, get_pattern_key
            compiled = compile_bounded(key, r"(.*\.)?({})$")
        except UnboundedPattern as error:
            _refuse(
                f"has the {name} {_show(key)}, which cannot be matched: {error}. "
                "Write module names, such as layers.0.self_attn.q_proj.",
                name,
            )
        found.append((compiled, _take(name, value, read)))
    return found


def _read(fields: dict[str, Any], name: str, read: Callable[[object], Any], default: object) -> Any:
    value = fields.get(name)
    return default if value is None else _take(name, value, read)


def _take(name: str, value: object, read: Callable[[object], Any]) -> Any:
    try:
        return read(value)
    except UnboundedPattern as error:
        _refuse(
            f"has the {name} {_show(value)}, which cannot be matched: {error}. "
            "Write plain names instead.",
            name,
        )
    except (ValueError, OverflowError):
        _refuse(f"has a {name} that cannot be used: {_show(value)}.", name)


def _rank(value: object) -> int:
    if type(value) is not int or not 0 < value <= RANK_MAX:
        raise ValueError
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError
    return float(value)


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _layers(value: object) -> frozenset[int] | None:
    layers = value if isinstance(value, list) else [value]
    if not all(type(layer) is int and 0 <= layer < 2**16 for layer in layers):
        raise ValueError
    return frozenset(layers) or None


def _text_list(value: object) -> list[str]:
    items = value if isinstance(value, list) else [value]
    texts = [item for item in items if isinstance(item, str)]
    if len(texts) < len(items) or len(texts) > PATTERNS_MAX:
        raise ValueError
    return [text for text in texts if text]


def _layers_pattern(value: object) -> list[str]:
    patterns = _text_list(value)
    if sum(map(count_ways, patterns)) > WAYS_MAX:
        raise UnboundedPattern("it has too many repeats and alternatives")
    for pattern in patterns:
        if has_outer_alternatives(pattern):  # PEFT would look for a number in each, and fail
            raise UnboundedPattern("it has alternatives outside of parentheses")
        compile_bounded(pattern)
    return patterns


def _modules(value: object) -> list[str] | str:
    if not isinstance(value, str):
        return _text_list(value)
    if len(value) > PATTERN_CHARS_MAX:
        raise UnboundedPattern(f"it is longer than {PATTERN_CHARS_MAX} characters")
    try:
        re.compile(value)
    except (re.error, RecursionError, OverflowError) as error:
        raise UnboundedPattern(f"it is not a regular expression ({error})") from None
    return value


def _unchecked(modules: list[str] | str | None) -> bool:
    """Whether it is a regular expression that could take too long to match."""
    if not isinstance(modules, str):
        return False
    try:
        compile_bounded(modules)
    except UnboundedPattern:
        return True
    return False


def _canonical(fields: dict[str, Any]) -> bytes:
    """Fields sorted, and lists that PEFT keeps as sets. The order within patterns has a meaning."""
    sets = ("target_modules", "exclude_modules")
    ordered = {
        name: sorted(value) if name in sets and isinstance(value, list) else value
        for name, value in sorted(fields.items())
    }
    return json.dumps(ordered, separators=(",", ":"), ensure_ascii=True).encode()


def _show(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:80] + "…"


def _refuse(reason: str, field: str | None = None) -> NoReturn:
    param = f"config.{field}" if field else "config"
    raise InvalidAdapter(f"adapter_config.json {reason}", param=param)
