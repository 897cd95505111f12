"""Figures of a run: what is drawn where, without a window and without matplotlib's global state."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hookline import HookError
from hookline.hooks._figures import MOST_LABELS, edges, heat_map, lr_curve, need_matplotlib, save_figure
from hookline.loggers import JSONLines, read_log


def labels(figure: Any) -> list[str]:
    return [each.get_text() for legend in figure.legends for each in legend.get_texts()]


def test_columns_are_centred_at_their_steps() -> None:
    assert edges([10, 20, 40]).tolist() == [5.0, 15.0, 30.0, 50.0]
    assert edges([7]).tolist() == [6.5, 7.5]


def test_a_heat_map_has_a_cell_for_every_layer_and_step_and_marks_what_is_out_of_range() -> None:
    values = [[1.0, 2.0, 3.0], [1e-9, 1.0, 1e9], [math.nan, 1.0, math.inf]]
    figure = heat_map(["first", "second", "third"], [1, 2, 3], values, low=1e-7, high=1e3)
    axes = figure.axes[0]
    cells = np.ma.asarray(axes.collections[0].get_array()).reshape(3, 3)
    assert cells.mask.tolist() == [[False] * 3, [False] * 3, [True, False, False]]
    norm = axes.collections[0].norm
    assert cells[1, 0] < norm.vmin and cells[1, 2] > norm.vmax and cells[2, 2] > norm.vmax
    assert norm.vmin <= cells[0].min() and cells[0].max() <= norm.vmax
    assert [each.get_text() for each in axes.get_yticklabels()] == ["first", "second", "third"]
    assert axes.yaxis_inverted()  # the input is at the top
    assert labels(figure) == ["vanishing: below 1e-07", "exploding: above 1000, or not finite", "not trained"]


def test_only_what_occurs_is_in_the_legend() -> None:
    assert labels(heat_map(["a"], [1], [[1.0]], low=1e-7, high=1e3)) == []


def test_of_many_layers_some_are_named() -> None:
    rows = [f"layer {number}" for number in range(3 * MOST_LABELS)]
    axes = heat_map(rows, [1], [[1.0]] * len(rows), low=1e-7, high=1e3).axes[0]
    assert [each.get_text() for each in axes.get_yticklabels()] == rows[::3]


def test_the_curve_of_a_range_test_marks_the_suggestion_and_is_not_flattened_by_a_loss_that_blew_up() -> None:
    lrs, losses = [1e-4, 1e-3, 1e-2, 1e-1], [2.0, 1.0, 1.5, 1e6]
    axes = lr_curve(lrs, losses, losses, suggestion=1e-3).axes[0]
    (point,) = [line for line in axes.lines if "suggestion" in str(line.get_label())]
    assert point.get_xydata().tolist() == [[1e-3, 1.0]] and point.get_label() == "suggestion: 0.001"
    assert axes.get_xscale() == "log" and axes.get_ylim()[0] < 1.0
    calm = lr_curve(lrs, [2.0, 1.0, 1.5, 1.6], [2.0, 1.0, 1.5, 1.6], None).axes[0]
    assert calm.get_ylim()[1] < 3 and not [
        each for each in calm.lines if "suggestion" in str(each.get_label())
    ]


def test_a_figure_is_logged_and_is_a_png_in_a_folder_that_is_made(tmp_path: Path) -> None:
    logger = JSONLines(tmp_path / "log.jsonl")
    save_figure(heat_map(["a"], [1], [[1.0]], 1e-7, 1e3), "it", tmp_path / "figures", logger, 3)
    logger.close()
    assert (tmp_path / "figures" / "it.png").read_bytes().startswith(b"\x89PNG")
    (record,) = read_log(tmp_path / "log.jsonl")
    assert (record["type"], record["tag"], record["step"]) == ("image", "it", 3)


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    need_matplotlib("It")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(HookError, match=r"It draws a figure.*hookline\[plots\]"):
        need_matplotlib("It")
