"""A running fit goes back to a checkpoint: it is then as a new process that resumes from it, and nothing chooses what it left."""

from __future__ import annotations

import csv
import json
import logging
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hooks.kept import Elsewhere
from ranks.checkpointed import Frozen, Noisy, Record, SaveAt, digest
from ranks.checkpointed import Net as Rich
from tiny import Net, batches, quiet
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from hookline import CheckpointError, Hook, HooklineError, OptionError, Trainer
from hookline.checkpoint.files import read_manifest
from hookline.cli import main
from hookline.hooks import (
    AccumulationSchedule,
    EarlyStopping,
    FreezeSchedule,
    GradientMonitor,
    LRSchedule,
    ModelCheckpoint,
    ParameterSchedule,
    Throughput,
    Timer,
    WeightAveraging,
)
from hookline.loggers import CSV, JSONLines, read_log
from hookline.report.reader import read_run
from hookline.report.run_events import all_events, level


class GoBack(Hook):
    """Goes back once, after so many batches."""

    def __init__(self, at: int, to: Any = None, name: str | None = None, **request: Any) -> None:
        super().__init__(name)
        self.at, self.request, self.asked = at, {"to": to, **request}, 0
        self.loaded: list[tuple[Any, int]] = []

    def on_train_batch_end(self, trainer: Any, batches_seen: int) -> None:
        if batches_seen == self.at and not self.asked:
            self.asked += 1
            trainer.roll_back(**self.request)

    def on_checkpoint_load(self, path: Any, step: int) -> None:
        self.loaded.append((Path(path).name, step))


class Scheduled(Rich):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": StepLR(optimizer, 2), "interval": "step"},
        }


class Again:
    """An iterable of unknown length, read with random numbers."""

    def __iter__(self) -> Iterator[Any]:
        yield from DataLoader(Noisy(24), 4)


