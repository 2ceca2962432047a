"""What the settings come to on this machine, or why they can't be served. All raise ModelError."""

import os

import torch

from gateway.engine.messages import EngineSettings
from gateway.engine.model.config import ModelConfig
from gateway.engine.model.errors import ModelError
from gateway.engine.scheduling.limits import Limits


def threads(asked: int) -> int:
    """For the compiled loops and for torch; they never run at the same time."""
    if asked > (os.cpu_count() or 1):
        raise ModelError(f"engine.threads = {asked} is more than this machine has cores")
    count = asked or _cores()
    torch.set_num_threads(count)
    return count


def _cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device(asked: str) -> str:
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if asked == "cuda" and not torch.cuda.is_available():
        raise ModelError("engine.device = cuda, but torch sees no CUDA device")
    return asked


def batch_invariant(asked: str, device: str, dtype: torch.dtype) -> bool:
    """The compiled loops of a CPU always are."""
    return compiled(device, dtype) or asked == "on"


def compiled(device: str, dtype: torch.dtype) -> bool:
    return device == "cpu" and dtype in (torch.float32, torch.bfloat16)


def dtype(asked: str, device: str) -> torch.dtype:
    if asked == "auto":
        return torch.bfloat16 if device == "cuda" else torch.float32
    named: torch.dtype = getattr(torch, asked)
    return named


def limits(settings: EngineSettings, config: ModelConfig) -> Limits:
    if settings.step_tokens < settings.running_max:
        raise ModelError("engine.step_tokens must not be less than engine.running_max")
    if min(settings.block_tokens, settings.running_max, settings.waiting_max) < 1:
        raise ModelError("engine.block_tokens, running_max and waiting_max must be at least 1")
    context = settings.context_tokens or config.context_tokens
    return Limits(
        context_tokens=min(context, config.context_tokens),
        vocab_size=config.vocab_size,
        block_tokens=settings.block_tokens,
        step_tokens=settings.step_tokens,
        running_max=settings.running_max,
        waiting_max=settings.waiting_max,
    )
