"""A run that was cut and continues has the log of a run that was never cut: every row, none twice."""

from __future__ import annotations

import csv
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import preloaded
import pytest
import torch
from tiny import Net, batches, quiet

from hookline import Hook, Logger, Preempted, Trainer
from hookline.loggers import CSV, JSONLines, Queued, read_log
from hookline.report.reader import read_run


class Saves(Hook):
    """A checkpoint at each of these steps; what is logged after it was asked for comes before it is put together."""

    def __init__(self, *steps: int) -> None:
        super().__init__()
        self.steps = steps

    def on_step_end(self, trainer: Any, step: int) -> None:
        if step in self.steps:
            trainer.save_checkpoint(reason="interval")


class Breaks(Hook):
    def __init__(self, step: int, number: int = 0) -> None:
        super().__init__()
        self.step, self.number = step, number

    def on_train_batch_end(self, step: int) -> None:
        if step == self.step and self.number:
            os.kill(os.getpid(), self.number)
        elif step == self.step:
            raise RuntimeError("cut")


def fit(run_dir: str, *hooks: Hook, logger: Any = True, resume: Any = None, **options: Any) -> None:
    torch.manual_seed(0)
    trainer(run_dir, *hooks, logger=logger, **options).fit(Net(), batches(4), batches(1), resume=resume)


def trainer(run_dir: str, *hooks: Hook, **options: Any) -> Trainer:
    return quiet(
        run_dir=run_dir,
        hooks=hooks,
        **{"max_epochs": 3, "log_every_n_steps": 1, "val_check_interval": 2, **options},
    )


def cut(run_dir: str, step: int, *hooks: Hook, **given: Any) -> None:
    with pytest.raises(RuntimeError, match="cut"):
        fit(run_dir, Breaks(step), *hooks, **given)


def checkpoint(step: int, run_dir: str = "mine") -> Path:
    return Path(run_dir) / "checkpoints" / f"step-{step}"


def rows(run_dir: str) -> list[tuple[Any, ...]]:
    records = read_log(Path(run_dir) / "log.jsonl")
    return [(each["step"], each["epoch"], each["metrics"]) for each in records if each["type"] == "metrics"]


def resumes(run_dir: str) -> list[dict[str, Any]]:
    return [each for each in read_log(Path(run_dir) / "log.jsonl") if each["type"] == "resume"]


@pytest.fixture
def whole() -> list[tuple[Any, ...]]:
    """The rows of a run that nothing happened to."""
    fit("whole")
    return rows("whole")


@pytest.mark.parametrize("save", [{}, {"save": "async"}], ids=["sync", "async"])
def test_a_run_that_failed_and_continues_from_an_older_checkpoint(
    whole: list[Any], save: dict[str, Any]
) -> None:
    cut("mine", 9, Saves(3, 6, 8), **save)
    assert len(rows("mine")) < len(whole)
    fit("mine", Saves(), resume=checkpoint(3), **save)
    assert rows("mine") == whole
    (record,) = resumes("mine")
    assert (record["step"], record["epoch"], record["checkpoint"]) == (3, 0, str(checkpoint(3)))
    assert record["superseded"]["records"] > 5


def test_cut_again_and_again_and_going_on_from_here_and_there(whole: list[Any]) -> None:
    cut("mine", 9, Saves(2, 5, 8))
    cut("mine", 7, Saves(6), resume=checkpoint(5))
    cut("mine", 4, Saves(3), resume=checkpoint(2))
    cut("mine", 10, Saves(9), resume=checkpoint(8))  # of the very first process
    fit("mine", Saves(), resume="auto")
    assert rows("mine") == whole
    assert [each["step"] for each in resumes("mine")] == [8, 9]


