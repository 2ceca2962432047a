"""A PEFT folder, read once: what the engine must know of it, or a refusal that explains.

An adapter is accepted only if it answers exactly as PEFT does. No tensor is loaded and nothing is
imported that could: the header of the weights and the config say everything.
"""

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NoReturn

import msgspec
from msgspec import Struct

from gateway.adapters.peft_config import CONFIG_BYTES_MAX, PeftConfig, read_config
from gateway.adapters.safetensors_header import (
    READABLE,
    TensorEntry,
    equal_transposed,
    peaks,
    read_header,
    values_sha256,
)
from gateway.adapters.targets import Target, expected_targets, tied_targets
from gateway.engine.messages import (
    EMBEDDINGS,
    MANIFEST_FILE,
    WEIGHTS_FILE,
    AdapterManifest,
    AdapterRef,
    ModelInfo,
    TargetWeights,
)
from gateway.errors import InvalidAdapter

CONFIG_FILE = "adapter_config.json"
DTYPE_MAX = {"float32": 3.4028235e38, "bfloat16": 3.3895314e38, "float16": 65504.0}

KEY = re.compile(
    r"(?:base_model\.model\.)?"
    r"(?P<module>(?:model\.layers\.(?P<layer>0|[1-9][0-9]{0,3})\.(?:self_attn|mlp)\.)?"
    r"(?P<projection>[a-z_]+))\.lora_(?P<side>[AB])(?:\.default)?\.weight"
)
EMBEDDING_KEY = re.compile(
    r"(?:base_model\.model\.)?(?P<module>model\.(?P<projection>embed_tokens))"
    r"\.lora_embedding_(?P<side>[AB])(?:\.default)?"
)
COPY = re.compile(
    r"(?:base_model\.model\.)?(?:model\.)?(?P<embedding>embed_tokens|lm_head)"
    r"(?:\.base_layer)?\.weight"
)
"""The base model's own embeddings: PEFT saves them beside LoRA on them, unless told not to."""

WITHOUT_COPIES = (
    "PEFT leaves them out with model.save_pretrained(folder, save_embedding_layers=False)."
)

# Tensors that other kinds of adapters hold, and what to do about each.
FOREIGN = (
    ("lora_magnitude_vector", "DoRA is not served yet. Train with use_dora=False."),
    ("modules_to_save", "Whole replaced modules are not served yet. Train without them."),
    ("score.weight", "It belongs to a classifier; only CAUSAL_LM adapters are served."),
    ("vera_lambda", "VeRA is not served yet."),
    (".bias", "Biases are not served yet. Train with bias='none' and lora_bias=False."),
    ("lora_", "Its module or its kind of weight is not one that is served."),
)

Sides = dict[str, TensorEntry]
"""The A and the B of one target."""


class Manifest(Struct, frozen=True):
    """A checked adapter: what the engine reads, and what people ask about."""

    engine: AdapterManifest
    config: bytes
    """The config in its canonical form."""
    rank_max: int
    targets: list[str]
    """The projections it changes, such as `q_proj`, in alphabetical order."""
    size_bytes: int
    warnings: list[str]


def check_folder(folder: Path, info: ModelInfo, weights_sha256: str | None = None) -> Manifest:
    """Read and check CONFIG_FILE and WEIGHTS_FILE of `folder` for the base model `info`.

    Hashes the weights unless their hash is known. Raises InvalidAdapter.
    """
    config = read_config(_config_text(folder / CONFIG_FILE))
    weights = folder / WEIGHTS_FILE
    if not weights.is_file():
        raise InvalidAdapter(
            f"{WEIGHTS_FILE} is missing. PEFT's model.save_pretrained(folder) writes it.",
            param="weights",
        )
    entries = read_header(weights)
    copies = [entry for entry in entries if COPY.fullmatch(entry.name)]
    adapted = [entry for entry in entries if entry not in copies]
    pairs = _pairs(adapted, info)
    _check_base(pairs, config, info)
    _check_ranks(pairs, config)
    _check_targets(pairs, config, info)
    if tied_targets(config, info):
        _check_tied(weights, pairs)
    warnings = [
        *config.warnings,
        *_check_values(weights, adapted, info),
        *_check_copies(weights, copies, info),
    ]
    sha256 = weights_sha256 or _sha256(weights)
    targets = [_target(target, sides, config) for target, sides in sorted(pairs.items())]
    return Manifest(
        engine=AdapterManifest(sha256, targets),
        config=config.canonical,
        rank_max=max(target.rank for target in targets),
        targets=sorted({target.target for target in targets}),
        size_bytes=len(config.canonical) + weights.stat().st_size,
        warnings=warnings,
    )


