"""How does Loragate compare with vLLM, llama.cpp and transformers + PEFT on this machine?

All servers have the same model, adapters, prompts and number of cores, one server runs at a time,
and they take turns in each round. benchmarks/peers.md says how each is installed and started, and
what can't be made equal.

    python -m benchmarks vs_peers --prepare FOLDER      # once, about half an hour
    python -m benchmarks vs_peers --folder FOLDER [--rounds 3] [--ours dtype=bfloat16]

Each cell is kept as soon as it is measured: the same command goes on where it was stopped, and
prints the tables from what is there when nothing is left to measure.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.peers import agreement, table
from benchmarks.peers.closed_loop import REPOSITORY
from benchmarks.peers.layout import Layout
from benchmarks.peers.llama import Llama
from benchmarks.peers.loads import KINDS, Load, select
from benchmarks.peers.measuring import estimate_s, measure, turns_of
from benchmarks.peers.ours import Ours
from benchmarks.peers.peft import Peft
from benchmarks.peers.prepare import prepare
from benchmarks.peers.results import OtherSetup, Results
from benchmarks.peers.running import Peer
from benchmarks.peers.vllm import Vllm
from gateway import __version__
from gateway.demo.progress import StepFailed

MODEL = Path(".loragate/models/smollm2-135m-instruct-q4_1.gguf")
PEERS = "ours,vllm,llama-bf16,llama-q4_1,peft"
PORT = 18150


def main(arguments: list[str]) -> None:
    options = _options(arguments)
    if options.prepare is not None:
        try:
            prepare(Layout(options.prepare), options.model)
        except StepFailed as failure:
            sys.exit(f"{failure}\nThe same command goes on from here.")
        print(f"All is there: python -m benchmarks vs_peers --folder {options.prepare}")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("Stopped."))  # and each server with us
    layout = Layout(options.folder)
    with Ours(layout, options.port, _settings(options.ours)) as ours:
        peers = _peers(options.peers, layout, options.port, ours)
        try:
            results = Results(options.results or layout.results, _setup(options))
        except OtherSetup as problem:
            sys.exit(str(problem))
        turns = turns_of(peers, options.loads, options.rounds, results)
        begun, estimate = time.monotonic(), estimate_s(turns, options.seconds)
        if turns:
            cells = sum(len(turn.loads) for turn in turns)
            print(f"{cells} cells to measure, about {estimate / 60:.0f} minutes", flush=True)
        for turn in turns:
            measure(turn, options.seconds, layout, results)
            print(f"  {(time.monotonic() - begun) / 60:.0f} of about {estimate / 60:.0f} minutes")
    _print(options.loads, [peer.name for peer in peers], results)


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks vs_peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--prepare", type=Path, metavar="FOLDER", help="install the peers there")
    what.add_argument("--folder", type=Path, help="measure with what was prepared there")
    parser.add_argument("--model", type=Path, default=MODEL, help="for --prepare: the GGUF")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each cell, warm by then")
    parser.add_argument("--peers", type=lambda names: names.split(","), default=PEERS.split(","))
    parser.add_argument("--loads", type=_loads, default=select(KINDS), metavar="base,static/c8,…")
    parser.add_argument(
        "--ours",
        action="append",
        default=[],
        metavar="SETTING=VALUE",
        help="one of Loragate's settings, of `engine` if it names no other; repeat for several",
    )
    parser.add_argument("--results", type=Path, help="default: results.jsonl in the folder")
    parser.add_argument("--port", type=int, default=PORT)
    return parser.parse_args(arguments)


def _loads(names: str) -> list[Load]:
    try:
        return select(names.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _settings(options: list[str]) -> dict[str, str]:
    settings = {}
    for option in options:
        name, sign, value = option.partition("=")
        if not sign:
            sys.exit(f"--ours {option}: it takes the form SETTING=VALUE.")
        settings[name if "." in name else f"engine.{name}"] = value
    return settings


def _peers(names: list[str], layout: Layout, port: int, ours: Ours) -> list[Peer]:
    every: list[Peer] = [
        ours,
        Vllm(layout, port),
        Llama("llama-bf16", layout, layout.gguf_bf16, port),
        Llama("llama-q4_1", layout, layout.gguf, port),
        Peft("bfloat16", layout),
        Peft("float32", layout),
    ]
    for name in names:
        if not any(_is_named(peer, name) for peer in every):
            sys.exit(f"no peer {name!r}; there is {', '.join(peer.name for peer in every)}")
    return [peer for peer in every if any(_is_named(peer, name) for name in names)]


def _is_named(peer: Peer, name: str) -> bool:
    """`peft` and `llama` are all that begin so."""
    return peer.name == name or peer.name.startswith(f"{name}-")


def _setup(options: argparse.Namespace) -> dict[str, Any]:
    """What must be the same for cells to stand in one table."""
    git = ["git", "-C", str(REPOSITORY), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "version": __version__,
        "commit": commit,
        "cores": len(os.sched_getaffinity(0)),
        "seconds": options.seconds,
        "ours": _settings(options.ours),
    }


def _print(loads: list[Load], servers: list[str], results: Results) -> None:
    rows = table.rows_of(loads, servers, results.cells.values())
    for row in rows:
        print("\n" + "\n".join(table.lines_of(row)))
    print(f"\n{table.summary(rows)}")
    if results.answers:
        print(f"\nHow {agreement.PROMPT!r} goes on with the first adapter, greedily")
        print("\n".join(agreement.lines_of(results.answers)))
    data = {
        "benchmark": "vs_peers",
        "setup": results.setup,
        "loads": [table.data_of(row) for row in rows],
        "answers": {server: answer.text for server, answer in results.answers.items()},
    }
    print(f"\n{json.dumps(data)}")