class Stateful(Again):
    """The same, with a position of its own."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        samples = DataLoader(Noisy(24, noise=0.0), 4)
        for number, batch in enumerate(samples):
            if number >= self.at:
                self.at = (number + 1) % len(samples)
                yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def shuffled(**options: Any) -> Any:
    return DataLoader(Noisy(24), 4, shuffle=True, **options)


DATA: dict[str, Callable[[], Any]] = {
    "shuffled": shuffled,
    "generator": lambda: shuffled(generator=torch.Generator().manual_seed(7)),
    "workers": lambda: shuffled(num_workers=1, persistent_workers=True),
    "stream": Again,
    "state": Stateful,
    "mixture": lambda: {"a": shuffled(), "b": DataLoader(Noisy(12), 4)},
}


def train(
    run_dir: str,
    *hooks: Any,
    data: str = "shuffled",
    make: type[Rich] = Rich,
    resume: Any = None,
    **options: Any,
) -> dict[str, str]:
    """Train a model with everything that a checkpoint holds, and return a sum of each part of where it ended."""
    torch.manual_seed(3)
    net, record = make(), Record()
    usual = {"max_epochs": 3, "seed": 5, "run_dir": run_dir, "num_sanity_val_steps": 0, "logger": False}
    trainer = Trainer(hooks=[record, *hooks], enable_progress_bar=False, **(usual | options))
    trainer.fit(net, DATA[data](), DataLoader(Noisy(8, noise=0.0), 4), resume=resume)
    return digest(trainer, record)


def averaged() -> list[Any]:
    return [WeightAveraging(decay=0.7, buffers="average"), EarlyStopping(patience=50)]


def scheduled() -> list[Any]:
    return [
        LRSchedule("cosine", total=40, warmup=2),
        FreezeSchedule({"layers.0.*": "8 steps", "head.*": "1 epochs"}),
        GradientMonitor(log_frequency=3),
        Timer("10 hours"),
        ParameterSchedule("optimizer.weight_decay", "linear", start=0.5, end=0.0, total=40),
    ]


def accumulated() -> list[Any]:
    return [AccumulationSchedule({0: 2, 4: 3, "2 epochs": 1}), *averaged()]


CASES: dict[str, tuple[int, int, dict[str, Any], Callable[[], list[Any]]]] = {
    "within an epoch": (3, 5, {}, averaged),
    "over epochs": (4, 15, {"val_check_interval": 2}, averaged),
    "to an epoch's end": (6, 8, {}, averaged),
    "open windows": (4, 11, {"accumulate_grad_batches": 3}, averaged),
    "from an open window": (3, 8, {"accumulate_grad_batches": 3}, averaged),
    "weighted windows": (4, 11, {"accumulate_grad_batches": 3, "accumulate_by": "samples"}, averaged),
    "in the background": (3, 8, {"checkpoint": "async"}, averaged),
    "hooks": (4, 15, {}, scheduled),
    "hooks, one step": (4, 5, {}, scheduled),
    "accumulation, open windows": (5, 11, {}, accumulated),
    "schedulers": (3, 9, {"make": Scheduled}, averaged),
    "nonfinite skip": (3, 9, {"nonfinite": "skip", "gradient_clip_val": 0.5}, averaged),
    "trainable weights": (3, 9, {"make": Frozen, "checkpoint": {"weights": "trainable"}}, averaged),
    **{f"data: {name}": (4, 9, {"data": name}, averaged) for name in DATA},
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_goes_back_is_as_a_new_one_that_resumes(name: str, recwarn: Any) -> None:
    save, back, options, hooks = CASES[name]
    path = f"back/checkpoints/batch-{save}"
    goes = GoBack(back, path, reason="try")
    here = train("back", SaveAt(save), goes, *hooks(), **options)
    there = train("again", SaveAt(), *hooks(), resume=path, **options)
    assert goes.asked == 1 and goes.loaded == [(f"batch-{save}", goes.loaded[0][1])]
    assert here == there


def test_every_part_of_that_comparison_is_sensitive() -> None:
    """Without the state that a rollback clears or restores, the comparison above fails."""
    goes = GoBack(5, "back/checkpoints/batch-3")

    class Disturbs(Hook):
        def on_checkpoint_load(self, module: Any) -> None:
            with torch.no_grad():
                module.gain += 1e-3
            torch.rand(1)

    here = train("back", SaveAt(3), goes, Disturbs(), *averaged())
    there = train("again", SaveAt(), *averaged(), resume="back/checkpoints/batch-3")
    assert [each for each in here if here[each] == there[each]] == ["counters", "random", "scale"]


def test_nothing_of_the_abandoned_steps_is_left(tmp_path: Path) -> None:
    """Gradients, metrics and metric objects are those of a new process."""

    class Sum:
        """A metric by its methods, as torchmetrics has them."""

        def __init__(self) -> None:
            self.total = 0.0

        def update(self, value: float) -> None:
            self.total += value

        def compute(self) -> float:
            return self.total

        def reset(self) -> None:
            self.total = 0.0

    class Logs(Net):
        def __init__(self) -> None:
            super().__init__()
            self.sum = Sum()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx >= 4 and not self.trainer.state.resumed:
                self.log("late", 1.0)
                self.log("late mean", 1.0, on_step=False, on_epoch=True)
            self.sum.update(1.0)
            self.log("sum", self.sum)
            return super().training_step(batch, batch_idx)

    left: list[Any] = []

    class Looks(Hook):
        def on_before_zero_grad(self, module: Any, resumed: bool) -> None:
            if resumed and not left:
                left.append([each.grad for each in module.parameters()])

        def on_checkpoint_load(self, state: Any) -> None:
            left.clear()
            assert state.loss is None

        def on_train_epoch_end(self, metrics: Any) -> None:
            left.append(dict(metrics.items()))

    trainer = quiet(run_dir=tmp_path, hooks=[saves(3), GoBack(6), Looks()], log_every_n_steps=1)
    trainer.fit(Logs(), batches(8))
    assert left[0] == [None, None]
    assert left[1].keys() == {"train/loss", "sum"}
    assert left[1]["sum"] == 5.0  # of the batches after the checkpoint, as in a run that resumes


# ---- which checkpoint -----------------------------------------------------------------------------------------------


def saves(every: int = 2, keep: int = -1, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(every_n_train_steps=every, save_top_k=keep, filename="{step}", **options)


def fit(run_dir: Path, *hooks: Any, data: Any = None, resume: Any = None, **options: Any) -> Trainer:
    torch.manual_seed(1)
    trainer = quiet(run_dir=run_dir, hooks=hooks, **{"max_epochs": 2, **options})
    trainer.fit(Net(), batches(8) if data is None else data, resume=resume)
    return trainer


@pytest.mark.parametrize(
    ("request_", "name", "step"),
    [({}, "step=6", 6), ({"before": 5}, "step=4", 4), ({"to": Path("run/checkpoints/step=2")}, "step=2", 2)],
)
def test_the_newest_checkpoint_is_the_default(
    tmp_path: Path, request_: dict[str, Any], name: str, step: int
) -> None:
    goes = GoBack(7, **request_)
    fit(tmp_path / "run", saves(), goes)
    assert goes.loaded == [(name, step)]


def test_the_best_checkpoint_can_be_asked_for(tmp_path: Path) -> None:
    class Scores(Net):
        def on_train_batch_end(self) -> None:
            self.log("score", float(abs(self.trainer.global_step - 4)))

    goes = GoBack(10, "best")
    keep = ModelCheckpoint("score", every_n_train_steps=1, save_top_k=-1, filename="{step}")
    trainer = quiet(run_dir=tmp_path, hooks=[keep, goes], max_epochs=2)
    trainer.fit(Scores(), batches(8))
    assert goes.loaded == [("step=4", 4)]


class Scored(Net):
    """The first epoch has the best score."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.tensor(1.0 + self.trainer.current_epoch)


