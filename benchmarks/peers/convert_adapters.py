"""Runs llama.cpp's converter over a folder of adapters in one process, which imports torch once.

    python convert_adapters.py CONVERTER BASE_MODEL ADAPTERS OUT

It is run by the Python that has what the converter needs, so it imports nothing of this project.
"""

import runpy
import sys
from pathlib import Path


def main() -> None:
    converter, base_model, adapters, out = sys.argv[1:]
    Path(out).mkdir()
    sys.path.insert(0, str(Path(converter).parent))
    for adapter in sorted(Path(adapters).iterdir()):
        file = Path(out) / f"{adapter.name}.gguf"
        options = ["--outtype", "bf16", "--base", base_model, "--outfile", str(file)]
        sys.argv = [converter, *options, str(adapter)]
        runpy.run_path(converter, run_name="__main__")
        print(adapter.name, flush=True)


main()