def version_digest(manifest: Manifest) -> str:
    """The identity of an adapter's content: config and weights, and nothing else."""
    config = hashlib.sha256(manifest.config).hexdigest()
    text = f"loragate adapter 1\n{config}\n{manifest.engine.weights_sha256}\n"
    return hashlib.sha256(text.encode()).hexdigest()


def write_manifest(folder: Path, info: ModelInfo) -> AdapterRef:
    """Check a PEFT folder and put MANIFEST_FILE into it, so that the engine can read it in place.

    For folders of our own (tests, benchmarks); uploads go through the store. Raises InvalidAdapter.
    """
    manifest = check_folder(folder, info)
    (folder / MANIFEST_FILE).write_bytes(msgspec.json.encode(manifest.engine))
    return AdapterRef(version_digest(manifest), str(folder))


def _config_text(path: Path) -> bytes:
    if not path.is_file():
        raise InvalidAdapter(
            f"{CONFIG_FILE} is missing. PEFT's model.save_pretrained(folder) writes it.",
            param="config",
        )
    if path.stat().st_size > CONFIG_BYTES_MAX:
        raise InvalidAdapter(f"{CONFIG_FILE} is larger than 1 MiB.", param="config")
    return path.read_bytes()


def _pairs(entries: list[TensorEntry], info: ModelInfo) -> dict[Target, Sides]:
    """The tensors by target, each with its A and its B; refuses a file with any other tensor."""
    pairs: dict[Target, Sides] = defaultdict(dict)
    unmatched = []
    for entry in entries:
        found = _target_of(entry.name, info)
        if found is None:
            unmatched.append(entry.name)
            continue
        target, side = found
        if entry.dtype not in READABLE:
            _refuse(f"has {entry.name} in {entry.dtype}; save it as F32, F16 or BF16.")
        if side in pairs[target]:
            _refuse(f"has {entry.name} twice, under two spellings.")
        pairs[target][side] = entry
    if unmatched:
        _refuse_unmatched(unmatched)
    if not pairs:
        _refuse("holds no tensors. The adapter was perhaps saved from a model without PEFT.")
    for target, sides in pairs.items():
        if len(sides) == 1:
            (side, entry), missing = next(iter(sides.items())), "B" if "A" in sides else "A"
            _refuse(f"has lora_{side} but not lora_{missing} for {target} ({entry.name}).")
    return pairs


def _target_of(name: str, info: ModelInfo) -> tuple[Target, str] | None:
    match = KEY.fullmatch(name) or EMBEDDING_KEY.fullmatch(name)
    if match is None or match["projection"] not in info.targets:
        return None
    target = Target(int(match.groupdict().get("layer") or 0), match["projection"])
    return (target, match["side"]) if target.module == match["module"] else None


def _refuse_unmatched(names: list[str]) -> NoReturn:
    advice = next((text for part, text in FOREIGN for name in names if part in name), None)
    advice = advice or (
        "Expected are names such as base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight,"
        " as PEFT writes them for this kind of base model."
    )
    _refuse(
        f"holds tensors that cannot be served ({len(names)}): {_some(map(repr, names))}. {advice}"
    )


def _check_base(pairs: dict[Target, Sides], config: PeftConfig, info: ModelInfo) -> None:
    named = (
        f" adapter_config.json names {config.base_model_name!r}." if config.base_model_name else ""
    )
    for target, sides in pairs.items():
        rows, columns = info.targets[target.projection]
        a, b = sides["A"].shape, sides["B"].shape
        if len(a) != 2 or len(b) != 2 or 0 in (*a, *b):
            _refuse(f"has tensors of {target} that are not matrices: A is {a}, B is {b}.")
        for name, found, expected in (
            ("lora_A", a, (a[0], columns)),
            ("lora_B", b, (rows, b[1])),
        ):
            if found != expected:
                _wrong_base(
                    f"{target.projection}.{name} is {found[0]}×{found[1]} here, this base needs "
                    f"{expected[0]}×{expected[1]} ({info.name}).{named}"
                )
        if target.layer >= info.layers:
            _wrong_base(
                f"it has weights for layer {target.layer}, this base has {info.layers} layers "
                f"({info.name}).{named}"
            )


def _check_ranks(pairs: dict[Target, Sides], config: PeftConfig) -> None:
    for target, sides in pairs.items():
        a, b, rank = sides["A"].shape[0], sides["B"].shape[1], config.rank_of(target.module)
        if a != b:
            _refuse(f"has rank {a} in lora_A but {b} in lora_B of {target}.")
        if a != rank:
            _refuse(
                f"has rank {a} in {target}, adapter_config.json says {rank} (r and rank_pattern). "
                "The two files belong to different adapters."
            )