@pytest.mark.usefixtures("memory_urls")
@pytest.mark.parametrize("where", ["url", "folder"])
def test_the_best_checkpoint_may_be_outside_of_the_run(tmp_path: Path, where: str) -> None:
    url = ModelCheckpoint("val/loss", dirpath="memory://bucket/kept")
    goes = GoBack(6, "best")
    keep = url if where == "url" else Elsewhere(tmp_path / "kept")
    trainer = quiet(run_dir=tmp_path / "run", hooks=[keep, saves(), goes], max_epochs=4)
    trainer.fit(Scored(), batches(2), batches(1))
    assert [step for _, step in goes.loaded] == [2] and trainer.global_step == 8


def test_the_best_of_another_mode_is_not_gone_back_to(tmp_path: Path) -> None:
    """By the mode that the hook has now, there is no checkpoint yet."""
    quiet(run_dir=tmp_path, hooks=[ModelCheckpoint("val/loss")]).fit(Scored(), batches(2), batches(1))
    goes = GoBack(3, "best", on_missing="continue")
    trainer = quiet(run_dir=tmp_path, hooks=[ModelCheckpoint("val/loss", mode="max"), goes], max_epochs=2)
    trainer.fit(Scored(), batches(2), batches(1), resume="auto")
    assert [step for _, step in goes.loaded] == [2], "only the resume"


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    class Damages(Hook):
        def on_checkpoint_save(self, path: Path, step: int) -> None:
            if step == 6:
                (path / "model.safetensors").write_bytes(b"")

    goes = GoBack(7)
    fit(tmp_path, saves(), goes, Damages())
    assert goes.loaded == [("step=4", 4)]


