"""What does the gateway cost beside the engine called directly, and beside LiteLLM's proxy?

A stub answers at the moments that a request names. Once it is a worker behind our border, so that
the whole of our gateway is measured: keys, limits, budgets, metering, the tokenizer, the border;
once a bare HTTP server, that a client calls directly and that LiteLLM forwards to. All ways take
turns, in many short rounds; what is printed are medians over rounds, and ratios within one. CPU
time is that of the gateway's process alone: user and system, of all its threads.

    python -m benchmarks gateway_overhead [--litellm FOLDER | --no-litellm]

LiteLLM is installed from PyPI into FOLDER, once. On a machine that does other things as well, start
it with `nice -n -15`.
"""

import argparse
import gc
import json
import os
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import uvloop

from benchmarks.overhead.client import (
    LONG_QUESTION,
    ask_for,
    ask_in_turn,
    head_of,
    stream_at_once,
)
from benchmarks.overhead.script import Script
from benchmarks.overhead.ways import DIRECT, LITELLM, Way, open_all
from gateway.tenants.usage.ledger import FLUSH_EVERY_S
from gateway.tenants.usage.prices import REFRESH_S

LITELLM_FOLDER = Path(".cache/litellm")

AT_ONCE = Script(tokens=16, first_s=0.0, pace_s=0.0)
IN_20_MS = Script(tokens=16, first_s=0.02, pace_s=0.0)
FEW_CHUNKS = Script(tokens=1, first_s=0.02, pace_s=0.02)
MANY_CHUNKS = Script(tokens=65, first_s=0.02, pace_s=0.02)
"""Fifty tokens a second."""
CONNECTIONS = 16
STREAMS = 32
IN_TURN = 40
FEW_ROUNDS = 8
PRICES_S = REFRESH_S + 1
"""Within which a gateway knows a price that was set."""
LEDGER_S = 2 * FLUSH_EVERY_S
"""Within which what was used is in the database."""


class Round(NamedTuple):
    """Of one way in one round."""

    p50_ms: float
    """One connection, an answer at once."""
    rps: float
    """16 connections, an answer in 20 ms."""
    p99_ms: float
    request_us: float
    """CPU time, in the same load."""
    long_request_us: float
    """CPU time, the same load with a body of 1 KB, of which the tokenizer makes tokens."""
    chunk_us: float
    """CPU time, 32 streams."""
    scripts: float
    """Calls of Redis scripts a request, in the same load."""


def main(arguments: list[str]) -> None:
    options = _options(arguments)
    with ExitStack() as stack:
        ways = list(open_all(stack, options.model, options.litellm))
        for way in ways:  # everything is used once before it counts
            uvloop.run(_round(way, seconds=0.3))
            _check_all_is_on(way)
        rounds: dict[str, list[Round]] = {way.name: [] for way in ways}
        for index in range(options.rounds):
            turn = ways[index % len(ways) :] + ways[: index % len(ways)]
            for way in turn:
                rounds[way.name].append(uvloop.run(_round(way, options.seconds)))
        rss = {way.name: way.rss_mib() for way in ways}
    table = {name: _columns(rounds, name) | {"rss_mib": rss[name]} for name in rounds}
    _print(table)
    result = {"benchmark": "gateway_overhead", "rounds": options.rounds, "ways": table}
    result |= {"cores": len(os.sched_getaffinity(0)), "load_1min": round(os.getloadavg()[0], 2)}
    print(json.dumps(result))


def _check_all_is_on(way: Way) -> None:
    """Of our gateway: limits say what is left, and the ledger charges what the tenant uses."""
    if way.settings is None:
        return
    head = uvloop.run(head_of(way.address, AT_ONCE))
    assert b"x-ratelimit-remaining-requests" in head, head
    assert b"x-ratelimit-remaining-tokens" in head, head
    time.sleep(PRICES_S)
    before = way.charged()
    uvloop.run(ask_in_turn(way.address, AT_ONCE, IN_TURN))
    time.sleep(LEDGER_S)
    assert way.charged() - before == IN_TURN, "not all that was used was charged"


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks gateway_overhead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True, help="a GGUF, for its tokenizer")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each load in a round")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--litellm", type=Path, default=LITELLM_FOLDER, metavar="FOLDER")
    where.add_argument("--no-litellm", dest="litellm", action="store_const", const=None)
    return parser.parse_args(arguments)


