"""Plots of the length profile, the plans and the training: one function per PNG file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib.figure import Figure  # noqa: E402 (once the backend is set)


def _figure(title: str, x_label: str, y_label: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(7.5, 4.2), dpi=110, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure, axes


def length_histogram(path: Path, lengths: Sequence[int], counts: Sequence[int], edges: Sequence[int]) -> None:
    """Draw the number of samples by sequence length, with the bucket edges."""
    figure, axes = _figure("Sequence lengths of the training samples and bucket edges", "tokens", "samples")
    if lengths:
        bins = min(80, max(1, max(lengths) - min(lengths) + 1))
        axes.hist(lengths, bins=bins, weights=counts, color="#4878a8")
    for i, edge in enumerate(edges[1:]):
        axes.axvline(edge, color="#c44e52", linewidth=1, label="bucket edge" if i == 0 else None)
    if len(edges) > 1:
        axes.legend(frameon=False)
    figure.savefig(path)


def efficiency_against_buckets(
    path: Path, num_buckets: Sequence[int], efficiency: Sequence[float], chosen: int, knee: int | None = None
) -> None:
    """Draw the expected padding efficiency of the optimal edges for each number of buckets."""
    figure, axes = _figure("Expected padding efficiency of optimal edges", "buckets", "padding efficiency")
    axes.plot(num_buckets, efficiency, marker="o", markersize=3, color="#4878a8")
    axes.axvline(chosen, color="#c44e52", linewidth=1, label=f"chosen: {chosen}")
    if knee is not None:
        axes.axvline(knee, color="#55a868", linewidth=1, linestyle="--", label=f"knee: {knee}")
    axes.set_ylim(top=1.0)
    axes.legend(frameon=False)
    figure.savefig(path)


def efficiency_by_strategy(path: Path, efficiency: Mapping[str, float]) -> None:
    """Draw the padding efficiency of each strategy's plans."""
    figure, axes = _figure("Padding efficiency by strategy", "", "real tokens / slots")
    bars = axes.bar(list(efficiency), list(efficiency.values()), color="#4878a8", width=0.6)
    axes.bar_label(bars, fmt="%.3f", fontsize=9)
    axes.set_ylim(0, 1.08)
    figure.savefig(path)


def loss_curves(
    path: Path,
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    x_label: str,
    title: str = "Loss",
) -> None:
    """Draw losses over steps, samples or seconds; curves of many points get a running mean.

    Args:
        path: PNG file to write.
        curves: label -> (x, loss).
        x_label: meaning and unit of x.
        title: title of the plot.
    """
    figure, axes = _figure(title, x_label, "loss per weighted position")
    colors = matplotlib.colormaps["tab10"].colors  # type: ignore[attr-defined]
    for i, (label, (x, y)) in enumerate(curves.items()):
        color = colors[i % len(colors)]
        window = max(1, len(y) // 50)
        if window > 1:
            axes.plot(x, y, color=color, alpha=0.25, linewidth=0.8)
            y = [sum(y[max(0, j - window + 1) : j + 1]) / min(window, j + 1) for j in range(len(y))]
        axes.plot(x, y, color=color, label=label, marker="o" if len(y) < 12 else None, markersize=3)
    if curves:
        axes.legend(frameon=False)
    figure.savefig(path)


def loss_bands(path: Path, runs: Mapping[str, Sequence[tuple[Any, Any]]], x_label: str) -> None:
    """Draw running means of each strategy's loss: the mean over seeds as a line, their range as a band.

    Args:
        path: PNG file to write.
        runs: label -> (x, loss) of each seed; x rises.
        x_label: meaning and unit of x.
    """
    figure, axes = _figure("Training loss", x_label, "loss per weighted position")
    colors = matplotlib.colormaps["tab10"].colors  # type: ignore[attr-defined]
    for i, (label, curves) in enumerate(runs.items()):
        end = min(float(x[-1]) for x, _ in curves)
        start = max(float(x[0]) for x, _ in curves)
        grid = np.linspace(start, end, 200)
        smooth = []
        for x, loss in curves:
            window = max(1, len(loss) // 20)
            means = np.convolve(loss, np.ones(window) / window, mode="valid")
            smooth.append(np.interp(grid, x[window - 1 :], means))
        color = colors[i % len(colors)]
        axes.plot(grid, np.mean(smooth, axis=0), color=color, label=label)
        if len(curves) > 1:
            axes.fill_between(grid, np.min(smooth, axis=0), np.max(smooth, axis=0), color=color, alpha=0.2)
    axes.legend(frameon=False)
    figure.savefig(path)


def acceptance_by_position(path: Path, acceptance: Mapping[str, Sequence[float]]) -> None:
    """Draw the share of blocks whose draft was accepted up to each position.

    Args:
        path: PNG file to write.
        acceptance: prompt set or strategy -> rates at positions 1, 2, ...
    """
    title, y_label = "Acceptance by position in the block", "share of blocks accepted so far"
    figure, axes = _figure(title, "position", y_label)
    for label, rates in acceptance.items():
        axes.plot(range(1, len(rates) + 1), rates, marker="o", markersize=4, label=label)
    axes.set_ylim(bottom=0)
    if acceptance:
        axes.legend(frameon=False)
    figure.savefig(path)


def bars_with_intervals(
    path: Path,
    title: str,
    y_label: str,
    values: Mapping[str, float],
    intervals: Mapping[str, tuple[float, float]],
) -> None:
    """Draw one bar per strategy, with an interval where there is one."""
    figure, axes = _figure(title, "", y_label)
    bars = axes.bar(list(values), list(values.values()), color="#4878a8", width=0.6)
    axes.bar_label(bars, fmt="%.3f", fontsize=9, padding=2)
    for i, name in enumerate(values):
        if name in intervals:
            low, high = intervals[name]
            axes.vlines(i, low, high, color="#333333", linewidth=1.5)
    figure.savefig(path)