def test_a_run_without_checkpoints_goes_back_to_the_one_that_it_was_resumed_from(tmp_path: Path) -> None:
    fit(tmp_path / "first", saves(every=3), max_epochs=1)
    goes = GoBack(7)
    fit(tmp_path / "second", goes, resume=tmp_path / "first" / "checkpoints" / "step=6")
    assert goes.loaded == [("step=6", 6), ("step=6", 6)]


def test_without_a_checkpoint_it_raises_or_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(
        CheckpointError, match=r"cannot go back at step 1 \(bad luck\): there is no checkpoint"
    ):
        fit(tmp_path / "raises", saves(), GoBack(1, reason="bad luck"))
    trainer = fit(tmp_path / "continues", saves(), GoBack(3, before=1, on_missing="continue"))
    assert trainer.status == "completed" and trainer.global_step == 16
    assert "no checkpoint of step 1 or before of this run" in caplog.text


def test_weights_that_a_checkpoint_leaves_out_and_that_were_trained_since_are_refused(tmp_path: Path) -> None:
    class Thaws(Hook):
        def on_train_batch_start(self, module: Any, batches_seen: int) -> None:
            if batches_seen == 4:
                module.layers[1].requires_grad_(True)

    class Ready(Frozen):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(CheckpointError, match=r"frozen then and have been trained since \(2, such as layers"):
        train(
            "run",
            SaveAt(3),
            Thaws(),
            GoBack(7, "run/checkpoints/batch-3"),
            make=Ready,
            checkpoint={"weights": "trainable"},
        )


# ---- what was abandoned ---------------------------------------------------------------------------------------------


def test_nothing_chooses_a_checkpoint_of_the_steps_that_were_undone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stops(Hook):
        """Ends the process in effect, right after the rollback."""

        def on_checkpoint_load(self, resumed: bool, trainer: Any) -> None:
            trainer.stop("enough")

    keep = saves()
    fit(tmp_path, keep, GoBack(9, before=5), Stops())
    names = {each.name for each in (tmp_path / "checkpoints").iterdir()}
    assert names == {"step=2", "step=4", "step=6", "step=8", "rollback"}
    manifests = {name: read_manifest(tmp_path / "checkpoints" / name) for name in names}
    assert manifests["rollback"]["step"] == 4
    assert manifests["rollback"]["abandoned"] == [[3, 4]]
    assert manifests["rollback"]["saves"] == 5

    assert main(["checkpoint", "show", str(tmp_path)]) == 0
    shown = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()[1:]}
    assert [each for each in shown if "abandoned" in shown[each]] == [
        "checkpoints/step=8",
        "checkpoints/step=6",
    ]
    assert 'resume="auto"' in shown["checkpoints/rollback"]

    # in another process step 6 of before is not a candidate either
    goes = GoBack(7, before=6)
    second = fit(tmp_path, saves(every=100), goes, resume="auto", max_epochs=3)
    assert goes.loaded == [("rollback", 4), ("rollback", 4)]
    assert second.global_step == 24
    # the restored state is damaged: the next one is older
    (tmp_path / "checkpoints" / "rollback" / "model.safetensors").write_bytes(b"")
    looks = GoBack(-1)
    fit(tmp_path, saves(every=100), looks, resume="auto", max_epochs=4)
    assert looks.loaded == [("step=4", 4)]


def test_the_best_checkpoints_of_abandoned_steps_are_removed_and_not_the_best_any_more(
    tmp_path: Path,
) -> None:
    class Scores(Net):
        def on_train_batch_end(self) -> None:
            self.log("score", 1.0 / (1 + self.trainer.global_step))

    keep = ModelCheckpoint("score", every_n_train_steps=2, save_top_k=2, filename="{step}")
    goes = GoBack(9, before=6)
    present: list[set[str]] = []

    class Looks(Hook):
        def on_train_epoch_start(self, resumed: bool) -> None:
            if resumed and not present:
                present.append({each.name for each in (tmp_path / "checkpoints").iterdir()})
                present.append({Path(each).name for each in keep.best_k_models})
                present.append({Path(keep.best_model_path).name})

    trainer = quiet(run_dir=tmp_path, hooks=[keep, goes, Looks()], max_epochs=2)
    trainer.fit(Scores(), batches(8))
    # 4 was removed when 8 came; 8 is removed when the restored state of 6 is durable
    assert present == [{"step=6", "rollback"}, {"step=6"}, {"step=6"}]
    assert {Path(each).name for each in keep.best_k_models} == {"step=14", "step=16"}


