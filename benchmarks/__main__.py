"""`python -m benchmarks [NAME …]`: run one benchmark with its options, or all with none."""

import sys
from importlib import import_module

MODEL = ".loragate/models/smollm2-135m-instruct-q4_1.gguf"
BENCHMARKS: dict[str, list[str]] = {
    "decode": ["--model", MODEL],
    "stages": ["--model", MODEL],
    "matmul": ["--model", MODEL],
    "growth": ["--model", MODEL],
    "mixed": ["--model", MODEL],
    "start": ["--model", MODEL],
    "unified": ["--model", MODEL],
    "many_adapters": ["--model", MODEL],
    "loading": ["--model", MODEL],
    "bookkeeping": ["--model", MODEL],
    "overload": ["--model", MODEL],
    "gateway_cost": ["--model", MODEL],
    "gateway_overhead": ["--model", MODEL],
    "reclaim": [],
}
"""The modules here that have a `main(options)`, each with its options if none are given. A module
is imported once it is asked for: not all need torch."""
BY_NAME_ONLY = ["vs_peers"]
"""Those that need more than this checkout, and so are not among all."""


def main() -> None:
    name, *options = sys.argv[1:] or [""]
    if name in BENCHMARKS:
        _run(name, options or BENCHMARKS[name])
    elif name in BY_NAME_ONLY:
        _run(name, options)
    elif name:
        sys.exit(f"no benchmark {name!r}; there is {', '.join([*BENCHMARKS, *BY_NAME_ONLY])}")
    else:
        for title, least in BENCHMARKS.items():
            print(f"== {title}", flush=True)
            _run(title, least)


def _run(name: str, options: list[str]) -> None:
    import_module(f"benchmarks.{name}").main(options)


main()