def _check_targets(pairs: dict[Target, Sides], config: PeftConfig, info: ModelInfo) -> None:
    """Tensors decide what is adapted; the config must not contradict them."""
    expected = expected_targets(config, info)
    if expected is None:
        return
    if ignored := [str(target) for target in sorted(pairs) if target not in expected]:
        _refuse(
            f"holds weights for {_some(ignored)}, which adapter_config.json does not target, so "
            "that PEFT would ignore them. The two files belong to different adapters."
        )
    if missing := [str(target) for target in sorted(expected) if target not in pairs]:
        _refuse(
            f"lacks weights for {_some(missing)}, which adapter_config.json targets. "
            "Save the adapter again, or correct target_modules."
        )


def _check_values(path: Path, entries: list[TensorEntry], info: ModelInfo) -> list[str]:
    limit = DTYPE_MAX.get(info.dtype, DTYPE_MAX["float32"])
    all_zero = True
    for peak in peaks(path, entries):
        if peak.value != peak.value or peak.value == float("inf"):
            what = "infinite values" if peak.value == peak.value else "NaN"
            _refuse(f"has {what} in {peak.name}. Its training diverged.")
        if peak.value > limit:
            _refuse(f"has the value {peak.value:g} in {peak.name}, too large for {info.dtype}.")
        starts_at_zero = ".lora_B." in peak.name or ".lora_embedding_A" in peak.name
        all_zero = all_zero and (peak.value == 0 or not starts_at_zero)
    return ["All lora_B are zero: the adapter answers as the base model."] if all_zero else []


def _check_copies(path: Path, copies: list[TensorEntry], info: ModelInfo) -> list[str]:
    """PEFT would put them in the base model's place: they must be what is there."""
    for entry in copies:
        match = COPY.fullmatch(entry.name)
        assert match is not None
        expected = info.vocab_size, info.hidden_size
        if entry.shape != expected:
            _refuse(
                f"has {entry.name} of shape {entry.shape}; the embeddings of this base are "
                f"{expected} ({info.name}). An adapter with a vocabulary of its own is not served. "
                f"If training left the vocabulary as it was: {WITHOUT_COPIES}"
            )
        if entry.dtype not in READABLE:
            _refuse(f"has {entry.name} in {entry.dtype}; save it as F32, F16 or BF16.")
        if values_sha256(path, entry, info.dtype) != info.embeddings_sha256[match["embedding"]]:
            _refuse(
                f"has {entry.name}, whose values are not those of this base model ({info.name} in "
                f"{info.dtype}). If training left them as they were: {WITHOUT_COPIES} If it did "
                "not, train LoRA on them instead: embed_tokens or lm_head in target_modules."
            )
    if not copies:
        return []
    size = sum(entry.end - entry.start for entry in copies)
    return [
        f"The weights repeat {size / 1e6:.0f} MB of the base model's embeddings, which nothing "
        f"needs. {WITHOUT_COPIES}"
    ]


def _check_tied(path: Path, pairs: dict[Target, Sides]) -> None:
    """PEFT keeps one adapter for both embeddings: the file must have it twice, and the same."""
    embed, head = (pairs[Target(0, name)] for name in EMBEDDINGS)
    for entry, other in ((head["A"], embed["B"]), (head["B"], embed["A"])):
        if not equal_transposed(path, entry, other):
            _refuse(
                f"has a {entry.name} that is not {other.name} transposed, as ensure_weight_tying "
                "in adapter_config.json asks for."
            )


def _target(target: Target, sides: Sides, config: PeftConfig) -> TargetWeights:
    return TargetWeights(
        layer=target.layer,
        target=target.projection,
        rank=sides["A"].shape[0],
        scale=config.scale_of(target.module),
        a=sides["A"].name,
        b=sides["B"].name,
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _some(names: Iterable[str], count: int = 4) -> str:
    return ", ".join(_first(list(names), count))


def _first(names: list[str], count: int) -> Iterator[str]:
    yield from names[:count]
    if len(names) > count:
        yield f"and {len(names) - count} more"


def _wrong_base(reason: str) -> NoReturn:
    raise InvalidAdapter(
        f"The adapter was trained for another base model: {reason}", param="weights"
    )


def _refuse(reason: str) -> NoReturn:
    raise InvalidAdapter(f"{WEIGHTS_FILE} {reason}", param="weights")
