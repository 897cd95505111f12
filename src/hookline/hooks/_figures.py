"""Draw figures of a run with matplotlib, without windows and without its global state."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hookline.util.errors import HookError, install_command

MOST_LABELS = 48


def missing_matplotlib(what: str) -> str:
    """Return why a figure cannot be drawn, and what installs matplotlib; empty if it is installed."""
    if importlib.util.find_spec("matplotlib") is not None:
        return ""
    return f"{what} draws a figure with matplotlib, which is not installed: {install_command('plots')}."


def need_matplotlib(what: str) -> None:
    """Raise before training if matplotlib is missing, because the figure is drawn at the end."""
    if problem := missing_matplotlib(what):
        raise HookError(problem)


def save_figure(figure: Any, name: str, run_dir: Path | str, logger: Any, step: int) -> None:
    """Write a figure as `NAME.png` into the run's directory, and log it."""
    path = Path(run_dir) / f"{name}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    logger.add_figure(name, figure, step)


def heat_map(rows: Sequence[str], steps: Sequence[int], values: Any, low: float, high: float) -> Any:
    """Draw norms of layers (rows) over steps. NaN is not measured; values below `low` and above `high` have
    their own colours.
    """
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import FixedLocator, MaxNLocator

    cells = np.asarray(values, dtype=np.float64)
    measured = ~np.isnan(cells)
    small, large = measured & (cells < low), measured & (cells > high)
    normal = cells[measured & ~small & ~large]
    bottom, top = (normal.min(), normal.max()) if normal.size else (max(low, 1e-12), min(high, 1e12))
    if top < bottom * 10:  # a colour bar needs a range
        bottom, top = bottom / 3, top * 3
    cells = np.where(small, bottom / 10, np.where(large, top * 10, cells))

    longest = max(len(row) for row in rows)
    figure = Figure(
        figsize=(7.5 + 0.075 * longest, min(max(1.6 + 0.2 * len(rows), 3.2), 14.0)), layout="constrained"
    )
    axes = figure.add_subplot()
    colours = colormaps["viridis"].with_extremes(under="#000000", over="#d7263d", bad="#e6e6e6")
    mesh = axes.pcolormesh(
        edges(steps),
        np.arange(len(rows) + 1),
        np.ma.masked_invalid(cells),
        cmap=colours,
        norm=LogNorm(bottom, top),
        rasterized=True,
    )
    every = -(-len(rows) // MOST_LABELS)
    axes.set_yticks(np.arange(0, len(rows), every) + 0.5, list(rows)[::every], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()  # the input at the top
    axes.xaxis.set_major_locator(
        MaxNLocator(nbins=10, integer=True) if len(steps) > 1 else FixedLocator(list(steps))
    )
    axes.set_xlabel("step")
    axes.set_title("Gradient flow: norm of each layer's gradient", loc="left", fontsize=11)
    figure.colorbar(mesh, ax=axes, label="gradient norm", pad=0.01)
    marks = [
        (small, "#000000", f"vanishing: below {low:g}"),
        (large, "#d7263d", f"exploding: above {high:g}, or not finite"),
        (~measured, "#e6e6e6", "not trained"),
    ]
    patches = [
        Patch(facecolor=colour, edgecolor="#888888", label=label)
        for where, colour, label in marks
        if where.any()
    ]
    if patches:
        figure.legend(
            handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=8
        )
    return figure


def edges(steps: Sequence[int]) -> Any:
    """Return the borders between columns centred at these steps."""
    centres = np.asarray(steps, dtype=np.float64)
    if len(centres) == 1:
        return np.array([centres[0] - 0.5, centres[0] + 0.5])
    middles = (centres[1:] + centres[:-1]) / 2
    return np.concatenate([[2 * centres[0] - middles[0]], middles, [2 * centres[-1] - middles[-1]]])


def lr_curve(lrs: Sequence[float], losses: Sequence[float], smooth: Any, suggestion: float | None) -> Any:
    """Draw loss over learning rate and mark the suggestion."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(lrs, losses, ".", color="#9bb7d4", markersize=4, label="loss of a step")
    axes.plot(lrs, smooth, color="#1f4e79", linewidth=2, label="smoothed")
    if suggestion is not None:
        at = float(np.interp(np.log(suggestion), np.log(lrs), smooth))
        axes.axvline(suggestion, color="#d7263d", linewidth=1, linestyle="--")
        axes.plot(
            [suggestion], [at], "o", color="#d7263d", markersize=8, label=f"suggestion: {suggestion:.2g}"
        )
    finite = np.asarray(smooth)[np.isfinite(smooth)]
    start, lowest = float(finite[: len(finite) // 2 + 1].max()), float(finite.min())
    room = max(start - lowest, 0.05 * abs(start), 1e-12)
    axes.set_ylim(lowest - 0.15 * room, start + 0.6 * room)  # a loss that blew up must not flatten the rest
    axes.set_xscale("log")
    axes.set_xlabel("learning rate")
    axes.set_ylabel("loss")
    axes.set_title("Learning-rate range test", loc="left", fontsize=11)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower left")
    return figure