def test_a_run_that_was_killed(whole: list[Any]) -> None:
    code = (
        f"import sys; sys.path[:0] = {[str(Path(__file__).parents[1]), str(Path(__file__).parent)]}\n"
        f"from test_resuming import *\nfit('mine', Saves(5), Breaks(8, {int(signal.SIGKILL)}))"
    )
    ended = preloaded.run([sys.executable, "-c", code], capture_output=True, timeout=300, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    with Path("mine/log.jsonl").open("a") as log:
        log.write('{"type": "metrics", "step": 8, "metr')  # a kill in the middle of a line
    fit("mine", Saves(), resume="auto")
    assert rows("mine") == whole


def test_what_a_preempted_run_says_at_its_end_is_superseded(whole: list[Any]) -> None:
    with pytest.raises(Preempted):
        fit("mine", Breaks(7, signal.SIGTERM))
    assert rows("mine")[-1][:2] == (7, 1)  # the mean of half an epoch
    fit("mine", resume="auto")
    assert rows("mine") == whole
    assert (
        resumes("mine")[0]["superseded"]["records"] == 4
    )  # that mean, what the hooks had cost, where the time went, how it ended


def test_a_run_that_continues_elsewhere_marks_nothing_there(whole: list[Any]) -> None:
    cut("mine", 9, Saves(3))
    before = rows("mine")
    fit("other", Saves(), resume=checkpoint(3))
    assert rows("mine") == before
    assert [row[0] for row in rows("other")] == [row[0] for row in whole if row[0] > 3]
    assert "superseded" not in resumes("other")[0]
    fit("whole", Saves(), resume=checkpoint(3))  # a log that is long enough, but of another run
    assert "superseded" not in resumes("whole")[0] and rows("whole")[: len(whole)] == whole


def test_a_finished_run_that_is_started_again_keeps_its_log(whole: list[Any]) -> None:
    fit("mine", Saves(5))
    fit("mine", Saves(5), resume="auto")
    assert rows("mine") == whole and not resumes("mine")


def test_a_run_that_begins_anew_in_a_directory_of_another_is_a_course_of_its_own(whole: list[Any]) -> None:
    fit("mine", max_epochs=4)
    trainer("mine", logger=True).validate(Net(), batches(1))  # has its rows beside those of the training
    fit("mine", resume="auto")  # there is no checkpoint to continue from
    assert rows("mine") == whole
    (mark,) = resumes("mine")
    assert mark["step"] == 0 and "checkpoint" not in mark
    everything = list(read_log("mine/log.jsonl", superseded=True))
    assert (
        sum(each.get("superseded") is True for each in everything)
        == mark["superseded"]["records"]
        > len(whole)
    )


def test_a_first_run_and_a_validation_mark_nothing(whole: list[Any]) -> None:
    assert resumes("whole") == []
    trainer("whole", logger=True).validate(Net(), batches(1))
    assert rows("whole")[:-1] == whole and resumes("whole") == []


def test_loggers_that_came_or_went_meanwhile_are_not_mixed_up(whole: list[Any]) -> None:
    cut("mine", 9, Saves(3), logger=[JSONLines(), CSV(), CSV("second.csv")])
    extra = JSONLines("extra.jsonl")
    fit("mine", Saves(), resume=checkpoint(3), logger=[CSV(), Logger(), JSONLines(), extra])
    assert rows("mine") == whole
    assert len(table("mine")) == len(whole)
    marked = [each for each in read_log("extra.jsonl") if each["type"] == "resume"]
    assert marked and "superseded" not in marked[0]


@pytest.mark.parametrize("wrap", [Queued, lambda logger: logger], ids=["queued", "awaited"])
def test_a_logger_in_a_thread_of_its_own_knows_its_position_too(whole: list[Any], wrap: Any) -> None:
    class Mine(JSONLines):
        queued = None

    cut("mine", 9, Saves(3, 6), logger=wrap(Mine()))
    fit("mine", Saves(), resume=checkpoint(6), logger=wrap(Mine()))
    assert rows("mine") == whole


@pytest.mark.parametrize("wrap", [Queued, lambda logger: logger], ids=["queued", "direct"])
def test_a_checkpoint_that_is_made_after_the_run_knows_its_place_too(wrap: Any) -> None:
    threads = threading.active_count()
    first = trainer("mine", logger=wrap(JSONLines()), max_steps=5)
    first.fit(Net(), batches(4), batches(1))
    first.save_checkpoint()
    assert threading.active_count() == threads
    cut("mine", 8, resume=checkpoint(5))
    fit("mine", logger=wrap(JSONLines()), resume=checkpoint(5), max_steps=8)
    assert [step for step, _, metrics in rows("mine") if "lr" in metrics] == [1, 2, 3, 4, 5, 6, 7, 8]


# ---- the table -----------------------------------------------------------------------------------------------------


def table(run_dir: str, name: str = "metrics.csv") -> list[dict[str, str]]:
    with (Path(run_dir) / name).open(newline="") as file:
        return list(csv.DictReader(file, strict=True))


def test_the_table_has_the_rows_of_a_run_that_was_never_cut() -> None:
    fit("whole", logger=CSV())
    cut("mine", 9, Saves(2, 3), logger=CSV())
    before = table("mine")
    fit("mine", Saves(), logger=CSV(), resume=checkpoint(3))
    assert table("mine") == table("whole")
    moved = table("mine", "metrics.superseded-1.csv")
    assert moved and moved == before[len(before) - len(moved) :]
    cut("mine", 5, logger=CSV(), resume=checkpoint(2))
    fit("mine", logger=CSV(), resume=checkpoint(3))
    assert table("mine") == table("whole")
    assert sorted(path.name for path in Path("mine").glob("*.csv")) == [
        "hparams.csv",
        "metrics.csv",
        "metrics.superseded-1.csv",
        "metrics.superseded-2.csv",
        "metrics.superseded-3.csv",
    ]


def test_a_table_of_another_run_is_moved_aside() -> None:
    fit("whole", logger=CSV())
    fit("mine", logger=CSV(), max_epochs=1)
    before = table("mine")
    fit("mine", logger=CSV())
    assert table("mine") == table("whole") and table("mine", "metrics.superseded-1.csv") == before


def test_a_checkpoint_from_before_the_first_row_takes_all_rows_out() -> None:
    fit("whole", logger=CSV(), log_every_n_steps=2, val_check_interval=4)
    cut("mine", 5, Saves(1), logger=CSV(), log_every_n_steps=2, val_check_interval=4)
    assert table("mine")
    fit("mine", Saves(), logger=CSV(), log_every_n_steps=2, val_check_interval=4, resume=checkpoint(1))
    assert table("mine") == table("whole")


def test_another_table_is_left_alone() -> None:
    fit("other", logger=CSV(), max_epochs=4, gradient_clip_val=0.01)
    before = table("other")
    cut("mine", 9, Saves(3), logger=CSV())
    fit("other", logger=CSV(), resume=checkpoint(3), max_epochs=1)
    fit("none", logger=CSV(), resume=checkpoint(3), max_epochs=1)
    assert table("other")[: len(before)] == before and table("none")[0]["step"] == "4"
    assert not list(Path().glob("*/metrics.superseded*"))


def test_a_kill_while_rows_are_moved_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = CSV()
    first.open(lambda: tmp_path)
    first.log_metrics({"a": 1.0}, 1, 0)
    position = first.position()
    first.log_metrics({"a": 2.0, "b": 2.0}, 2, 0)
    first.close()
    replace = os.replace
    for at in (1, 2):  # before the rows are aside, and when they are in both places
        calls = []

        def killed(*given: Any, at: int = at, calls: list[Any] = calls) -> None:
            calls.append(given)
            if len(calls) == at:
                raise KeyboardInterrupt
            replace(*given)

        monkeypatch.setattr(os, "replace", killed)
        cut_off = CSV()
        cut_off.open(lambda: tmp_path)
        with pytest.raises(KeyboardInterrupt):
            cut_off.resume(position, 1, 0, "checkpoint")
        assert [row["step"] for row in table(str(tmp_path))] == ["1", "2"]
    monkeypatch.setattr(os, "replace", replace)
    last = CSV()
    last.open(lambda: tmp_path)
    last.log_metrics({"c": 0.0}, 0, 0)  # its own rows stay, even those from before it was told
    last.resume(position, 1, 0, "checkpoint")
    last.log_metrics({"a": 3.0}, 2, 0)
    last.close()
    assert [(row["step"], row["a"], row["b"], row["c"]) for row in table(str(tmp_path))] == [
        ("1", "1.0", "", ""),
        ("0", "", "", "0.0"),
        ("2", "3.0", "", ""),
    ]
    assert [row["b"] for row in table(str(tmp_path), "metrics.superseded-2.csv")] == ["2.0"]


def test_what_was_measured_after_a_fit_stays_when_the_run_is_continued(tmp_path: Path) -> None:
    run_dir = str(tmp_path / "run")
    for epochs in (1, 2):
        made = trainer(run_dir, max_epochs=epochs, logger=True, checkpoint=True)
        net = Net()
        made.fit(net, batches(4), batches(1), resume="auto")
        made.test(net, batches(2))

    def tested() -> list[int]:
        return [each["step"] for each in read_log(run_dir) if "test/loss" in each.get("metrics", {})]

    assert tested() == [4, 8]
    rows = [(each["step"], each["over"]) for each in read_log(run_dir) if each["type"] == "metrics"]
    assert len(rows) == len(set(rows)) + 2  # no row twice but for the two tests, which are evaluations too
    shown = read_run(tmp_path / "run").series
    assert [*shown["test/loss"].steps] == [4, 8]
    # back to an earlier state, which was not the one that was tested
    made = trainer(run_dir, Saves(6), max_epochs=2, logger=True, checkpoint=True)
    made.fit(Net(), batches(4), batches(1))
    assert tested() == []
    made.test(Net(), batches(2))
    made = trainer(run_dir, max_epochs=2, logger=True, checkpoint=True)
    made.fit(Net(), batches(4), batches(1), resume=run_dir + "/checkpoints/step-6")
    assert tested() == []