def test_the_last_checkpoint_is_the_restored_state_then_the_end(tmp_path: Path) -> None:
    steps: list[int] = []

    class Looks(Hook):
        def on_checkpoint_save(self, path: Path, step: int, reason: str) -> None:
            steps.append(step)
            assert (path.name, reason) == ("last", "last")

    class Saves(Hook):
        def on_train_batch_end(self, trainer: Any, batches_seen: int) -> None:
            if batches_seen == 3:
                trainer.save_checkpoint("run/checkpoints/last", "last")

    fit(tmp_path / "run", Looks(), Saves(), GoBack(5), checkpoint=True)
    assert steps == [3, 3, 16]  # requested by the hook, restored, ended


# ---- logs, record, report -------------------------------------------------------------------------------------------


def test_rows_of_abandoned_steps_are_superseded_and_the_rollback_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(
        run_dir=tmp_path,
        max_epochs=2,
        log_every_n_steps=1,
        enable_progress_bar=False,
        logger=[JSONLines(), CSV()],
        hooks=[saves(every=3), GoBack(5, reason="try"), GoBack(13, reason="again", name="second")],
    )
    trainer.fit(Net(), batches(8))

    rows = [each for each in read_log(tmp_path) if each["type"] == "metrics" and each.get("over") == "step"]
    assert [each["step"] for each in rows] == [*range(1, 17)]
    everything = list(read_log(tmp_path, superseded=True))
    gone = [each["step"] for each in everything if each.get("superseded") is True and "metrics" in each]
    assert gone == [4, 5, 13]
    with (tmp_path / "metrics.csv").open() as file:
        assert [row["step"] for row in csv.DictReader(file) if row["lr"]] == [str(n) for n in range(1, 17)]
    assert len(list(tmp_path.glob("metrics.superseded-*.csv"))) == 2

    recorded = json.loads((tmp_path / "run.json").read_text())["rollbacks"]
    assert [(each["from_step"], each["step"], each["reason"]) for each in recorded] == [
        (5, 3, "try"),
        (13, 12, "again"),
    ]
    shown = [each for each in all_events(read_run(tmp_path)) if each.kind in ("rollback", "resume")]
    assert [(each.kind, each.step) for each in shown] == [("rollback", 3), ("rollback", 12)]
    assert re.fullmatch(r"from step 5 to .*step=3: try", shown[0].text) and level("rollback") == "warn"
    assert main(["summary", str(tmp_path)]) == 0
    assert "rollbacks    2, the last from step 13 to step 12 (again)" in capsys.readouterr().out


# ---- moments --------------------------------------------------------------------------------------------------------


class At(Hook):
    """Goes back once, at an event."""

    def __init__(self, event: str, **request: Any) -> None:
        self.asked = 0

        def ask(trainer: Any, step: int) -> None:
            if step > 2 and not self.asked:
                self.asked += 1
                trainer.roll_back(**request)

        self.__dict__[event] = ask


@pytest.mark.parametrize(
    "event",
    [
        "on_train_epoch_end",
        "on_train_epoch_start",
        "on_validation_end",
        "on_train_batch_start",
        "on_before_optimizer_step",
    ],
)
def test_a_hook_may_ask_at_any_event(tmp_path: Path, event: str) -> None:
    options = {"max_epochs": 2}
    plain = fit(tmp_path / "plain", saves(), **options)
    torch.manual_seed(1)
    asks = At(event)
    trainer = quiet(run_dir=tmp_path / "back", hooks=[saves(), asks], **options)
    trainer.fit(Net(), batches(8), batches(2))
    assert asks.asked == 1 and trainer.global_step == 16
    assert torch.equal(plain.module.layer.weight, trainer.module.layer.weight)


