"""The project's GGUF as the other servers read it, and the same adapters for all of them.

The weights are dequantised and rounded to bfloat16 once; llama.cpp's file is made from that.
"""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.peers.layout import ADAPTERS, Layout, python
from gateway.demo.progress import StepFailed, run

HERE = Path(__file__).parent


def make(layout: Layout, gguf: Path) -> None:
    """Raises StepFailed."""
    if not gguf.exists():
        raise StepFailed(f"There is no {gguf}: `make demo` fetches it, --model names another.")
    _once(layout.gguf, lambda file: shutil.copyfile(gguf, file))
    _once(layout.hf_model, lambda folder: _dequantise(layout.gguf, folder))
    _once(layout.gguf_bf16, lambda file: _convert_model(layout, file))
    _once(layout.adapters, lambda folder: _make_adapters(layout.gguf, folder))
    _once(layout.gguf_adapters, lambda folder: _convert_adapters(layout, folder))


def _once(made: Path, make: Callable[[Path], object]) -> None:
    """Under another name until it is complete."""
    if made.exists():
        return
    draft = made.with_name(f"unfinished-{made.name}")
    if draft.is_dir():
        shutil.rmtree(draft)
    draft.unlink(missing_ok=True)
    draft.parent.mkdir(parents=True, exist_ok=True)
    make(draft)
    draft.rename(made)


def _dequantise(gguf: Path, folder: Path) -> None:
    """A Hugging Face folder, whose tokenizer is put right as in tests/reference.py."""
    import torch
    from transformers import AutoTokenizer

    from tests.reference import reference_from_gguf, with_single_digits

    reference_from_gguf(gguf).to(torch.bfloat16).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    with_single_digits(tokenizer).save_pretrained(folder)


def _make_adapters(gguf: Path, folder: Path) -> None:
    from benchmarks.adapters import make_adapters
    from gateway.engine.engine import Engine
    from gateway.engine.messages import EngineSettings

    engine = Engine(EngineSettings(model=str(gguf)))
    make_adapters(folder, engine.info, ADAPTERS)
    engine.close()


def _convert_model(layout: Layout, file: Path) -> None:
    converter = layout.llama_source / "convert_hf_to_gguf.py"
    command: list[str | Path] = [python(layout.hf), converter, layout.hf_model]
    command += ["--outtype", "bf16", "--outfile", file]
    _run(layout, "llama: the model in bf16", command)


def _convert_adapters(layout: Layout, folder: Path) -> None:
    converter = layout.llama_source / "convert_lora_to_gguf.py"
    script = HERE / "convert_adapters.py"
    command = [python(layout.hf), script, converter, layout.hf_model, layout.adapters, folder]
    _run(layout, f"llama: {ADAPTERS} adapters", command)


def _run(layout: Layout, title: str, command: Sequence[str | Path]) -> None:
    offline = {"HF_HUB_OFFLINE": "1"}
    run([str(part) for part in command], title, layout.logs / "prepare.log", offline)
