import struct
from pathlib import Path
from typing import Any

import pytest

from gateway.bench import plots
from gateway.bench.load import Run
from gateway.bench.measure import figures
from gateway.bench.timeline import Failure, Timeline

pytestmark = pytest.mark.skipif(not plots.available(), reason="matplotlib is of the extra `bench`")


def timeline(sent_s: float, text_s: list[float], **more: Any) -> Timeline:
    return Timeline("m", 10, 4, sent_s, text_s=text_s, **more)


def draw(folder: Path, *timelines: Timeline, ended_s: float = 20.0) -> dict[str, tuple[int, int]]:
    """Name of each picture → its width and height."""
    run = Run(list(timelines), started_s=0.0, ended_s=ended_s)
    paths = plots.draw(run, figures(run, 6.0, 0.2), folder)
    return {path.name: png_size(path) for path in paths}


def png_size(path: Path) -> tuple[int, int]:
    raw = path.read_bytes()
    assert raw[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", raw[16:24])
    return width, height


def test_three_pictures_are_drawn(tmp_path: Path):
    answers = [
        timeline(start, [start + 0.3 + 0.05 * step for step in range(20)], ended_s=start + 2)
        for start in range(15)
    ]
    sizes = draw(tmp_path / "new" / "folder", *answers)
    assert sizes.keys() == {"ttft.png", "inter_token.png", "throughput.png"}
    assert set(sizes.values()) == {(1050, 630)}


def test_odd_runs_can_be_drawn(tmp_path: Path):
    refused = timeline(1.0, [], ended_s=1.1, failure=Failure("refused", ""))
    alone = timeline(1.0, [2.0], ended_s=2.0)
    assert draw(tmp_path, refused) == {}
    assert draw(tmp_path, alone).keys() == {"ttft.png"}
    at_once = timeline(0.0, [0.1, 0.1, 0.1], ended_s=0.1)
    assert len(draw(tmp_path, at_once, ended_s=0.2)) == 3
    outlier = timeline(0.0, [0.1, 0.2, 0.3, 0.4, 15.0], ended_s=15.0)
    assert len(draw(tmp_path, outlier, refused)) == 3