async def _round(way: Way, seconds: float) -> Round:
    gc.collect()
    in_turn = await ask_in_turn(way.address, AT_ONCE, IN_TURN)
    scripts, started = way.scripts(), way.cpu_s()
    loaded = await ask_for(way.address, IN_20_MS, CONNECTIONS, seconds)
    between = way.cpu_s()
    scripts = way.scripts() - scripts
    long = await ask_for(way.address, IN_20_MS, CONNECTIONS, seconds, LONG_QUESTION)
    ended = way.cpu_s()
    return Round(
        p50_ms=1e3 * statistics.median(in_turn),
        rps=len(loaded) / seconds,
        p99_ms=1e3 * statistics.quantiles(loaded, n=100)[98],
        request_us=1e6 * (between - started) / len(loaded),
        long_request_us=1e6 * (ended - between) / len(long),
        chunk_us=await _chunk_us(way),
        scripts=scripts / len(loaded),
    )


async def _chunk_us(way: Way) -> float:
    """From streams of two lengths: the difference is the chunks'."""
    few = await _stream_cpu_s(way, FEW_CHUNKS, FEW_ROUNDS)
    many = await _stream_cpu_s(way, MANY_CHUNKS, 1)
    return 1e6 * (many - few) / (MANY_CHUNKS.tokens - FEW_CHUNKS.tokens)


async def _stream_cpu_s(way: Way, script: Script, rounds: int) -> float:
    """CPU seconds of one stream."""
    started = way.cpu_s()
    await stream_at_once(way.address, script, STREAMS, rounds)
    return (way.cpu_s() - started) / (rounds * STREAMS)


def _columns(rounds: dict[str, list[Round]], name: str) -> dict[str, float | None]:
    """Medians over rounds; what compares two ways does so within each round."""
    ours, direct = rounds[name], rounds[DIRECT]
    pairs = list(zip(ours, direct, strict=True))
    added = [(ours.p50_ms - direct.p50_ms) for ours, direct in pairs]
    columns: dict[str, float | None] = {
        "added_p50_ms": statistics.median(added),
        "added_p50_to_litellm": None,
        "rps_ratio": statistics.median(a.rps / b.rps for a, b in pairs),
        "p99_ratio": statistics.median(a.p99_ms / b.p99_ms for a, b in pairs),
        "request_us": statistics.median(each.request_us for each in ours),
        "long_request_us": statistics.median(each.long_request_us for each in ours),
        "chunk_us": statistics.median(each.chunk_us for each in ours),
        "scripts": statistics.median(each.scripts for each in ours),
    }
    if LITELLM in rounds and name not in (DIRECT, LITELLM):
        theirs = [b.p50_ms - a.p50_ms for a, b in zip(direct, rounds[LITELLM], strict=True)]
        columns["added_p50_to_litellm"] = statistics.median(
            a / b for a, b in zip(added, theirs, strict=True)
        )
    return columns


def _print(table: dict[str, dict[str, float | None]]) -> None:
    head = (
        "",
        "added p50",
        "÷ LiteLLM's",
        "req/s",
        "p99",
        "µs CPU a",
        "with 1 KB",
        "µs a",
        "scripts",
        "RSS",
    )
    under = (
        "",
        "ms, 1 conn.",
        "",
        "÷ direct, 16 conn.",
        "",
        "request",
        "body",
        "chunk",
        "a req.",
        "MiB",
    )
    needed = ("needed", "", "≤ 0.30", "≥ 0.90", "≤ 1.4", "≤ 450", "", "≤ 15", "2", "")
    widths = (25, 12, 12, 19, 7, 9, 10, 6, 8, 5)
    forms = (".2f", ".2f", ".3f", ".2f", ".0f", ".0f", ".1f", ".2f", ".0f")
    lines: list[tuple[str, ...]] = [head, under]
    for name, columns in table.items():
        cells = zip(columns.values(), forms, strict=True)
        lines.append((name, *("-" if each is None else f"{each:{form}}" for each, form in cells)))
    for line in [*lines, needed]:
        print(" ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)))
