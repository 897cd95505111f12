"""The report in a cell of a notebook: of trainers or directories, the page of `hookline report` in a frame."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest
from tiny import Net, batches, quiet

import hookline
from hookline.util.errors import OptionError


@pytest.fixture
def trainer(tmp_path: Path) -> hookline.Trainer:
    made = quiet(max_epochs=1, logger=True, run_dir=tmp_path / "run")
    made.fit(Net(), batches(3))
    return made


def test_a_trainer_and_its_directory_have_the_same_report(trainer: hookline.Trainer) -> None:
    report = hookline.Report(trainer, height=300)
    assert report.run_dirs == hookline.Report(str(trainer.run_dir)).run_dirs == [trainer.run_dir]
    assert repr(report).startswith(f"{trainer.run_dir}: completed, step 3, 1 epoch")
    made = report._repr_html_()
    assert 'height="300"' in made
    source = re.search(r'srcdoc="([^"]*)"', made)
    assert source is not None
    page = html.unescape(source[1])
    assert page.startswith("<!doctype html>")
    assert "train/loss" in page


def test_it_is_saved_as_the_command_line_does(trainer: hookline.Trainer, tmp_path: Path) -> None:
    assert hookline.Report(trainer).save() == trainer.run_dir / "report.html"
    saved = hookline.Report(trainer).save(tmp_path / "mine.html")
    assert saved.read_text().startswith("<!doctype html>")


def test_each_display_reads_the_run_again(trainer: hookline.Trainer) -> None:
    report = hookline.Report(trainer)
    trainer.fit(Net(), batches(2))
    assert "step 2" in repr(report)


def test_what_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"needs a trainer or the directory of a run"):
        hookline.Report()
    with pytest.raises(OptionError, match="5 is not a trainer or the directory of a run"):
        hookline.Report(5)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="height=0 must be a whole number of pixels"):
        hookline.Report(tmp_path, height=0)
    with pytest.raises(OptionError, match="nothing does not exist"):
        hookline.Report(tmp_path / "nothing")


def test_a_trainer_without_a_run_is_named_as_the_reason() -> None:
    with pytest.raises(OptionError, match=r"this trainer has no run yet \(runs/.*Call fit\(\) first"):
        hookline.Report(quiet())


def test_the_list_of_runs_and_a_run_of_it_have_a_report(trainer: hookline.Trainer, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    listing = hookline.list_runs(trainer.run_dir.parent)
    assert hookline.Report(listing).run_dirs == [trainer.run_dir]
    assert hookline.Report(listing.runs[0]).run_dirs == [trainer.run_dir]
    with pytest.raises(OptionError, match="needs a trainer or the directory of a run"):
        hookline.Report(hookline.list_runs(tmp_path / "none"))


def test_a_directory_of_runs_is_refused_with_the_names_of_its_runs(trainer: hookline.Trainer) -> None:
    with pytest.raises(OptionError, match=rf"not the directory of a run.* runs below it: {trainer.run_dir}"):
        hookline.Report(trainer.run_dir.parent)


def test_a_list_of_runs_is_taken_as_several_runs(trainer: hookline.Trainer) -> None:
    assert hookline.Report([trainer, str(trainer.run_dir)]).run_dirs == [trainer.run_dir] * 2
    with pytest.raises(OptionError, match=r"needs a trainer or the directory of a run"):
        hookline.Report([])
