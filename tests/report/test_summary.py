"""A summary says how a run went, and of several runs what made the difference."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from report.reported import data_of, trained
from tiny import quiet

from hookline import Hook, OptionError
from hookline.cli import main
from hookline.hooks import EarlyStopping, HParams, ModelCheckpoint
from hookline.report.progress import RULES
from hookline.report.summary import summarize
from hookline.testing import TinyModule, tiny_batches


def about(*runs: Path | str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = summarize(list(runs))["runs"]
    return found


def of(data: dict[str, Any], name: str, over: str = "epoch") -> dict[str, Any]:
    return next(each for each in data["metrics"] if (each["name"], each["over"]) == (name, over))


# ---- one run -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("audit", [False, True])
def test_a_finished_run_that_is_started_again_keeps_its_costs(audit: bool) -> None:
    path = trained("a", hooks=[ModelCheckpoint(monitor="val/loss")], checkpoint=True, audit=audit)
    before, page = about(path)[0]["cost"]["hooks"], data_of(path)
    trainer = quiet(
        run_dir=path, logger=True, max_epochs=2, hooks=[ModelCheckpoint(monitor="val/loss")], audit=audit
    )
    trainer.fit(TinyModule(0.1), tiny_batches(), tiny_batches(seed=1), resume="auto")
    assert trainer.state.step == 8
    assert "on_validation_end" in {row["event"] for row in before}
    assert about(path)[0]["cost"]["hooks"] == before
    assert data_of(path)["changes"] == page["changes"]


def test_runs_that_differ_in_an_argument_of_a_hook_without_an_attribute_of_its_name() -> None:
    class Later(EarlyStopping):
        """With an `__init__` of its own."""

        def __init__(self, after: int, **options: Any) -> None:
            super().__init__(**options)
            self.after = after

    def hooks(delta: float, every: int) -> list[Any]:
        return [
            EarlyStopping(monitor="val/loss", min_delta=delta, name="stopping"),
            Later(every, mode="min" if delta else "max"),
            ModelCheckpoint(every_n_train_steps=every, dirpath=Path("kept")),
        ]

    paths = [trained(name, hooks=hooks(*given)) for name, *given in (("a", 0.0, 2), ("b", 0.5, 3))]
    found = {each["key"]: each["values"] for each in summarize(list(paths))["differences"]}
    assert found["hooks.stopping.min_delta"] == [0.0, 0.5] and found["hooks.later.mode"] == ["max", "min"]
    assert found["hooks.model_checkpoint.every_n_train_steps"] == found["hooks.later.after"] == [2, 3]
    params = json.loads((paths[0] / "run.json").read_text())["hooks"]
    assert params["stopping"]["params"]["monitor"] == "val/loss"
    assert params["model_checkpoint"]["params"]["dirpath"] == "kept"


def test_an_argument_that_was_changed_after_the_hook_was_made_has_its_present_value() -> None:
    stopping = EarlyStopping(patience=3)
    stopping.patience = 7
    path = trained("a", hooks=[stopping])
    assert json.loads((path / "run.json").read_text())["hooks"]["early_stopping"]["params"]["patience"] == 7


def test_a_summary_has_everything_about_a_run() -> None:
    path = trained("a", epochs=5, hooks=[ModelCheckpoint(monitor="val/loss")], checkpoint=True)
    data = json.loads(json.dumps(summarize([path])))
    assert data["version"] == 1 and data["rules"] == RULES and data["differences"] == []
    (run,) = data["runs"]
    assert (run["name"], run["status"], run["is_certain"], run["step"], run["epochs"]) == (
        "a",
        "completed",
        True,
        20,
        5,
    )
    assert run["seconds"] > 0 and run["started_at"] <= run["ended_at"] and len(run["sessions"]) == 1
    val = of(run, "val/loss")
    assert (val["count"], val["direction"], val["direction_from"]) == (5, "lower", "monitor")
    assert run["best"] == {
        "metric": "val/loss",
        "value": val["best"]["value"],
        "direction": "lower",
        "step": val["best"]["step"],
    }
    assert of(run, "lr", "step")["direction"] is None and of(run, "lr", "step")["highest"]["value"] == 0.1
    assert {each["hook"] for each in run["cost"]["hooks"]} == {"model_checkpoint"}
    assert run["checkpoint_count"] == len(run["checkpoints"]) == 2 and run["bytes"] > 1000
    assert run["settings"]["module.lr"] == 0.1 and run["settings"]["optimizers.0.groups.0.lr"] == 0.1
    assert (
        run["settings"]["hooks.model_checkpoint.monitor"] == "val/loss"
        and run["settings"]["trainer.max_epochs"] == 5
    )
    assert {"command", "git", "versions", "machine"} <= run.keys()


def test_a_failed_and_an_interrupted_run_say_how_they_ended(capsys: pytest.CaptureFixture[str]) -> None:
    class Ends(Hook):
        def __init__(self, error: BaseException | None) -> None:
            super().__init__()
            self.error = error

        def on_step_end(self, step: int) -> None:
            if step == 3 and self.error is not None:
                raise self.error
            if step == 3:
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(ValueError, match="on purpose"):
        trained("failed", hooks=[Ends(ValueError("on purpose"))])
    with pytest.raises(KeyboardInterrupt):
        trained("interrupted", hooks=[Ends(None)])
    failed, interrupted = about("runs/failed", "runs/interrupted")
    assert (failed["status"], failed["step"], failed["error"]) == (
        "failed",
        3,
        {"type": "ValueError", "message": "on purpose"},
    )
    assert (interrupted["status"], interrupted["error"]) == ("interrupted", None)
    assert main(["summary", "runs/failed"]) == 0
    shown = capsys.readouterr().out
    assert "error        ValueError: on purpose" in shown
    assert "status       failed (hook 'ends' in on_step_end), step 3" in shown


def test_a_stop_says_why() -> None:
    path = trained("a", epochs=50, lr=0.3, hooks=[EarlyStopping("val/loss", patience=1)])
    (run,) = about(path)
    assert run["status"] == "stopped" and "val/loss did not improve" in run["reason"]


def test_a_resumed_run_is_one_run_of_several_sessions(capsys: pytest.CaptureFixture[str]) -> None:
    for epochs in (1, 2):
        trainer = quiet(logger=True, run_dir="run", max_epochs=epochs, hooks=[ModelCheckpoint()])
        trainer.fit(TinyModule(), tiny_batches(), resume="auto")
    (run,) = about("run")
    assert len(run["sessions"]) == 2 and of(run, "train/loss")["count"] == 2
    assert main(["summary", "run"]) == 0
    assert "2 sessions" in capsys.readouterr().out


def test_where_the_time_went_is_read_from_the_log_or_the_record() -> None:
    path = trained("a")
    measured = about(path)[0]["cost"]["time"]
    assert measured["step"] == 8 and 0 < measured["training"] < measured["total"]
    with (path / "log.jsonl").open("a") as file:
        file.write(json.dumps({"type": "timings", "time": 1.0, "step": 8, "total": 2.0, "data": 0.5}) + "\n")
    assert about(path)[0]["cost"]["time"] == {"step": 8, "total": 2.0, "data": 0.5}
    record = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**record, "time": {"total": 3.0}}))
    assert about(path)[0]["cost"]["time"] == {"total": 3.0}
    assert main(["summary", str(path)]) == 0


@pytest.mark.parametrize("has_record", [True, False])
def test_a_run_that_began_anew_in_a_directory_has_its_own_time(has_record: bool) -> None:
    path = trained("a")
    log = path / "log.jsonl"
    old = [json.loads(line) for line in log.read_text().splitlines()]
    log.write_text(
        "".join(
            json.dumps({**each, "time": each["time"] - 5000 + 10 * number}) + "\n"
            for number, each in enumerate(old)
        )
    )
    trained("a")
    if not has_record:
        (path / "run.json").unlink()
    (run,) = about(path)
    page = data_of(path)["runs"][0]
    assert run["seconds"] < 1000 and page["pauses"] == "" and "min" not in page["took"]
    assert page["began"] > old[0]["time"] - 1 and page["ended"] - page["began"] < 1000


def test_a_run_that_logs_nothing_in_the_directory_of_another_has_its_own_time() -> None:
    path = trained("a")
    log = path / "log.jsonl"
    old = [json.loads(line) for line in log.read_text().splitlines()]
    log.write_text(
        "".join(
            json.dumps({**each, "time": each["time"] - 5000 + 10 * number}) + "\n"
            for number, each in enumerate(old)
        )
    )
    quiet(run_dir=path, hooks=[ModelCheckpoint()]).fit(TinyModule(), tiny_batches())
    (run,) = about(path)
    assert run["seconds"] < 1000 and data_of(path)["runs"][0]["began"] > old[0]["time"] - 1


def test_a_run_of_an_older_version_is_summarized_from_its_log() -> None:
    path = trained("a", hooks=[HParams({"width": 3})])
    (path / "run.json").unlink()
    (run,) = about(path)
    assert (run["status"], run["step"], run["id"], run["command"]) == ("completed", 8, None, None)
    assert (
        run["settings"]["trainer.max_epochs"] == 2
        and run["settings"]["logged.width"] == 3
        and run["settings"]["module.class"] == "TinyModule"
    )


def test_a_run_with_a_record_and_no_log() -> None:
    quiet(run_dir="run", hooks=[ModelCheckpoint(monitor="train/loss")]).fit(TinyModule(), tiny_batches())
    (run,) = about("run")
    assert run["metrics"] == [] and run["best"]["metric"] == "train/loss" and run["best"]["step"] is None
    assert main(["summary", "run"]) == 0


def test_nothing_is_written(tmp_path: Path) -> None:
    path = trained("a", hooks=[ModelCheckpoint()])
    before = {each: each.stat().st_mtime_ns for each in path.rglob("*")}
    assert main(["summary", str(path)]) == 0 and main(["runs"]) == 0
    assert {each: each.stat().st_mtime_ns for each in path.rglob("*")} == before


# ---- several runs ------------------------------------------------------------------------------------------------


def test_a_batch_size_is_a_setting_that_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    inputs, targets = (torch.cat([each[part] for each in tiny_batches()]) for part in (0, 1))
    data = torch.utils.data.TensorDataset(inputs, targets)
    for name, lr, size in (("a", 0.01, 2), ("b", 0.05, 2), ("c", 0.01, 4)):
        loaders = [
            torch.utils.data.DataLoader(data, batch_size=size, shuffle=shuffle) for shuffle in (True, False)
        ]
        quiet(logger=True, run_dir=f"runs/{name}").fit(TinyModule(lr), *loaders)
    found = summarize(["runs/a", "runs/b", "runs/c"])
    assert [(each["key"], each["values"]) for each in found["differences"]] == [
        ("module.lr", [0.01, 0.05, 0.01]),
        ("data.train.batch_size", [2, 2, 4]),
    ]
    assert main(["summary", "a", "b", "c"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split()[-2:] == ["lr", "batch_size"]


def test_a_loader_of_another_length_is_a_difference() -> None:
    for name, count in (("a", 2), ("b", 3)):
        quiet(logger=True, run_dir=f"runs/{name}").fit(TinyModule(), tiny_batches()[:count])
    assert {"key": "data.train.batches", "values": [2, 3]} in summarize(["runs/a", "runs/b"])["differences"]


def test_a_hook_that_one_run_has_is_one_difference() -> None:
    first, second = trained("a"), trained("b", hooks=[ModelCheckpoint(monitor="val/loss")])
    (found,) = summarize([first, second])["differences"]
    assert found["key"] == "hooks.model_checkpoint.class" and found["values"][0] is None
    assert main(["summary", str(first), str(second)]) == 0


def test_what_is_no_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    path = trained("a")
    with pytest.raises(OptionError, match="named twice"):
        summarize([path, path])
    with pytest.raises(OptionError, match="needs the directory"):
        summarize([])
    assert main(["summary", "runs"]) == 2
    assert "There are runs below it: runs/a" in capsys.readouterr().err
    assert main(["summary", "nothing"]) == 2


def test_an_unknown_metric_direction_shows_both_ends() -> None:
    class Logs(Hook):
        def on_step_end(self, step: int, logger: Any) -> None:
            logger.add_scalar("mystery", float(step), step)

    path = trained("a", hooks=[Logs()])
    found = next(each for each in about(path)[0]["metrics"] if each["name"] == "mystery")
    assert (found["best"], found["lowest"]["value"], found["highest"]["value"]) == (None, 1.0, 8.0)
    assert found["trend"] in ("rising", "flat")