def test_the_last_step_of_a_run_may_be_undone(tmp_path: Path) -> None:
    trainer = fit(tmp_path, saves(), GoBack(7), max_epochs=-1, max_steps=7)
    assert (trainer.status, trainer.global_step) == ("completed", 7)


def test_a_stop_that_was_requested_stays(tmp_path: Path) -> None:
    class Stops(Hook):
        def on_train_batch_end(self, trainer: Any, batches_seen: int) -> None:
            if batches_seen == 7:
                trainer.stop("enough")

    trainer = fit(tmp_path, saves(), GoBack(7), Stops(), checkpoint=True)
    assert (trainer.status, trainer.global_step) == ("stopped", 6)
    assert read_manifest(tmp_path / "checkpoints" / "last")["step"] == 6


def test_a_signal_saves_the_restored_state(tmp_path: Path) -> None:
    class Ends(Hook):
        def on_train_batch_end(self, batches_seen: int) -> None:
            if batches_seen == 7:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        fit(tmp_path, saves(), GoBack(7), Ends(), checkpoint=True)
    manifest = read_manifest(tmp_path / "checkpoints" / "last")
    assert (manifest["step"], manifest["reason"]) == (6, "signal")
    plain, again = fit(tmp_path / "plain"), fit(tmp_path, saves(), resume="auto")
    assert torch.equal(plain.module.layer.weight, again.module.layer.weight)


def test_requests_for_checkpoints_of_the_abandoned_state_are_dropped(tmp_path: Path) -> None:
    """The checkpoint of step 6 is due at the batch that goes back."""
    goes, seen = GoBack(6), []

    class Looks(Hook):
        def on_checkpoint_save(self, path: Path, step: int) -> None:
            seen.append((path.name, step))

    fit(tmp_path, saves(), goes, Looks())
    assert goes.loaded == [("step=4", 4)]
    assert seen == [
        ("step=2", 2),
        ("step=4", 4),
        ("rollback", 4),
        *((f"step={n}", n) for n in range(6, 17, 2)),
    ]


class Scripted(Net):
    """The score of each epoch is given; that of epoch 0 is the best after the rollback."""

    def __init__(self, *scores: float) -> None:
        super().__init__()
        self.scores = iter(scores)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.tensor(next(self.scores))


