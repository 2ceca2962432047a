"""A run in pictures, as PNG files. Needs matplotlib, of the extra `bench`."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gateway.bench.load import Run
from gateway.bench.measure import Figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE_INCHES = (7.0, 4.2)
DOTS_PER_INCH = 150
LINE, MARK = "#1f5fa8", "#8a8a8a"
BUCKETS = 60
BUCKET_S_MIN = 0.5
WIDE = 20.0
"""A largest value of so many medians would leave the others no width on a linear axis."""


def available() -> bool:
    return find_spec("matplotlib") is not None


def draw(run: Run, figures: Figures, folder: Path) -> list[Path]:
    """Write ttft.png, inter_token.png and throughput.png. What has no values has no picture."""
    folder.mkdir(parents=True, exist_ok=True)
    answered = [one for one in run.timelines if one.failure is None]
    ttft = np.array([one.ttft_s for one in answered if one.ttft_s is not None])
    gaps = np.array([gap for one in answered for gap in one.gaps_s])
    drawn: list[Path] = []
    if ttft.size:
        path = folder / "ttft.png"
        _distribution(ttft, figures.slo.ttft_s, "Time to first token", "s", "requests", path)
        drawn.append(path)
    if gaps.size:
        path = folder / "inter_token.png"
        limit_ms = figures.slo.inter_token_s * 1000
        _distribution(gaps * 1000, limit_ms, "Inter-token latency", "ms", "gaps", path)
        drawn.append(path)
        drawn.append(_throughput(run, folder / "throughput.png"))
    return drawn


def _distribution(
    values: NDArray[np.float64], limit: float, name: str, unit: str, noun: str, path: Path
) -> None:
    """The share of values that are at most x, and the limit if it is anywhere near."""
    p50, p99 = np.percentile(values, [50, 99])
    near = limit <= 2 * values.max()

    def content(axes: "Axes") -> None:
        axes.ecdf(values, color=LINE, linewidth=1.8)
        axes.plot([p50, p99], [0.5, 0.99], "o", color=LINE)
        if near:
            axes.axvline(limit, color=MARK, linestyle="--")
        if values.max() > WIDE * p50 > 0:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter("{x:g}")
        else:
            axes.set_xlim(left=0)
        axes.set_xlabel(f"{name} ({unit})")
        axes.set_ylabel(f"share of {values.size} {noun}")
        axes.set_ylim(0, 1.02)

    objective = f"; objective {limit:g} {unit}{' (dashed)' if near else ''}"
    _figure(content, f"{name}: p50 {_short(p50)} {unit}, p99 {_short(p99)} {unit}{objective}", path)


def _throughput(run: Run, path: Path) -> Path:
    """Output tokens per second. A chunk counts with its part of its request's tokens."""
    answered = [one for one in run.timelines if one.failure is None and one.text_s]
    times = np.concatenate([one.text_s for one in answered]) - run.started_s
    tokens = np.concatenate(
        [np.full(len(one.text_s), one.output_tokens / len(one.text_s)) for one in answered]
    )
    bucket_s = max(run.duration_s / BUCKETS, BUCKET_S_MIN)
    # whole buckets only: the last would be too low for being too short
    edges = np.arange(int(run.duration_s / bucket_s) + 1) * bucket_s
    if len(edges) < 2:
        edges = np.array([0.0, run.duration_s])
    rates = np.histogram(times, edges, weights=tokens)[0] / np.diff(edges)
    mean = tokens.sum() / run.duration_s

    def content(axes: "Axes") -> None:
        axes.stairs(rates, edges, color=LINE, fill=True, alpha=0.25)
        axes.stairs(rates, edges, color=LINE, linewidth=1.8)
        axes.axhline(mean, color=MARK, linestyle="--")
        axes.set_xlabel("time since the start (s)")
        axes.set_ylabel("output tokens per second")
        axes.set_xlim(0, edges[-1])
        axes.set_ylim(bottom=0)

    step_s = edges[1] - edges[0]
    _figure(content, f"Throughput in steps of {step_s:.2g} s; mean {_short(mean)} (dashed)", path)
    return path


def _short(value: float) -> str:
    """Three digits or more, and no exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _figure(content: Callable[["Axes"], None], title: str, path: Path) -> None:
    from matplotlib.figure import Figure  # a second, which a run without plots does not spend

    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.add_subplot()
    content(axes)
    axes.set_title(title, fontsize=11)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
