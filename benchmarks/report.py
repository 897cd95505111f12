"""The results as a table in the terminal, as markdown, and as a picture."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.console import Console
from rich.table import Table

TITLES = {
    "hookline": "Hookline",
    "lightning": "Lightning",
    "fabric": "Fabric",
    "accelerate": "Accelerate",
    "ignite": "Ignite",
    "transformers": "transformers",
}
COLOURS = {
    "hookline": "#0f766e",
    "lightning": "#8b5cf6",
    "fabric": "#c4b5fd",
    "accelerate": "#f59e0b",
    "ignite": "#ef4444",
    "transformers": "#64748b",
}
NOTE = (
    "Again: the bare loop a second time; how far it is off from 1.00 is chance. By hand: the bare loop "
    "that clears gradients by hand, not by `Optimizer.zero_grad`; in rows of the compiled step, the same "
    "parts compiled by hand."
)
BUSY = 0.5
"""Processes that ran before the measurement, on average over a minute."""
Cell = dict[str, Any]


@dataclass
class Row:
    """One line of the table."""

    title: str
    bare: float
    """Microseconds per step of the bare loop."""
    controls: dict[str, Cell]
    """Other loops by hand in the same section: "bare" is the same loop again, "by hand" clears gradients by
    hand.
    """
    cells: dict[str, Cell] = field(default_factory=dict)
    """By driver."""


class Report:
    """Shows what `overhead.py` has measured."""

    def __init__(self, results: dict[str, Any]) -> None:
        self.about = results["about"]
        rows: dict[str, Row] = {}
        for section in dict.fromkeys(each["section"] for each in results["rows"]):
            basis, *others = [each for each in results["rows"] if each["section"] == section]
            controls = {each["driver"]: each for each in others if each["driver"] not in TITLES}
            for row_result in others:
                if row_result["driver"] in TITLES:
                    new = Row(row_result["row"], basis["microseconds"], controls)
                    row = rows.setdefault(row_result["row"], new)
                    row.cells[row_result["driver"]] = row_result
        self.rows = list(rows.values())
        seen = {driver for row in self.rows for driver in row.cells}
        self.drivers = [driver for driver in TITLES if driver in seen]

    # ---- text ----------------------------------------------------------------------------------------------

    def show(self) -> None:
        """Print a table."""
        console = Console()
        console.width = max(console.width, 186 + 18 * max(len(self.drivers) - 2, 0))
        table = Table(title=self.caption, title_justify="left")
        for head in self.heads:
            table.add_column(head, justify="right" if table.columns else "left", no_wrap=True)
        for row in self.rows:
            table.add_row(*self.line(row))
        console.print(table)
        console.print(NOTE, highlight=False)

    def markdown(self) -> str:
        """Return the same for a document."""
        lines = [
            self.caption,
            "",
            "| " + " | ".join(self.heads) + " |",
            "|---|" + "---:|" * (len(self.heads) - 1),
        ]
        lines += ["| " + " | ".join(self.line(row)) + " |" for row in self.rows]
        return "\n".join([*lines, "", NOTE]) + "\n"

    def write_page(self, page: Path, picture: Path) -> None:
        """Put the table between the marks of a page, and the picture beside it."""
        text = re.sub(
            r"(<!-- results -->\n).*(<!-- end of results -->)",
            lambda found: f"{found[1]}{self.markdown()}{found[2]}",
            page.read_text(),
            flags=re.DOTALL,
        )
        page.write_text(text)
        picture.parent.mkdir(exist_ok=True)
        self.picture(picture)

    @property
    def caption(self) -> str:
        """Return where and with what the rows were measured."""
        versions = ", ".join(f"{TITLES[driver]} {self.about[driver]}" for driver in self.drivers)
        busy = (
            " The machine was busy, so small differences mean nothing." if self.about["load"] > BUSY else ""
        )
        return (
            "Time per step as a multiple of the bare loop: median (quartiles, fastest slice against "
            f"fastest slice). {self.about['processor']}, load {self.about['load']} at the start; Python "
            f"{self.about['python']}, torch {self.about['torch']}, {versions}; one thread.{busy}"
        )

    @property
    def heads(self) -> list[str]:
        """Return the first line of the table."""
        drivers = [TITLES[driver] for driver in self.drivers]
        return ["", "rounds", "bare, µs", "again", "by hand", *drivers, "Hookline / by hand", "aim"]

    def line(self, row: Row) -> list[str]:
        """Return one line of the table."""
        own = row.cells.get("hookline")
        against = own["by_hand"] if own else None
        aim = (
            ""
            if own is None or own["aim"] is None
            else f"≤ {own['aim']:.2f}{' by hand' if own['stage'] == 'compiled' else ''}"
        )
        return [
            row.title,
            str(len(own["ratios"])) if own else "",
            f"{row.bare:,.0f}",
            _short(row.controls.get("bare")),
            _short(row.controls.get("by hand")),
            *(_long(row.cells.get(driver)) for driver in self.drivers),
            _long(against),
            aim,
        ]

    # ---- the picture ---------------------------------------------------------------------------------------

    def picture(self, path: Path) -> None:
        """Draw two panels: Hookline and the loops by hand, where a percent shows; and all trainers."""
        matplotlib.rcParams["font.family"] = "DejaVu Sans"
        figure = Figure(figsize=(13, 1.9 + 0.38 * len(self.rows)), layout="constrained", facecolor="white")
        near, far = figure.subplots(1, 2, sharey=True)
        for place, row in enumerate(self.rows):
            self._near(near, row, place)
            self._far(far, row, place)
        near.set_yticks(range(len(self.rows)), [row.title for row in self.rows], fontsize=9)
        near.set_ylim(len(self.rows) - 0.4, -0.6)
        near.set_title("Hookline, and the same loop by hand", fontsize=10.5)
        far.set_title("all trainers", fontsize=10.5)
        for panel in (near, far):
            _axis(panel)
        figure.suptitle(
            "Time per training step, as a multiple of a bare PyTorch loop", fontsize=13, fontweight="bold"
        )
        handles = [
            Line2D(
                [],
                [],
                marker="o",
                linestyle="",
                color=COLOURS[driver],
                label=f"{TITLES[driver]} {self.about[driver]}",
            )
            for driver in self.drivers
        ]
        handles += [
            Line2D(
                [],
                [],
                marker="D",
                linestyle="",
                markerfacecolor="none",
                color="#555555",
                label="gradients cleared by hand",
            ),
            Line2D([], [], marker="|", markersize=11, linestyle="", color="#dc2626", label="aim of Hookline"),
        ]
        figure.legend(
            handles=handles,
            loc="outside lower center",
            ncols=min(len(handles), 5),
            frameon=False,
            fontsize=9,
            title="median; thin line: quartiles; logarithmic axis; smaller is better",
            title_fontsize=9,
        )
        figure.savefig(path, dpi=130)

    def _near(self, panel: Any, row: Row, place: int) -> None:
        if control := row.controls.get("by hand"):
            _dot(panel, control, place + 0.2, "#555555", "D", 4)
        if cell := row.cells.get("hookline"):
            _dot(panel, cell, place - 0.12, COLOURS["hookline"], "o", 6)
            panel.annotate(
                f"{cell['ratio']:.2f}",
                (cell["high"], place - 0.12),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=COLOURS["hookline"],
            )
            if cell["aim"] is not None and cell["stage"] != "compiled":
                panel.plot([cell["aim"]], [place - 0.12], marker="|", markersize=11, color="#dc2626")

    def _far(self, panel: Any, row: Row, place: int) -> None:
        height = 0.7 / len(self.drivers)
        for index, driver in enumerate(self.drivers):
            if cell := row.cells.get(driver):
                y = place + (index - (len(self.drivers) - 1) / 2) * height
                _dot(panel, cell, y, COLOURS[driver], "o", 5)
                if driver == "lightning":
                    panel.annotate(
                        f"{cell['ratio']:.1f}",
                        (cell["high"], y),
                        xytext=(5, 0),
                        textcoords="offset points",
                        va="center",
                        fontsize=8,
                        color=COLOURS[driver],
                    )


def _short(cell: Cell | None) -> str:
    return "" if cell is None else f"{cell['ratio']:.2f}"


def _long(cell: Cell | None) -> str:
    if cell is None:
        return ""
    least = f", {cell['minimum']:.2f}" if cell.get("driver") in ("hookline", "lightning") else ""
    return f"{cell['ratio']:.2f} ({cell['low']:.2f}–{cell['high']:.2f}{least})"


def _dot(panel: Any, cell: Cell, y: float, colour: str, marker: str, size: float) -> None:
    panel.plot([cell["low"], cell["high"]], [y, y], color=colour, linewidth=1)
    panel.plot(
        [cell["ratio"]],
        [y],
        marker=marker,
        markersize=size,
        color=colour,
        markerfacecolor="none" if marker == "D" else colour,
    )


def _axis(panel: Any) -> None:
    panel.set_xscale("log")
    lowest, highest = panel.get_xlim()
    lowest, highest = min(lowest, 0.9), max(highest, 1.1)
    panel.set_xlim(lowest, highest * (highest / lowest) ** 0.1)  # room for the numbers
    wide = highest / lowest
    near, medium, far = (
        (0.8, 0.9, 1, 1.1, 1.2, 1.3),
        (0.3, 0.5, 0.7, 1, 1.4, 2, 3),
        (0.2, 0.5, 1, 2, 5, 10, 20, 50),
    )
    ticks = [
        tick for tick in (near if wide < 2 else medium if wide < 8 else far) if lowest <= tick <= highest
    ]
    panel.set_xticks(ticks, [f"{tick:g}×" for tick in ticks], fontsize=9)
    panel.minorticks_off()
    panel.axvline(1, color="#222222", linewidth=1)
    panel.grid(axis="x", color="#e5e5e5", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.tick_params(axis="y", length=0)
