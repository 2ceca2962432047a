"""What lies where in the folder that `--prepare` fills."""

from pathlib import Path

ADAPTERS = 128


class Layout:
    def __init__(self, folder: Path) -> None:
        folder = folder.absolute()
        self.folder = folder
        self.logs = folder / "logs"
        self.results = folder / "results.jsonl"

        self.hf = folder / "hf"
        """Virtual environment of transformers and PEFT, with what llama.cpp's converters need."""
        self.vllm = folder / "vllm"
        """Virtual environment of vLLM."""
        self.llama_source = folder / "llama" / "source" / "llama.cpp"
        self.llama_build = folder / "llama" / "build"
        self.llama_server = self.llama_build / "bin" / "llama-server"

        self.gguf = folder / "models" / "model-q4_1.gguf"
        """The project's own model, which all the others are made from."""
        self.hf_model = folder / "models" / "bf16"
        self.gguf_bf16 = folder / "models" / "model-bf16.gguf"
        self.adapters = folder / "adapters"
        self.gguf_adapters = folder / "adapters-gguf"

    def adapter(self, index: int) -> Path:
        return self.adapters / adapter_name(index)

    def gguf_adapter(self, index: int) -> Path:
        return self.gguf_adapters / f"{adapter_name(index)}.gguf"


def adapter_name(index: int) -> str:
    """As benchmarks/adapters.py names its folders."""
    return f"adapter-{index:03d}"


def python(environment: Path) -> Path:
    return environment / "bin" / "python"
