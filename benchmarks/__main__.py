"""`python -m benchmarks [NAME …]`: run one benchmark with its options, or all with none."""

import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import decode, invariance

MODEL = Path(".loragate/models/smollm2-135m-instruct-q4_1.gguf")
BENCHMARKS: dict[str, Callable[[list[str]], None]] = {
    "decode": decode.main,
    "invariance": invariance.main,
}


def main() -> None:
    name, *options = sys.argv[1:] or [""]
    if name in BENCHMARKS:
        BENCHMARKS[name](options)
    elif name:
        sys.exit(f"no benchmark {name!r}; there is {', '.join(BENCHMARKS)}")
    else:
        for title, run in BENCHMARKS.items():
            print(f"== {title}", flush=True)
            run(["--model", str(MODEL)])


main()