@pytest.mark.parametrize("write", ["sync", "async"])
@pytest.mark.parametrize(
    ("scores", "before"),
    [((2.0, 1.0, 9.0, 9.0), "replaced by a better one"), ((2.0, 3.0, 9.0, 9.0), "written after the other")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_best_checkpoint_of_the_state_that_the_run_goes_back_to_is_kept(
    tmp_path: Path, scores: Any, before: str, write: str
) -> None:
    """Two checkpoints of epoch 0 are due together: the one that the run goes back to is written first."""
    each_epoch = ModelCheckpoint(dirpath="epochs", save_top_k=-1)
    best = ModelCheckpoint("val/loss", dirpath="best")
    goes = GoBack(5, tmp_path / "epochs" / "epoch=0-step=2")
    torch.manual_seed(1)
    hooks = [each_epoch, best, goes]
    trainer = quiet(run_dir=tmp_path, hooks=hooks, max_epochs=3, checkpoint={"last": False, "write": write})
    trainer.fit(model := Scripted(*scores), batches(2), batches(1))
    assert goes.loaded == [("epoch=0-step=2", 2)]
    assert (Path(best.best_model_path).name, best.best_model_score) == ("epoch=0-step=2", 2.0)
    assert trainer.load_best(model).source == str(tmp_path / "best" / "epoch=0-step=2")
    assert read_manifest(tmp_path / "best" / "epoch=0-step=2")["step"] == 2


def test_a_checkpoint_that_the_user_requests_has_the_restored_state(tmp_path: Path) -> None:
    class Asks(GoBack):
        def on_train_batch_end(self, trainer: Any, batches_seen: int) -> None:
            if batches_seen == self.at and not self.asked:
                trainer.save_checkpoint(tmp_path / "mine")
            super().on_train_batch_end(trainer, batches_seen)

    fit(tmp_path, saves(), Asks(7))
    assert read_manifest(tmp_path / "mine")["step"] == 6


def test_a_loss_that_is_not_finite_can_be_undone(tmp_path: Path) -> None:
    class Once(Net):
        was_bad = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if self.trainer.global_step == 6 and not self.was_bad:
                self.was_bad = True
                return loss * float("nan")
            return loss

    torch.manual_seed(1)
    trainer = quiet(run_dir=tmp_path / "bad", hooks=[saves(), GoBack(7)], max_epochs=2)
    trainer.fit(Once(), batches(8))
    plain = fit(tmp_path / "plain")
    assert torch.equal(plain.module.layer.weight, trainer.module.layer.weight)


# ---- failures -------------------------------------------------------------------------------------------------------


def test_a_rollback_that_fails_saves_nothing_of_the_half_restored_state(tmp_path: Path) -> None:
    class Refuses(Hook):
        def state_dict(self) -> dict[str, Any]:
            return {"x": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise RuntimeError("not now")

    keep = saves(save_on_exception=True)
    with pytest.raises(RuntimeError, match="not now"):
        fit(tmp_path, keep, Refuses(), GoBack(7), checkpoint=True)
    assert {each.name for each in (tmp_path / "checkpoints").iterdir()} == {"step=2", "step=4", "step=6"}
    plain, again = fit(tmp_path / "plain"), fit(tmp_path, saves(), resume="auto")
    assert torch.equal(plain.module.layer.weight, again.module.layer.weight)


def test_what_cannot_be_done_is_refused_when_it_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(HooklineError, match="works in a fit that is training"):
        quiet().roll_back()
    with pytest.raises(HooklineError, match="works in a fit that is training"):
        fit(tmp_path / "end", At("on_train_end"))
    for wrong, text in (
        ({"to": 3}, "roll_back"),
        ({"before": -1}, "before=-1"),
        ({"to": "best", "before": 2}, "leave out to="),
        ({"on_missing": "stop"}, "on_missing='stop', allowed: 'raise', 'continue'"),
        ({"reason": None}, "the reason is text"),
    ):
        with pytest.raises(OptionError, match=text):
            fit(tmp_path / "wrong", GoBack(1, **wrong))
    with pytest.raises(HooklineError, match=r"loader 'train' is an iterator \(generator\)"):
        fit(tmp_path / "once", GoBack(1), data=(each for each in batches(8)))


def test_rates_after_a_rollback_are_those_of_the_steps_since(tmp_path: Path) -> None:
    rates: list[float] = []

    class Looks(Hook):
        def on_step_end(self, state: Any) -> None:
            rates.append(state.metrics.raw().get("throughput/samples_per_sec", 1.0))

    fit(tmp_path, saves(every=6), GoBack(15, before=6), Throughput(every=1, window=20), Looks())
    assert len(rates) == 25 and min(rates) > 0


def test_a_timer_counts_the_time_that_has_passed_once(tmp_path: Path) -> None:
    timer, began = Timer(), time.monotonic()
    fit(tmp_path, saves(), GoBack(7), timer)
    assert 0 < timer.time_elapsed("train") <= time.monotonic() - began


def test_it_says_what_it_did(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        fit(tmp_path, saves(), GoBack(7, reason="the loss was odd"))
    assert re.search(r"Went back from step 7 to step 6 \(.*step=6\): the loss was odd\.", caplog.text)
