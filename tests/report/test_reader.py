"""Whatever state a run's directory is in, what is there is told, and what is no run is refused in words."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from report.reported import curve, data_of, metrics, whole_run, written
from tiny import Net, batches, quiet

from hookline import Hook
from hookline.hooks import JSONLog, LRMonitor, ModelCheckpoint
from hookline.loggers import read_log
from hookline.report.reader import read_run
from hookline.report.run_events import position
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


def test_a_value_that_is_not_finite_is_an_event_and_counted_not_drawn() -> None:
    path = written(
        "run", metrics(1, loss=2.0), metrics(2, loss="nan"), metrics(3, loss="inf"), metrics(4, loss=1.0)
    )
    data = data_of(path)
    assert curve(data, "loss")["x"] == [1, 4]
    assert data["summary"][0]["bad"] == 2
    assert [(each["step"], each["level"]) for each in data["events"] if each["kind"] == "not finite"] == [
        (2, "bad")
    ]


def test_layers_that_explode_together_are_one_event() -> None:
    many = {f"grad_norm__layer{index}": "inf" for index in range(30)}
    found = [
        each["text"]
        for each in data_of(written("run", metrics(1, **many)))["events"]
        if each["kind"] == "not finite"
    ]
    assert found == ["grad_norm of 30 layers, such as grad_norm/layer0"]


def test_events_of_all_sources_are_told() -> None:
    path = written(
        "run",
        metrics(1, loss=1.0),
        {"type": "text", "tag": "mixture", "text": "web 0.5", "step": 1},
        {"type": "skip", "step": 2, "reason": "no loss"},
    )
    (path / "hangs.log").write_text(
        "2026-01-02 03:04:05 The run has not moved, at epoch 0 step 7.\n  File x\n\n"
    )
    (path / "run.json").write_text(
        json.dumps(
            {
                "id": "a",
                "status": "stopped",
                "reason": "patience",
                "step": 9,
                "limits": {},
                "noted_at": "2026-01-02T04:00:00+00:00",
            }
        )
    )
    kinds = {each["kind"]: (each["step"], each["level"], each["text"]) for each in data_of(path)["events"]}
    assert kinds["mixture"] == (1, "info", "web 0.5")
    assert kinds["skip"] == (2, "warn", "no loss")
    assert kinds["hang"][:2] == (7, "bad")
    assert kinds["stop"] == (9, "warn", "stopped: patience")


def test_a_failure_that_json_log_wrote_is_told() -> None:
    class Failing(Net):
        def training_step(self, batch: object, batch_idx: int) -> object:
            if batch_idx == 2:
                raise ValueError("a bad batch")
            return super().training_step(batch, batch_idx)

    with pytest.raises(ValueError, match="a bad batch"):
        quiet(run_dir="run", logger=True, log_every_n_steps=1, hooks=[JSONLog()]).fit(Failing(), batches())
    failures = [each for each in data_of(Path("run"))["events"] if each["level"] == "bad"]
    assert [(each["step"], each["text"]) for each in failures] == [(2, "ValueError: a bad batch")]


def test_what_failed_was_skipped_cost_or_was_asked_for_from_outside_is_read_from_the_log_alone() -> None:
    class Fails(Hook):
        def on_step_end(self, step: int) -> None:
            if step == 3:
                raise RuntimeError("on purpose")

    class Skips(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="on purpose"):
        quiet(run_dir="run", logger=True, max_epochs=2, hooks=[Fails()]).fit(Skips(), batches())
    with Path("run/log.jsonl").open("a") as log:
        log.write(
            '{"type": "control", "time": 1.7e9, "command": "every", "hook": "fails", "interval": "5 steps", "step": 2}\n'
        )
        log.write(
            '{"type": "control", "time": 1.7e9, "command": "attach", "step": 2, "error": "no such file"}\n'
        )
    data = data_of(Path("run"))
    told = [(each["kind"], each["level"], each["text"]) for each in data["events"]]
    assert ("failure", "bad", "hook 'fails' in on_step_end: RuntimeError: on purpose") in told
    assert ("skip", "warn", "no_loss, batch 1") in told
    assert ("control", "info", "every fails 5 steps") in told and (
        "control",
        "info",
        "attach: no such file",
    ) in told
    assert [(row["hook"], row["event"], row["calls"]) for row in data["cost"][0]["rows"]] == [
        ("fails", "on_step_end", 3)
    ]


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


def test_how_a_run_stands_is_said() -> None:
    def said(status: str | None, at: float) -> str:
        path = written("run", {**metrics(1, loss=1.0), "time": at})
        (path / "run.json").unlink(missing_ok=True)
        if status:
            (path / "run.json").write_text(
                json.dumps({"id": "a", "status": status, "reason": "", "step": 1, "limits": {}})
            )
        return str(data_of(path)["runs"][0]["status"])

    now = time.time()
    assert said("completed", now) == "completed"
    assert said("training", now) == "training"
    assert said("training", now - 7200).startswith("unfinished, silent for 2 h")
    assert said(None, now) == "running, or just ended"
    assert said(None, now - 7200).startswith("last record 2 h")


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
    with pytest.raises(OptionError, match="none that Hookline wrote"):
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
    with (path / "log.jsonl").open("a") as log:  # steps and epochs that nobody can count to
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


class Fails(Hook):
    def on_step_end(self, step: int) -> None:
        if step == 5:
            raise RuntimeError("on purpose")


def failed_run() -> Path:
    """Saved at step 3, failed at step 5."""
    checkpoint = ModelCheckpoint(every_n_train_steps=3)
    with pytest.raises(RuntimeError, match="on purpose"):
        quiet(run_dir="run", logger=True, max_epochs=2, log_every_n_steps=1, hooks=[checkpoint, Fails()]).fit(
            Net(), batches()
        )
    return Path("run")


def test_a_failure_is_told_also_after_the_run_was_resumed_from_before_it() -> None:
    path = failed_run()
    assert data_of(path)["runs"][0]["status"] == "failed"
    trainer = quiet(run_dir="run", logger=True, max_epochs=2, log_every_n_steps=1)
    trainer.fit(Net(), batches(), resume="auto")
    data = data_of(path)
    told = [
        (each["kind"], each["step"])
        for each in data["events"]
        if each["kind"] in ("failure", "resume", "end")
    ]
    assert told == [("failure", 5), ("resume", 3), ("end", 8)]
    assert curve(data, "train/loss")["x"] == list(range(1, 9))
    assert data["runs"][0]["status"] == "completed"


def test_a_run_without_a_checkpoint_says_how_it_ended_too() -> None:
    quiet(run_dir="run", logger=True).fit(Net(), batches())
    Path("run/run.json").unlink()  # as a run of an older version
    data = data_of(Path("run"))
    assert (data["runs"][0]["status"], data["runs"][0]["mood"]) == ("completed", "good")
    assert [each["step"] for each in data["events"] if each["kind"] == "end"] == [4]


def test_a_failed_run_has_one_event_of_its_failure() -> None:
    events = data_of(failed_run())["events"]
    assert [(each["text"], each["step"]) for each in events if each["level"] == "bad"] == [
        ("hook 'fails' in on_step_end: RuntimeError: on purpose", 5)
    ]


def test_who_failed_is_told_however_long_the_message_is() -> None:
    failure = {
        "type": "failure",
        "step": 5,
        "exception": "ValueError",
        "message": "x" * 500,
        "who": "hook 'fails'",
        "event": "on_step_end",
        "rank": 3,
    }
    events = data_of(written("run", metrics(1, loss=1.0), failure))["events"]
    told = next(each["text"] for each in events if each["kind"] == "failure")
    assert told.startswith("on rank 3: hook 'fails' in on_step_end: ValueError: xxx")


def test_a_run_lasted_as_long_as_its_jobs_and_pauses_are_told_apart() -> None:
    begins, resume = {"type": "hyperparams", "params": {}}, {"type": "resume", "step": 2, "checkpoint": "x"}
    times = [
        (begins, 0),
        (metrics(1, loss=1.0), 60),
        (metrics(2, loss=1.0), 120),
        (begins, 7200),
        (resume, 7201),
        (metrics(3, loss=1.0), 7261),
    ]
    about = data_of(written("run", *[{**record, "time": 1.7e9 + at} for record, at in times]))["runs"][0]
    assert (about["took"], about["pauses"]) == ("3 min 1 s", "1 h 58 min")
    about = data_of(written("other", *[{**record, "time": 1.7e9 + at} for record, at in times[:3]]))["runs"][
        0
    ]
    assert (about["took"], about["pauses"]) == ("2 min", "")


def test_a_finished_run_that_goes_on_is_not_called_finished() -> None:
    path = written(
        "run",
        {"type": "hyperparams", "time": time.time(), "params": {}},
        {**metrics(1, loss=1.0), "time": time.time()},
    )
    (path / "run.json").write_text(
        json.dumps(
            {
                "id": "a",
                "status": "completed",
                "reason": "",
                "step": 1,
                "limits": {},
                "noted_at": "2026-01-02T04:00:00+00:00",
            }
        )
    )
    assert data_of(path)["runs"][0]["status"] == "training"


def shown_of(path: Path) -> dict[str, Any]:
    return data_of(path)["runs"][0]


class FailsAt(Hook):
    def __init__(self, batch: int, error: type[Exception] = RuntimeError) -> None:
        self.batch, self.error = batch, error

    def on_train_batch_end(self, batches_seen: int) -> None:
        if batches_seen == self.batch:
            raise self.error("broken")


def test_the_same_five_epochs_are_shown_the_same_whatever_else_the_run_has_left() -> None:
    for name, hooks in (("plain", []), ("saved", [ModelCheckpoint()])):
        quiet(run_dir=name, logger=True, max_epochs=5, hooks=hooks).fit(Net(), batches())
        assert (shown_of(Path(name))["step"], shown_of(Path(name))["epochs"]) == (20, 5)
        assert str(position(read_run(Path(name)))) == "step 20, 5 epochs"
    log = Path("plain/log.jsonl")
    log.write_text(
        "".join(line for line in log.read_text().splitlines(keepends=True) if '"type": "end"' not in line)
    )  # as if killed
    assert str(position(read_run(Path("plain")))) == "step 20, 5 epochs"


@pytest.mark.parametrize("hooks", [[], [ModelCheckpoint()]], ids=["plain", "saved"])
def test_a_failed_run_is_shown_where_it_was(hooks: list[Hook]) -> None:
    with pytest.raises(RuntimeError):
        quiet(run_dir="run", logger=True, max_epochs=5, hooks=[*hooks, FailsAt(10)]).fit(Net(), batches())
    shown = shown_of(Path("run"))
    assert (shown["status"], shown["mood"], shown["step"], shown["epochs"], shown["is_inside"]) == (
        "failed",
        "bad",
        10,
        2,
        True,
    )
    assert shown["reason"] == "hook 'fails_at' in on_train_batch_end: RuntimeError: broken"
    assert str(position(read_run(Path("run")))) == "step 10, 2 epochs and part of the next"


def test_an_epoch_that_was_broken_off_is_not_counted() -> None:
    quiet(run_dir="run", logger=True, max_epochs=5, max_steps=10).fit(Net(), batches())
    assert str(position(read_run(Path("run")))) == "step 10, 2 epochs and part of the next"
    with pytest.raises(RuntimeError):
        quiet(run_dir="early", logger=True, max_epochs=5, hooks=[FailsAt(1)]).fit(Net(), batches())
    assert str(position(read_run(Path("early")))) == "step 1, in the first epoch"


def test_a_resumed_run_is_shown_where_it_is_now_and_not_where_the_one_before_it_ended() -> None:
    quiet(run_dir="run", logger=True, max_epochs=4, hooks=[ModelCheckpoint(save_top_k=-1)]).fit(
        Net(), batches()
    )
    first = min(
        Path("run/checkpoints").iterdir(),
        key=lambda each: json.loads((each / "manifest.json").read_text())["step"],
    )
    with pytest.raises(RuntimeError):
        quiet(run_dir="run", logger=True, max_epochs=4, hooks=[FailsAt(6)]).fit(
            Net(), batches(), resume=first
        )
    record = json.loads(Path("run/run.json").read_text())
    Path("run/run.json").write_text(
        json.dumps({**record, "noted_at": "2026-01-02T04:00:00+00:00"})
    )  # the first job's, long ago
    assert str(position(read_run(Path("run")))) == "step 6, 1 epoch and part of the next"


def test_a_log_of_an_older_version_says_in_which_epoch_it_ended() -> None:
    for said, epochs in (("completed", 5), ("error", 4)):
        path = written(
            said,
            {**metrics(20, loss=1.0), "epoch": 4},
            {"type": "end", "step": 20, "epoch": 4, "status": said},
        )
        assert position(read_run(path)).epochs == epochs


def test_a_run_that_a_search_has_pruned_has_not_failed() -> None:
    class TrialPruned(Exception):  # as Optuna calls it
        pass

    with pytest.raises(TrialPruned) as ended:
        quiet(run_dir="run", logger=True, max_epochs=5, hooks=[FailsAt(10, TrialPruned), JSONLog()]).fit(
            Net(), batches()
        )
    assert ended.value.__notes__[-1].startswith(
        "Pruned: TrialPruned: broken, in hook 'fails_at', on_train_batch_end, "
    )
    data = data_of(Path("run"))
    assert (data["runs"][0]["status"], data["runs"][0]["mood"]) == ("pruned", "warn")
    assert [
        (each["kind"], each["level"], each["step"]) for each in data["events"] if each["level"] != "info"
    ] == [("pruned", "warn", 10)]


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


def test_a_killed_run_is_not_called_training() -> None:
    path = written("run", {**metrics(1, loss=1.0), "time": time.time()})
    with socket.socket(socket.AF_UNIX) as left:
        left.bind("run/control.sock")
        left.listen()
        assert data_of(path)["runs"][0]["status"] == "training"
    assert data_of(path)["runs"][0]["status"] == "killed, or trains on another machine"


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
