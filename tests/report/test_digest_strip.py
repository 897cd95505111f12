"""The strips of digests on the page: equal, different, repeated, and long runs in few fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diverge.planted import AtStepEnd, Net, nudge, samples
from report.reported import data_of
from tiny import Net as Plain
from tiny import batches, quiet

from hookline import Hook, OptionError
from hookline.report import digest_strip, write_report
from hookline.report.digest_strip import digest_strips


def train(folder: str, hooks: Any = (), resume: Any = None) -> Path:
    torch.manual_seed(3)
    quiet(run_dir=folder, seed=1, digest=True, logger=True, hooks=list(hooks)).fit(
        Net(), samples(), resume=resume
    )
    return Path(folder)


class Saves(Hook):
    def on_step_end(self, trainer: Any, step: int) -> None:
        if step == 3:
            trainer.save_checkpoint("saved")


def test_runs_are_compared_with_the_first_or_with_the_named_one() -> None:
    paths = [train("a"), train("b", [AtStepEnd(4, nudge("last.bias"))])]
    first, second = digest_strips(paths, ["a", "b"])
    assert first["against"] == "" and {each[3] for each in first["bins"]} == {"alone"}
    assert [each[3] for each in second["bins"]] == ["equal"] * 3 + ["differs"] * 3
    assert (second["against"], second["divergence"]["step"], second["divergence"]["kind"]) == (
        "a",
        4,
        "weights",
    )
    [alone] = digest_strips(paths[1:], ["b"], against=paths[0])
    assert alone["divergence"]["step"] == 4 and alone["against"] == "a"


def test_a_run_alone_shows_its_repeated_steps() -> None:
    train("run", [Saves()])
    train("run", [AtStepEnd(6, nudge("last.bias"))], resume="saved")
    [strip] = digest_strips([Path("run")], ["run"])
    assert [each[3] for each in strip["bins"]] == ["alone"] * 3 + ["repeated"] * 2 + ["differs"]


def test_a_long_run_has_few_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_strip, "MOST_BINS", 4)
    [strip] = digest_strips([train("run")], ["run"])
    assert [each[:3] for each in strip["bins"]] == [[1, 2, 2], [3, 4, 2], [5, 6, 2]]


def test_the_page_has_the_strips_and_refuses_a_run_without_digests() -> None:
    quiet(run_dir="plain", logger=True).fit(Plain(), batches(2))
    assert data_of(Path("plain"))["digests"] == []
    assert data_of(train("run"))["digests"][0]["every"] == 1
    with pytest.raises(OptionError, match="--against plain: this run has no digests. Trainer"):
        write_report(["run"], against="plain")
