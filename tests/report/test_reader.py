"""Whatever state a run's directory is in, what is there is told, and what is no run is refused in words."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from report.reported import curve, data_of, metrics, whole_run, written
from tiny import Net, SavesFirstEpoch, batches, quiet

from hookline import Hook
from hookline.hooks import LRMonitor, ModelCheckpoint
from hookline.loggers import read_log
from hookline.report import reader
from hookline.report.page import page_data
from hookline.report.reader import FollowedRun, RecordedRun, read_run
from hookline.util.errors import OptionError


def test_the_curves_are_the_numbers_of_the_log() -> None:
    data = data_of(path := whole_run())
    logged = [
        (each["step"], each["metrics"]["train/loss"])
        for each in read_log(path / "log.jsonl")
        if each["type"] == "metrics" and {"train/loss", "lr"} <= set(each["metrics"])
    ]
    drawn = curve(data, "train/loss")
    assert drawn["x"] == [step for step, _ in logged]
    assert drawn["y"] == pytest.approx([value for _, value in logged], rel=1e-5)
    row = next(each for each in data["summary"] if each["name"] == "train/loss")
    values = [value for _, value in logged]
    assert (row["last"], row["min"], row["max"], row["count"]) == (
        values[-1],
        min(values),
        max(values),
        len(values),
    )


def test_the_mean_of_an_epoch_is_a_curve_of_its_own_not_a_spike_in_that_of_the_steps() -> None:
    data = data_of(whole_run())
    assert curve(data, "train/loss")["x"] == list(range(1, 13))
    assert curve(data, "train/loss (epoch)")["x"] == [4, 8, 12]
    assert curve(data, "val/loss")["x"] == [4, 8, 12]
    losses = curve(data, "train/loss")["y"]
    assert curve(data, "train/loss (epoch)")["y"][0] == pytest.approx(sum(losses[:4]) / 4, rel=1e-4)


def test_half_a_line_and_a_run_that_still_writes_are_no_obstacle() -> None:
    path = written("run", metrics(1, loss=2.0), metrics(2, loss=1.0), after='{"type": "metrics", "ti')
    assert curve(data_of(path), "loss")["y"] == [2.0, 1.0]


def test_what_a_resume_has_superseded_is_not_drawn_and_the_resume_is_an_event() -> None:
    checkpoint = ModelCheckpoint(every_n_train_steps=3, save_top_k=-1)
    quiet(run_dir="run", logger=True, max_epochs=2, log_every_n_steps=1, hooks=[checkpoint]).fit(
        Net(), batches()
    )
    saved = sorted(
        Path("run/checkpoints").iterdir(),
        key=lambda each: json.loads((each / "manifest.json").read_text())["step"],
    )
    (Path("run") / "run.json").unlink()  # as if it had been killed before it could say how it ended
    trainer = quiet(run_dir="run", logger=True, max_epochs=3, log_every_n_steps=1)
    trainer.fit(Net(), batches(), resume=saved[0])
    data = data_of(Path("run"))
    steps = curve(data, "train/loss")["x"]
    assert steps == sorted(set(steps)) and steps[-1] == 12
    assert data["runs"][0]["superseded"] > 0
    resumed = [each for each in data["events"] if each["kind"] == "resume"]
    assert [each["step"] for each in resumed] == [3] and "superseded" in resumed[0]["text"]


TIMINGS = {
    "type": "timings",
    "step": 9,
    "total": 62.0,
    "training": 44.0,
    "data": 11.0,
    "validation": 4.0,
    "saving": 2.0,
    "hooks": 1.0,
    "forward": 14.0,
    "backward": 20.0,
    "optimizer": 4.0,
    "batches": 500,
    "sampled_batches": 10,
}


def test_where_the_time_went_is_shown_in_parts_that_add_up() -> None:
    data = data_of(written("run", metrics(1, loss=1.0), TIMINGS))
    assert data["timings"] == [
        {
            "run": 0,
            "since": None,
            "total": 62.0,
            "parts": [
                ["forward", 14.0],
                ["backward", 20.0],
                ["optimizer", 4.0],
                ["other training", 6.0],
                ["waiting for data", 11.0],
                ["validation", 4.0],
                ["saving", 2.0],
                ["hooks", 1.0],
            ],
        }
    ]
    assert not any(each["kind"] == "timings" for each in data["events"])


def test_timings_of_a_real_run_are_shown() -> None:
    shown = data_of(whole_run())["timings"][0]
    assert sum(seconds for _, seconds in shown["parts"]) == pytest.approx(shown["total"])


def test_timings_without_samples_or_of_another_version_are_shown_as_far_as_they_go() -> None:
    short = {
        key: None if key in ("forward", "backward", "optimizer", "hooks") else value
        for key, value in TIMINGS.items()
    }
    assert [name for name, _ in data_of(written("run", short))["timings"][0]["parts"]] == [
        "training",
        "waiting for data",
        "validation",
        "saving",
    ]
    assert data_of(written("torn", {**TIMINGS, "total": "long"}))["timings"] == []
    assert data_of(written("odd", {**TIMINGS, "data": -3, "hooks": True}))["timings"][0]["total"] == 62.0


def test_damaged_checkpoints_are_named() -> None:
    path = whole_run()
    broken = next(each for each in (path / "checkpoints").iterdir() if each.name != "last")
    (broken / "manifest.json").write_text("{")
    data = data_of(path)
    assert len(data["checkpoints"]) == 2
    assert [each["text"].split(":")[0] for each in data["events"] if each["kind"] == "damaged"] == [
        f"checkpoint {broken.name}"
    ]


def test_a_run_without_a_log_or_with_an_empty_one_still_has_a_page() -> None:
    path = written("run")
    assert data_of(path)["runs"][0]["status"] == "nothing logged yet"
    (path / "log.jsonl").unlink()
    (path / "run.json").write_text(
        json.dumps({"id": "a", "status": "completed", "reason": "", "step": 5, "limits": {}})
    )
    assert data_of(path)["runs"][0]["step"] == 5


def test_what_is_no_run_is_refused_with_what_may_have_been_meant() -> None:
    written("runs/first", metrics(1, loss=1.0))
    for path, words in (
        ("runs/frist", "does not exist. Did you mean 'first'"),
        ("runs/first/log.jsonl", "is a file; give the"),
        ("runs", "runs below it: runs/first"),
    ):
        with pytest.raises(OptionError, match=words):
            read_run(Path(path))
    Path("runs/first/log.jsonl").write_text('{"level": "info"}\n[1]\n')
    with pytest.raises(OptionError, match="none of Hookline's records"):
        read_run(Path("runs/first"))


def test_odd_records_are_passed_over() -> None:
    odd = [
        {"type": "metrics", "step": "x", "metrics": {"loss": 1.0, "list": [1], "none": None}},
        {"type": "metrics", "metrics": 3},
        {"type": "text"},
        {"type": "image", "path": "\0"},
        {"type": "hyperparams", "params": 1},
        {"type": "cost", "rows": [1]},
        {"type": "resume", "superseded": True},
        {"type": "histogram", "counts": []},
        {"type": 1},
        {"type": "end", "status": ["x"], "reason": {}},
        {"type": "metrics", "time": float("inf"), "step": 1, "metrics": {}},
        {"type": "metrics", "time": float("nan"), "step": 1, "metrics": {}},
        {"type": "metrics", "time": 10**400, "metrics": {}},
    ]
    path = written("run", *odd)
    with (path / "log.jsonl").open("a") as log:  # steps and epochs that are too large
        log.writelines(
            f'{{"type": "{kind}", "step": 1{"0" * 400}, "epoch": 1{"0" * 400}, "metrics": {{"loss": 1}}}}\n'
            for kind in ("metrics", "skip")
        )
    (path / "hangs.log").write_text("2026-13-45 99:00:00 at step 1\n")
    (path / "run.json").write_text(
        json.dumps({"id": 1, "status": "stopped", "reason": 3, "step": "x", "limits": 0, "noted_at": 0})
    )
    (path / "logs").mkdir()
    (path / "logs" / "a.jsonl").write_text(
        '{"type": "exception", "time": "x", "step": []}\n{"type": "exception"\n'
    )
    data = data_of(path)
    assert [(each["name"], each["last_step"]) for each in data["summary"]] == [("loss", 1)]
    assert any("1 histograms" in each for each in data["notes"])


def shown_of(path: Path) -> dict[str, Any]:
    return data_of(path)["runs"][0]


class FailsAt(Hook):
    def __init__(self, batch: int, error: type[Exception] = RuntimeError) -> None:
        self.batch, self.error = batch, error

    def on_train_batch_end(self, batches_seen: int) -> None:
        if batches_seen == self.batch:
            raise self.error("broken")


def test_a_short_run_shows_the_mean_of_its_last_epoch_and_not_an_older_step() -> None:
    trainer = quiet(run_dir="run", logger=True, max_epochs=3, log_every_n_steps=10)
    trainer.fit(Net(), batches(), batches(2))
    train, val = shown_of(Path("run"))["newest"]
    assert (train["name"], train["last"]) == ("train/loss (epoch)", float(trainer.metrics["train/loss"]))
    assert (val["name"], val["last"]) == ("val/loss", float(trainer.metrics["val/loss"]))
    with pytest.raises(RuntimeError):  # in the middle of an epoch a step is newer than the last mean
        quiet(run_dir="cut", logger=True, max_epochs=3, log_every_n_steps=1, hooks=[FailsAt(7)]).fit(
            Net(), batches()
        )
    assert shown_of(Path("cut"))["newest"][0]["name"] == "train/loss"


@pytest.mark.parametrize(
    ("frequency", "every", "name"), [("step", 1, "lr"), ("epoch", 1, "lr"), ("epoch", 10, "lr-SGD")]
)
def test_the_learning_rate_is_there_once(frequency: str, every: int, name: str) -> None:
    hooks = [LRMonitor(frequency=frequency, log_momentum=True)]
    quiet(run_dir="run", logger=True, max_epochs=3, log_every_n_steps=every, hooks=hooks).fit(
        Net(), batches()
    )
    rates = [each["name"] for each in data_of(Path("run"))["summary"] if each["name"].startswith("lr")]
    assert rates == [name, "lr-SGD-momentum"]


def test_a_rate_of_another_group_stays_beside_that_of_the_first() -> None:
    rows = [metrics(step, **{"lr": 0.1, "lr-SGD__pg1": 0.1, "lr-SGD__pg2": 0.2}) for step in (1, 2)]
    assert [each["name"] for each in data_of(written("run", *rows))["summary"]] == [
        "lr-SGD/pg1",
        "lr-SGD/pg2",
    ]
    rows = [metrics(step, **{"lr": 0.1, "lr-Head": 0.3}) for step in (1, 2)]
    assert [each["name"] for each in data_of(written("other", *rows))["summary"]] == ["lr", "lr-Head"]


def test_pipes_in_the_place_of_files_are_not_waited_for() -> None:
    path = written("run", metrics(1, loss=1.0))
    (path / "logs").mkdir()
    for name in ("run.json", "hangs.log", "logs/rank0.jsonl", "trace.json", "control.sock"):
        os.mkfifo(path / name)
    assert curve(data_of(path), "loss")["x"] == [1]


def test_whatever_is_nested_too_deep_is_no_obstacle() -> None:
    deep = '{"a":' * 600 + "1" + "}" * 600
    path = written("run", metrics(1, loss=1.0), after=f'{{"type": "hyperparams", "params": {deep}}}\n')
    (path / "run.json").write_text("[" * 100_000)
    assert [row["key"].count(".") for row in data_of(path)["config"]] == [19]


def test_a_log_that_is_none_is_refused_and_half_a_line_is_not() -> None:
    path = written("run", after='{"type": "met')
    assert data_of(path)["runs"][0]["records"] == 0
    (path / "log.jsonl").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(1000))
    with pytest.raises(OptionError, match="not a log of Hookline"):
        read_run(path)


# ---- a run that is in progress -----------------------------------------------------------------------------


def shown(run: RecordedRun) -> dict[str, Any]:
    return {key: value for key, value in json.loads(json.dumps(page_data([run]))).items() if key != "made"}


def add(path: Path, text: str) -> None:
    with (path / "log.jsonl").open("a") as log:
        log.write(text)


def line(step: int, **values: float) -> str:
    return json.dumps({"time": 1.7e9 + step, **metrics(step, **values)}) + "\n"


def test_what_comes_later_is_added_to_what_is_known() -> None:
    path = written("run", metrics(1, loss=1.0))
    followed = FollowedRun(path)
    assert not followed.refresh()
    for step in range(2, 6):
        add(path, line(step, loss=1.0 / step, lr=0.1))
        add(
            path,
            line(step, val__loss=2.0 / step)
            + json.dumps({"type": "skip", "time": 1.7e9, "step": step, "reason": "nonfinite"})
            + "\n",
        )
        assert followed.refresh()
        assert shown(followed.run) == shown(read_run(path))
    assert not followed.refresh()


def test_only_what_is_new_is_read(monkeypatch: Any) -> None:
    path = written("run", *[metrics(step, loss=1.0) for step in range(1, 50)])
    followed, taken = FollowedRun(path), []
    whole = reader.take
    monkeypatch.setattr(
        reader, "take", lambda run, record: taken.append(record["step"]) or whole(run, record)
    )
    add(path, line(50, loss=1.0) + line(51, loss=1.0))
    followed.refresh()
    assert taken == [50, 51]


def test_half_a_line_waits_for_its_other_half() -> None:
    path = written("run", metrics(1, loss=1.0), after='{"type": "metrics", "time": 1, "st')
    followed = FollowedRun(path)
    assert followed.run.records == 1
    add(path, 'ep": 2, "metrics": {"loss": 7.0}}\n')
    assert followed.refresh() and followed.run.records == 2 and followed.run.series["loss"].values[-1] == 7.0


def test_a_resume_takes_back_what_it_supersedes() -> None:
    hook = SavesFirstEpoch()
    quiet(run_dir="run", logger=True, max_epochs=3, log_every_n_steps=1, hooks=[hook]).fit(Net(), batches())
    followed = FollowedRun(Path("run"))
    assert followed.run.last_step == 12
    quiet(run_dir="run", logger=True, max_epochs=2, log_every_n_steps=1).fit(
        Net(), batches(), resume=hook.path
    )
    assert followed.refresh()
    assert followed.run.last_step == 8 and followed.run.superseded > 0
    assert shown(followed.run) == shown(read_run(Path("run")))


def test_a_log_that_is_written_anew_or_comes_late_is_read_from_its_beginning() -> None:
    path = written("run", metrics(1, loss=1.0), metrics(2, loss=1.0))
    (path / "run.json").write_text('{"id": "a", "status": "training", "step": 1, "reason": "", "limits": {}}')
    followed = FollowedRun(path)
    (path / "log.jsonl").unlink()
    assert followed.refresh() and followed.run.records == 0
    written("run", metrics(9, loss=3.0))
    assert followed.refresh() and followed.run.last_step == 9 and followed.run.records == 1
    written("run", metrics(3, loss=3.0, more=1.0))
    assert followed.refresh() and followed.run.last_step == 3


def test_a_checkpoint_or_an_end_without_a_record_is_noticed() -> None:
    path = written("run", metrics(1, loss=1.0))
    followed = FollowedRun(path)
    (path / "run.json").write_text(
        '{"id": "a", "status": "completed", "step": 1, "reason": "", "limits": {}}'
    )
    assert followed.refresh() and followed.run.record["status"] == "completed"
