"""The events of a run besides its metrics: how it stands, failed or ended, and what is not finite."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from report.reported import curve, data_of, metrics, written
from tiny import Net, batches, quiet

from hookline import Hook
from hookline.cli import main
from hookline.hooks import JSONLog, ModelCheckpoint
from hookline.loggers import CSV, JSONLines, TensorBoard
from hookline.report.reader import read_run
from hookline.report.run_events import position, time_spent
from hookline.report.runs import list_runs
from hookline.report.summary import summarize


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


def test_evaluations_after_a_job_are_no_part_of_its_time() -> None:
    begins, end = {"type": "hyperparams", "params": {}}, {"type": "end", "status": "completed", "step": 2}
    test = {**metrics(2, test_loss=1.0), "over": "evaluation"}
    times = [
        (begins, 0),
        (metrics(1, loss=1.0), 60),
        (end, 61),
        (test, 600),
        (test, 660),
        (begins, 7200),
        (metrics(3, loss=1.0), 7210),
        ({**end, "step": 3}, 7211),
        (test, 9000),
    ]
    path = written("run", *[{**record, "time": 1.7e9 + at} for record, at in times])
    assert time_spent(read_run(path)) == (1.7e9, 61 + 11)


def test_the_summary_of_an_ended_run_is_not_changed_by_what_is_logged_after_its_end() -> None:
    quiet(run_dir="run", logger=True).fit(Net(), batches())
    later = {"type": "hyperparams", "time": time.time() + 60, "params": {"width": 64}}
    with Path("run/log.jsonl").open("a") as file:
        file.write(json.dumps(later) + "\n")
    assert summarize(["run"])["runs"][0]["status"] == list_runs("run").runs[0].status == "completed"


def test_a_finished_run_that_continues_is_not_called_finished() -> None:
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


def test_a_killed_run_is_not_called_training() -> None:
    path = written("run", {**metrics(1, loss=1.0), "time": time.time()})
    with socket.socket(socket.AF_UNIX) as left:
        left.bind("run/control.sock")
        left.listen()
        assert data_of(path)["runs"][0]["status"] == "training"
    assert data_of(path)["runs"][0]["status"] == "killed, or trains on another machine"


@pytest.mark.parametrize(
    ("logger", "why", "advice"),
    [
        ([CSV()], "its loggers are CSV", "logger=[..., JSONLines()]"),
        ([CSV(), TensorBoard()], "its loggers are CSV, TensorBoard:", "JSONLines()"),
        (False, "it has no logger", "JSONLines()"),
        ([CSV(), JSONLines()], "", ""),
    ],
)
def test_a_run_without_a_log_says_which_loggers_replaced_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], logger: Any, why: str, advice: str
) -> None:
    quiet(run_dir=tmp_path, logger=logger, checkpoint={}).fit(Net(), batches(2))
    for command in ("summary", "report"):
        assert main([command, str(tmp_path)]) == 0
        said = capsys.readouterr().out
        assert ("has no log.jsonl" in said) == bool(why)
        assert why in said and advice in said
    assert ("0 records" not in said) and ("no hook was called" not in said)
