"""Which projections an adapter config targets, decided as PEFT decides it.

PEFT: tuners/tuners_utils.py, `check_target_module_exists`. The answer is a cross-check on the
tensors. Patterns that can't be matched in bounded time were dropped when the config was read.
"""

import re
from typing import NamedTuple

from gateway.adapters.patterns import compile_bounded
from gateway.adapters.peft_config import PeftConfig
from gateway.engine.messages import EMBEDDINGS, ModelInfo

ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
ALL_LINEAR = "all-linear"


class Target(NamedTuple):
    """One projection of one layer, or one of EMBEDDINGS, whose layer is 0."""

    layer: int
    projection: str

    @property
    def module(self) -> str:
        """Its name in the base model, which PEFT matches patterns against."""
        if self.projection in EMBEDDINGS:
            return "lm_head" if self.projection == "lm_head" else f"model.{self.projection}"
        group = "self_attn" if self.projection in ATTENTION else "mlp"
        return f"model.layers.{self.layer}.{group}.{self.projection}"

    def __str__(self) -> str:
        if self.projection in EMBEDDINGS:
            return self.projection
        return f"layers.{self.layer}.{self.projection}"


def expected_targets(config: PeftConfig, info: ModelInfo) -> set[Target] | None:
    """What the config targets in this base model; None if it leaves that to PEFT's defaults."""
    if config.target_modules is None:
        return None
    included = _Names(config.target_modules)
    excluded = _Names(config.exclude_modules or [])
    layers = _Layers(config)
    every = [Target(layer, name) for layer in range(info.layers) for name in info.projections]
    every += [Target(0, name) for name in EMBEDDINGS]
    found = {
        target
        for target in every
        if included.match(target.module)
        and not excluded.match(target.module)
        and (target.module in included.exact or layers.match(target))
    }
    return found | tied_targets(config, info)


def tied_targets(config: PeftConfig, info: ModelInfo) -> set[Target]:
    """EMBEDDINGS where `ensure_weight_tying` makes one adapter of the two, each of its matrices
    being the other's transposed, else none. PEFT: `BaseTuner._check_tied_modules`."""
    modules = config.target_modules
    if not config.ties_embeddings or not info.ties_embeddings or modules is None:
        return set()
    if isinstance(modules, list):
        named = any(module.split(".")[-1] in EMBEDDINGS for module in modules)
    else:
        regex = compile_bounded(modules)
        named = any(regex.fullmatch(name) for name in EMBEDDINGS)
    return {Target(0, name) for name in EMBEDDINGS} if named else set()


class _Names:
    """A list of names, each the whole or the end of a module's name, or one regular expression."""

    def __init__(self, names: list[str] | str) -> None:
        self.exact: frozenset[str] = frozenset()
        self._regex: re.Pattern[str] | None = None
        self._ends: tuple[str, ...] = ()
        if isinstance(names, list):
            self.exact = frozenset(names)
            self._ends = tuple(f".{name}" for name in names)
        elif names.lower() == ALL_LINEAR:
            self._ends = ("_proj",)  # PEFT leaves the head out, and embeddings aren't linear
        else:
            self._regex = compile_bounded(names)

    def match(self, module: str) -> bool:
        if self._regex is not None:
            return self._regex.fullmatch(module) is not None
        return module in self.exact or module.endswith(self._ends)


class _Layers:
    """layers_to_transform, with layers_pattern saying which number in a name is the layer."""

    def __init__(self, config: PeftConfig) -> None:
        self._layers = config.layers
        self._patterns = [
            compile_bounded(pattern, r"(?:^|.*?\.){}\.(?P<idx>\d+)\.")
            for pattern in config.layers_pattern
        ]

    def match(self, target: Target) -> bool:
        if self._layers is None:
            return True
        if target.projection in EMBEDDINGS:
            return False
        if not self._patterns:
            return target.layer in self._layers
        for pattern in self._patterns:
            if found := pattern.match(target.module):
                return int(found["idx"]) in self._layers
        return False
