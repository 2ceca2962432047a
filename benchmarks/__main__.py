"""`python -m benchmarks [NAME …]`: run one benchmark with its options, or all with none."""

import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import bookkeeping, decode, loading, many_adapters, overload, unified

MODEL = Path(".loragate/models/smollm2-135m-instruct-q4_1.gguf")
BENCHMARKS: dict[str, Callable[[list[str]], None]] = {
    "decode": decode.main,
    "unified": unified.main,
    "many_adapters": many_adapters.main,
    "loading": loading.main,
    "bookkeeping": bookkeeping.main,
    "overload": overload.main,
}


def main() -> None:
    name, *options = sys.argv[1:] or [""]
    if name in BENCHMARKS:
        if "--model" not in options:
            options += ["--model", str(MODEL)]
        BENCHMARKS[name](options)
    elif name:
        sys.exit(f"no benchmark {name!r}; there is {', '.join(BENCHMARKS)}")
    else:
        for title, run in BENCHMARKS.items():
            print(f"== {title}", flush=True)
            run(["--model", str(MODEL)])


main()
