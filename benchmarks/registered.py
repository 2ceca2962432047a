"""Adapters for a benchmark: few files on disk, registered under as many digests as are wanted."""

import os
from pathlib import Path

from benchmarks.adapters import RANKS, make_adapter
from benchmarks.drive import Drive
from gateway.adapters.peft_format import write_manifest
from gateway.engine.engine import Engine
from gateway.engine.messages import AdapterRef, Sampling, Submit


def register(
    folder: Path, engine: Engine, count: int, rank: int, files: int = 8
) -> list[AdapterRef]:
    """`count` versions of rank `rank`. Each has a folder, digest, pages and reads of its own; so
    that a thousand fit the disk, `count` ÷ `files` of them have the same weights, by hard links."""
    originals = []
    for seed in range(min(files, count)):
        original = make_adapter(folder / f"rank-{rank}-{seed}", engine.info, rank, seed)
        _try_once(engine, write_manifest(original, engine.info))
        originals.append(original)
    refs = []
    for index in range(count):
        version = folder / f"rank-{rank}-version-{index:05d}"
        version.mkdir()
        for file in originals[index % len(originals)].iterdir():
            os.link(file, version / file.name)
        refs.append(AdapterRef(f"{rank:03d}-{index:05d}", str(version)))
    return refs


def register_in_turn(folder: Path, engine: Engine, count: int) -> list[AdapterRef]:
    """`count` versions, of the ranks in turn."""
    each = -(-count // len(RANKS))
    of_ranks = [register(folder, engine, each, rank, files=2) for rank in RANKS]
    return [ref for refs in zip(*of_ranks, strict=True) for ref in refs][:count]


def _try_once(engine: Engine, ref: AdapterRef) -> None:
    """As an upload does. From then on the version has its file of pages."""
    drive = Drive(engine)
    drive.submit(Submit(ref.digest, [1], 1, Sampling(temperature=0), ref))
    drive.finish()
    engine.unload(ref.digest)
