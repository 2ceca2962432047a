"""Rotary position embeddings (RoFormer, arXiv 2104.09864) and the ways models stretch them."""

import math
from typing import Any

import torch
from torch import Tensor

from gateway.engine.model.config import ModelConfig


class Rope:
    """cos and sin of every position, made once. E is head_dim; the two halves are equal."""

    def __init__(self, config: ModelConfig, positions: int, device: str) -> None:
        inverse, magnitude = _frequencies(config)
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse)
        both = torch.cat((angles, angles), dim=-1)
        self._cos = (both.cos() * magnitude).to(device)
        self._sin = (both.sin() * magnitude).to(device)

    def at(self, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin at these positions, each (T, E)."""
        return self._cos[positions_T].to(dtype), self._sin[positions_T].to(dtype)

    def half_turns(self) -> Tensor:
        """(positions, E): of each position the cosines of its E / 2 angles, then the sines."""
        half = self._cos.shape[1] // 2
        return torch.cat((self._cos[:, :half], self._sin[:, :half]), dim=1)


def _frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Inverse frequencies (E/2) in float32, and the factor on cos and sin."""
    steps = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inverse = 1.0 / config.rope_theta**steps
    scaling = config.rope_scaling or {"rope_type": "default"}
    match scaling["rope_type"]:
        case "linear":
            return inverse / scaling["factor"], 1.0
        case "factors":
            return inverse / torch.tensor(scaling["factors"], dtype=torch.float32), 1.0
        case "llama3":
            return _llama3(inverse, scaling), 1.0
        case "yarn":
            return _yarn(inverse, scaling, config)
        case _:
            return inverse, 1.0


def _llama3(inverse: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, a ramp between."""
    factor, low, high = (scaling[key] for key in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = scaling["original_max_position_embeddings"] * inverse / (2 * math.pi)
    ramp: Tensor = ((turns - low) / (high - low)).clamp(0, 1)
    stretched: Tensor = (1 - ramp) * inverse / factor + ramp * inverse
    return stretched


def _yarn(inverse: Tensor, scaling: dict[str, Any], config: ModelConfig) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071, section 3): a ramp between kept and stretched frequencies over
    the dimensions that turn `beta_fast` to `beta_slow` times within the original context, and a
    temperature on the attention logits, folded into cos and sin."""
    factor = scaling["factor"]
    original = scaling.get("original_max_position_embeddings") or config.context_tokens

    def dimension(turns: float) -> float:
        wavelength = original / (turns * 2 * math.pi)
        return config.head_dim * math.log(wavelength) / (2 * math.log(config.rope_theta))

    low = dimension(scaling.get("beta_fast") or 32.0)
    high = dimension(scaling.get("beta_slow") or 1.0)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    index = torch.arange(config.head_dim // 2, dtype=torch.float32)
    stretched = ((index - low) / max(high - low, 0.001)).clamp(0, 1)
    inverse = inverse / factor * stretched + inverse * (1 - stretched)
    return inverse, _yarn_magnitude(scaling, factor)


def _yarn_magnitude(scaling: dict[str, Any], factor: float) -> float:
    def of(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return of(mscale) / of(all_dim) if mscale and all_dim else of(1.0)
