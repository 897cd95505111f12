"""The results as a table in the terminal, as markdown, and as a picture."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich.console import Console
from rich.table import Table
from work import WORKS

COLOURS = {"hookline": "#0f766e", "lightning": "#a78bda"}
TITLES = {"hookline": "Hookline", "lightning": "Lightning"}


@dataclass
class Results:
    """What was found for one model."""

    title: str
    bare: float
    """Microseconds per step of the bare loop."""
    drivers: list[str]
    cases: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """Rows by case and driver."""
    controls: list[dict[str, Any]] = field(default_factory=list)
    """Other bare loops."""


def by_model(results: dict[str, Any]) -> list[Results]:
    """The rows, sorted out."""
    found = []
    for work in WORKS:
        rows = [row for row in results["rows"] if row["model"] == work.name]
        if not rows:
            continue
        basis, *others = rows
        seen = {row["driver"] for row in others}
        one = Results(work.title, basis["microseconds"], [driver for driver in TITLES if driver in seen])
        for row in others:
            if row["driver"] in TITLES:
                one.cases.setdefault(row["case"], {})[row["driver"]] = row
            else:
                one.controls.append(row)
        found.append(one)
    return found


def _cells(row: dict[str, Any] | None) -> tuple[str, str, str]:
    if row is None:
        return "", "", ""
    return f"{row['ratio']:.2f}", f"{row['low']:.2f} to {row['high']:.2f}", f"{row['microseconds']:.0f}"


# ---- text --------------------------------------------------------------------------------------------------------


def show(results: dict[str, Any]) -> None:
    """Print it."""
    console = Console()
    console.width = max(console.width, 116)
    for model in by_model(results):
        table = Table(title=f"{model.title}, a bare loop takes {model.bare:.0f} µs per step", title_justify="left")
        table.add_column("times bare: median, quartiles; µs per step", no_wrap=True)
        for driver in model.drivers:
            table.add_column(TITLES[driver], justify="right", style="bold", no_wrap=True)
            table.add_column("", justify="right", style="dim", no_wrap=True)
            table.add_column("µs", justify="right")
        for case, rows in model.cases.items():
            table.add_row(case, *(cell for driver in model.drivers for cell in _cells(rows.get(driver))))
        console.print(table)
        console.print("  " + _controls(model) + "\n", style="dim", highlight=False)


def markdown(results: dict[str, Any]) -> str:
    """The same for a document."""
    about = results["about"]
    text = [
        "# Time per training step, relative to a bare loop",
        "",
        f"Median of {about['rounds']} paired measurements, quartiles in brackets. {about['processor']}; "
        f"Python {about['python']}, torch {about['torch']}, Hookline {about['hookline']}, Lightning {about['lightning']}; "
        "one thread.",
        "",
    ]
    for model in by_model(results):
        text += [f"## {model.title}", "", f"Bare loop: {model.bare:.0f} µs per step. {_controls(model)}", ""]
        text += ["| | " + " | ".join(f"{TITLES[driver]} | µs" for driver in model.drivers) + " |"]
        text += ["|---|" + "---:|---:|" * len(model.drivers)]
        for case, rows in model.cases.items():
            cells = []
            for ratio, quartiles, microseconds in (_cells(rows.get(driver)) for driver in model.drivers):
                cells += [f"**{ratio}** ({quartiles})" if ratio else "", microseconds]
            text.append(f"| {case} | " + " | ".join(cells) + " |")
        text.append("")
    return "\n".join(text)


def _controls(model: Results) -> str:
    shown = [f"{row['case']}: {row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f})" for row in model.controls]
    return f"Other bare loops: {'; '.join(shown)}."


# ---- the picture -------------------------------------------------------------------------------------------------


def picture(results: dict[str, Any], path: Path) -> None:
    """One panel per model, bars that grow from the bare loop on."""
    models = by_model(results)
    cases = len(models[0].cases)
    matplotlib.rcParams["font.family"] = "DejaVu Sans"
    figure = Figure(figsize=(3.3 + 3.7 * len(models), 1.9 + 0.5 * cases), layout="constrained", facecolor="white")
    panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for panel, model in zip(panels, models, strict=True):
        _panel(panel, model)
    panels[0].set_yticks(range(cases), list(models[0].cases), fontsize=9.5)
    panels[0].set_ylim(cases - 0.4, -0.6)
    figure.suptitle("Time per training step, as a multiple of a bare PyTorch loop", fontsize=13, fontweight="bold")
    about = results["about"]
    handles = [Patch(color=COLOURS[driver], label=f"{TITLES[driver]} {about[driver]}") for driver in models[0].drivers]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=10,
                  title=f"median of {about['rounds']} paired measurements; thin line: quartiles; logarithmic axis",
                  title_fontsize=9)  # fmt: skip
    figure.savefig(path, dpi=140)


def _panel(panel: Any, model: Results) -> None:
    height = 0.8 / len(model.drivers)
    for place, rows in enumerate(model.cases.values()):
        for index, driver in enumerate(model.drivers):
            if driver in rows:
                _bar(panel, rows[driver], place + (index - (len(model.drivers) - 1) / 2) * height, height, COLOURS[driver])
    spread = [row[key] for rows in model.cases.values() for row in rows.values() for key in ("low", "high")]
    lowest, highest = min(*spread, 1), max(spread)
    panel.set_xscale("log")
    panel.set_xlim(lowest / 1.01, highest * (highest / lowest) ** 0.22)  # room for the numbers at the bars' ends
    choices = (1, 1.2, 1.4, 1.6) if highest < 2 else (1, 1.5, 2, 3, 4) if highest < 5 else (1, 2, 5, 10, 20)
    ticks = [tick for tick in choices if tick <= highest * 1.2]
    panel.set_xticks(ticks, [f"{tick:g}×" for tick in ticks], fontsize=9)
    panel.minorticks_off()
    panel.axvline(1, color="#222222", linewidth=1.2)
    panel.set_title(f"{model.title}\nbare loop: {model.bare:,.0f} µs per step", fontsize=10.5)
    panel.grid(axis="x", color="#e5e5e5", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.tick_params(axis="y", length=0)


def _bar(panel: Any, row: dict[str, Any], y: float, height: float, colour: str) -> None:
    panel.barh(y, row["ratio"] - 1, left=1, height=height * 0.9, color=colour)
    panel.plot([row["low"], row["high"]], [y, y], color="#222222", linewidth=1)
    panel.annotate(f"{row['ratio']:.2f}×", (max(row["high"], row["ratio"], 1), y), xytext=(4, 0), textcoords="offset points",
                   va="center", fontsize=8.5, color="#222222")  # fmt: skip
