"""`checkpoints/last`: a fit keeps it, and a run that is started again has exactly that state."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet
from torch import Tensor

from hookline import Hook, NonFiniteLoss, Trainer, load_weights
from hookline.checkpoint.catalog import find_checkpoints
from hookline.checkpoint.files import read, read_manifest
from hookline.hooks.model_checkpoint import ModelCheckpoint
from hookline.hooks.weight_averaging import WeightAveraging
from hookline.util.errors import CheckpointError, Preempted


class Momentum(Net):
    """With an optimizer that has state."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def train(
    run_dir: Path | str,
    *hooks: Any,
    seed: int = 1,
    every: int = 5,
    resume: Any = "auto",
    val: Any = None,
    **options: Any,
) -> Trainer:
    torch.manual_seed(seed)
    net = Momentum()
    keep = [ModelCheckpoint(every_n_train_steps=every)] if every else []
    trainer = quiet(
        run_dir=run_dir, hooks=[*keep, *hooks], **{"max_epochs": 1, "checkpoint": True, **options}
    )
    trainer.fit(net, batches(8), val, resume=resume)
    return trainer


def state_of(trainer: Trainer) -> dict[str, Any]:
    """Everything that a user can see of where a run is, copied."""
    s = trainer.state
    assert trainer.module is not None
    return {
        "module": {name: each.clone() for name, each in trainer.module.state_dict().items()},
        "optimizers": [_copy(each.state_dict()) for each in s.optimizers],
        "counters": [s.step, s.epoch, s.epochs_seen, s.batches_seen, s.samples_seen],
        "metrics": dict(trainer.metrics.items()),
        "status": trainer.status,
    }


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copy(each) for key, each in value.items()}
    return [_copy(each) for each in value] if isinstance(value, list | tuple) else value


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return bool(torch.equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def names(run_dir: Path) -> list[str]:
    return sorted(each.name for each in (run_dir / "checkpoints").iterdir())


class StopsAt(Hook):
    def __init__(self, step: int) -> None:
        self.at = step

    def on_step_end(self, step: int, trainer: Any) -> None:
        if step == self.at:
            trainer.stop("enough")


ENDINGS: dict[str, dict[str, Any]] = {
    "completed": {},
    "max_steps": {"max_steps": 7, "max_epochs": -1},
    "stopped": {"hooks": (StopsAt(7),)},
    "async": {"checkpoint": "async"},
    "max_time": {"max_epochs": -1, "max_time": 0.3},
    "validated": {"val": batches(2), "hooks": (StopsAt(7),)},
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_run_that_is_over_is_started_again_with_exactly_its_last_state(tmp_path: Path, ending: str) -> None:
    options = dict(ENDINGS[ending])
    hooks = options.pop("hooks", ())
    first = train(tmp_path, *hooks, **options)
    left = state_of(first)
    again = train(tmp_path, *hooks, seed=2, **options)
    assert same(state_of(again), left), (state_of(again), left)
    torch.manual_seed(3)
    other = Momentum()
    load_weights(other, tmp_path)
    assert same(dict(other.state_dict()), left["module"])
    tests = batches(2)
    assert first.test(loaders=tests) == again.test(loaders=tests)


def test_the_last_state_is_called_last_and_says_why_it_is_there(tmp_path: Path) -> None:
    heard: list[Any] = []

    class Listens(Hook):
        def on_checkpoint_save(self, path: Any, reason: str, step: int, status: str) -> None:
            heard.append((Path(path).name, reason, step, status))

    train(tmp_path, Listens())
    assert names(tmp_path) == ["epoch=0-step=5", "last"]
    assert heard == [("epoch=0-step=5", "interval", 5, "training"), ("last", "last", 8, "completed")]
    manifest = read_manifest(tmp_path / "checkpoints" / "last")
    assert (manifest["step"], manifest["epochs_seen"], manifest["status"], manifest["reason"]) == (
        8,
        1,
        "completed",
        "last",
    )


@pytest.mark.parametrize(
    "hook",
    [
        lambda: ModelCheckpoint(),
        lambda: ModelCheckpoint(every_n_train_steps=5, save_last=True),
        lambda: ModelCheckpoint("train/loss"),
    ],
    ids=["at the epoch's end", "save_last", "monitor"],
)
def test_the_last_state_is_called_last_whatever_hooks_keep(tmp_path: Path, hook: Callable[[], Any]) -> None:
    trainer = train(tmp_path, hook(), every=0)
    assert read_manifest(tmp_path / "checkpoints" / "last")["step"] == 8
    left = state_of(trainer)
    assert same(state_of(train(tmp_path, hook(), every=0, seed=2)), left)


def test_save_last_of_a_hook_is_not_written_a_second_time(tmp_path: Path) -> None:
    heard: list[Any] = []

    class Listens(Hook):
        def on_checkpoint_save(self, path: Any, step: int) -> None:
            heard.append((Path(path).name, step))

    train(tmp_path, Listens(), ModelCheckpoint(save_last=True, save_top_k=0), every=0)
    assert heard == [("last", 8)]


def test_a_run_without_hooks_keeps_its_model(tmp_path: Path) -> None:
    trainer = train(tmp_path, every=0)
    assert names(tmp_path) == ["last"]
    load_weights(net := Momentum(), tmp_path / "checkpoints" / "last")
    assert same(dict(net.state_dict()), state_of(trainer)["module"])


@pytest.mark.parametrize("off", [False, {"last": False}], ids=["False", "last"])
def test_switched_off_only_hooks_save(tmp_path: Path, off: Any) -> None:
    train(tmp_path / "none", every=0, checkpoint=off)
    assert not (tmp_path / "none" / "checkpoints").exists()
    train(tmp_path / "hooks", every=5, checkpoint=off)
    assert names(tmp_path / "hooks") == ["epoch=0-step=5"]


def test_a_trial_run_writes_none(tmp_path: Path) -> None:
    class Asks(Hook):
        def on_step_end(self, trainer: Any) -> None:
            trainer.save_checkpoint()

    train(tmp_path, Asks(), every=0, fast_dev_run=2)
    assert names(tmp_path) == ["step-1", "step-2"]


def test_what_a_hook_does_to_the_weights_at_the_end_is_saved_and_not_done_twice(tmp_path: Path) -> None:
    class Doubles(Hook):
        def on_train_end(self, module: Any) -> None:
            for each in module.parameters():
                each.data.mul_(2)

    first = train(tmp_path, Doubles(), ModelCheckpoint(dirpath="epochs"), every=0)
    left = state_of(first)
    assert same(
        state_of(train(tmp_path, Doubles(), ModelCheckpoint(dirpath="epochs"), every=0, seed=2)), left
    )


def test_averages_that_are_swapped_in_at_the_end_are_there_again_and_training_continues_from_the_trained_weights(
    tmp_path: Path,
) -> None:
    first = train(tmp_path, WeightAveraging(decay=0.5, swap_at_end=True))
    left = state_of(first)
    raw = {name: each.clone() for name, each in left["module"].items()}
    load_weights(net := Momentum(), tmp_path, weights="raw")
    raw = {name: each.clone() for name, each in net.state_dict().items()}
    assert not same(raw, left["module"])
    assert same(state_of(train(tmp_path, WeightAveraging(decay=0.5, swap_at_end=True), seed=2)), left)

    class Looks(Hook):
        def on_train_start(self, module: Any) -> None:
            self.weights = {name: each.clone() for name, each in module.state_dict().items()}

    looks = Looks()
    train(tmp_path, WeightAveraging(decay=0.5, swap_at_end=True), looks, seed=2, max_epochs=2)
    assert same(looks.weights, raw)


def test_raising_the_limits_continues_from_the_last_state_as_if_it_had_never_ended(tmp_path: Path) -> None:
    train(tmp_path / "cut")
    longer = train(tmp_path / "cut", seed=2, max_epochs=2)
    whole = train(tmp_path / "whole", max_epochs=2)
    longer_state, whole_state = state_of(longer), state_of(whole)
    assert same(longer_state["module"], whole_state["module"]) and same(
        longer_state["optimizers"], whole_state["optimizers"]
    )
    assert read_manifest(tmp_path / "cut" / "checkpoints" / "last")["step"] == 16


def test_a_resumed_run_that_saves_nothing_itself_has_its_last_state_on_disk_too(tmp_path: Path) -> None:
    train(tmp_path, max_steps=5, max_epochs=-1)
    trainer = train(tmp_path, every=0, seed=2, max_steps=8, max_epochs=-1)
    assert trainer.global_step == 8
    assert read_manifest(tmp_path / "checkpoints" / "last")["step"] == 8


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_the_state_that_the_run_continues_from_alone(tmp_path: Path, number: int) -> None:
    class Kills(Hook):
        def on_step_end(self, step: int) -> None:
            if step == 6:
                os.kill(os.getpid(), number)

    with pytest.raises(Preempted if number == signal.SIGTERM else KeyboardInterrupt):
        train(tmp_path / "cut", Kills())
    assert names(tmp_path / "cut") == ["epoch=0-step=5", "last"]
    manifest = read_manifest(tmp_path / "cut" / "checkpoints" / "last")
    assert (manifest["step"], manifest["reason"]) == (6, "signal")
    whole = train(tmp_path / "whole")
    assert same(state_of(train(tmp_path / "cut", seed=2)), state_of(whole))


def test_a_name_that_a_hook_keeps_its_own_checkpoint_under_is_left_to_it(tmp_path: Path) -> None:
    trainer = train(tmp_path, ModelCheckpoint(filename="last", every_n_train_steps=5), every=0)
    assert read_manifest(tmp_path / "checkpoints" / "last")["step"] == 5
    found, _ = find_checkpoints(tmp_path)
    assert found[0].manifest["step"] == 8 and found[0].path.name == "last-state"
    left = state_of(trainer)
    assert same(
        state_of(train(tmp_path, ModelCheckpoint(filename="last", every_n_train_steps=5), every=0, seed=2)),
        left,
    )


def test_a_link_of_that_name_is_not_followed(tmp_path: Path) -> None:
    class Links(Hook):
        def on_train_epoch_end(self, trainer: Any) -> None:
            os.symlink("epoch=0-step=5", trainer.run_dir / "checkpoints" / "last")

    train(tmp_path, Links())
    assert read_manifest(tmp_path / "checkpoints" / "epoch=0-step=5")["step"] == 5
    assert read_manifest(tmp_path / "checkpoints" / "last-state")["step"] == 8


def test_where_checkpoints_go_to_a_url_the_last_state_goes_there(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/far"
    trainer = train(tmp_path / "run", ModelCheckpoint(every_n_train_steps=5, dirpath=url), every=0)
    assert sorted(each.name for each in (tmp_path / "far").iterdir()) == ["epoch=0-step=5", "last"]
    torch.manual_seed(3)
    report = load_weights(net := Momentum(), url)
    assert report.step == 8 and same(dict(net.state_dict()), state_of(trainer)["module"])


@pytest.mark.parametrize("event", ["on_train_epoch_end", "on_train_end"])
def test_a_state_that_is_not_finite_is_never_the_last_one_and_the_error_says_what_is_saved(
    tmp_path: Path, event: str
) -> None:
    def breaks(module: Any) -> None:
        next(module.parameters()).data.fill_(float("nan"))

    hook = Hook()
    hook.__dict__[event] = breaks
    with pytest.raises(NonFiniteLoss) as caught:
        train(tmp_path, hook)
    newest, step = ("last", 8) if event == "on_train_end" else ("epoch=0-step=5", 5)
    assert names(tmp_path)[-1] == newest
    assert f"{newest}, at step {step}." in "\n".join(caught.value.__notes__)
    load_weights(net := Momentum(), tmp_path)
    assert all(each.isfinite().all() for each in net.parameters())


@pytest.mark.parametrize("save", ["sync", "async"])
def test_everything_is_announced_before_the_end_of_training_is(tmp_path: Path, save: str) -> None:
    heard: list[str] = []

    class Closes(Hook):
        """As one that writes into a file which it closes at the end."""

        def on_checkpoint_save(self, path: Any) -> None:
            heard.append(Path(path).name)

        def on_train_end(self) -> None:
            heard.append("end")

    train(
        tmp_path,
        Closes(),
        ModelCheckpoint(every_n_train_steps=3, save_last=True, filename="s{step}"),
        every=0,
        checkpoint=save,
    )
    assert heard[-2:] == ["last", "end"] and "end" not in heard[:-1]


def test_weights_of_every_kind_are_looked_at_for_changes(tmp_path: Path) -> None:
    class Odd(Momentum):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("flags", torch.tensor([True, False]))
            self.register_buffer("halves", torch.ones(3, dtype=torch.bfloat16))
            self.register_buffer("waves", torch.ones(3, dtype=torch.complex64))
            self.register_buffer("nothing", torch.ones(0))

    for name in ("flags", "halves", "waves"):

        class Changes(Hook):
            def on_train_end(self, module: Any, name: str = name) -> None:
                getattr(module, name)[0] = 0

        trainer = quiet(run_dir=tmp_path / name, hooks=[Changes()], checkpoint=True)
        trainer.fit(odd := Odd(), batches(2))
        load_weights(again := Odd(), tmp_path / name)
        assert same(dict(again.state_dict()), dict(odd.state_dict())), name


def test_a_disk_that_fails_at_the_end_is_said_with_what_is_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Blocks(Hook):
        def on_train_epoch_end(self, trainer: Any) -> None:
            for name in ("last", "last-state"):
                (trainer.run_dir / "checkpoints" / name).write_text("a file of the user's own")

    trainer = train(tmp_path, Blocks())
    assert trainer.status == "completed"
    assert "the model is NOT saved" in caplog.text
    assert "its last state, of step 8, is not saved" in caplog.text and "epoch=0-step=5" in caplog.text


def test_an_older_run_whose_last_state_was_never_saved_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints" / "last")
    with caplog.at_level(logging.WARNING):
        again = train(tmp_path, seed=2)
    assert again.global_step == 5
    assert "completed at step 8, but its newest checkpoint is of step 5" in caplog.text
    caplog.clear()
    report = load_weights(Momentum(), tmp_path)
    assert report.step == 5 and "step 5" in str(report)
    assert "completed at step 8, but its newest checkpoint is of step 5" in caplog.text


def test_a_stopped_run_that_is_started_again_is_still_a_stopped_one(tmp_path: Path) -> None:
    train(tmp_path, StopsAt(7), logger=True)
    assert train(tmp_path, seed=2, logger=True).status == "stopped"


# ---- while it trains ---------------------------------------------------------------------------------------------


class WaitsForTheClock(Hook):
    """Holds the run up at some steps, or at the end of some epochs, until the time for the next write has come."""

    def __init__(self, steps: tuple[int, ...] = (), epochs: tuple[int, ...] = ()) -> None:
        self.steps, self.epochs = steps, epochs
        self.heard: list[Any] = []

    def on_step_end(self, step: int, trainer: Any) -> None:
        if step in self.steps:
            self.wait(trainer)

    def on_train_epoch_end(self, epoch: int, trainer: Any) -> None:
        if epoch in self.epochs:
            self.wait(trainer)

    def wait(self, trainer: Any) -> None:
        trainer._run.saves.last._due = 0.0
        trainer._run.saves.last._changed.set()
        while not trainer._run.participants.commands.waiting:
            time.sleep(0.001)

    def on_checkpoint_save(self, path: Any, step: int, reason: str) -> None:
        assert (Path(path).name, reason) == ("last", "last")
        self.heard.append(step)


@pytest.mark.parametrize("how", ["sync", "async"])
def test_it_is_written_again_once_enough_time_has_passed_in_an_epoch_and_at_its_end(
    tmp_path: Path, how: str
) -> None:
    clock = WaitsForTheClock(steps=(3, 9), epochs=(1,))
    train(tmp_path, clock, every=0, max_epochs=3, checkpoint=how)
    assert clock.heard == [3, 9, 16, 24]
    assert names(tmp_path) == ["last"]


def test_many_short_epochs_write_once(tmp_path: Path) -> None:
    clock = WaitsForTheClock()
    train(tmp_path, clock, every=0, max_epochs=20)
    assert clock.heard == [160]


def test_the_interval_is_an_option(tmp_path: Path) -> None:
    """By the clock alone: the first write comes in the middle of an epoch that would not end by itself."""
    heard: list[int] = []

    class StopsAfterTwo(Hook):
        def on_checkpoint_save(self, step: int, trainer: Any) -> None:
            heard.append(step)
            if len(heard) == 2:
                trainer.stop()

    train(tmp_path, StopsAfterTwo(), every=0, max_epochs=-1, checkpoint={"every": 0.01})
    assert heard[0] < heard[1] <= heard[-1]


@pytest.mark.parametrize("step", [3, 8, 11, 16])
def test_a_run_that_is_killed_continues_from_the_newest_write(tmp_path: Path, step: int) -> None:
    class Dies(Hook):
        """Copies what a kill at this moment leaves."""

        def on_train_batch_start(self, step: int, trainer: Any) -> None:
            if step == self.at + 1:
                shutil.copytree(
                    tmp_path / "cut", tmp_path / "left", ignore=shutil.ignore_patterns("control.sock")
                )
                trainer.stop()

    dies = Dies()
    dies.at = step  # type: ignore[attr-defined]
    train(
        tmp_path / "cut",
        WaitsForTheClock(steps=(step,)),
        dies,
        every=0,
        max_epochs=3,
        accumulate_grad_batches=1,
    )
    again = train(tmp_path / "left", every=0, seed=2, max_epochs=3)
    whole = train(tmp_path / "whole", every=0, max_epochs=3)
    assert same(state_of(again), state_of(whole))


# ---- when it fails -----------------------------------------------------------------------------------------------


class Boom(Exception):
    """The failure of the test."""


class FailsIn(Hook):
    def __init__(self, event: str, step: int, error: type[BaseException] = Boom) -> None:
        def fail(step: int) -> None:
            if step == at:
                raise error("on purpose")

        at = step
        self.__dict__[event] = fail


class FailingLoader(list[Any]):
    def __iter__(self) -> Any:
        for index, each in enumerate(list.__iter__(self)):
            if index == 5:
                raise Boom("on purpose")
            yield each


class FailsInStep(Momentum):
    is_broken = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.is_broken and batch_idx == 5:
            raise Boom("on purpose")
        return super().training_step(batch, batch_idx)


def fail(
    run_dir: Path,
    module: Any = None,
    hooks: Any = (),
    train: Any = None,
    error: type[BaseException] = Boom,
    **options: Any,
) -> None:
    torch.manual_seed(1)
    trainer = quiet(run_dir=run_dir, hooks=list(hooks), **{"checkpoint": True, **options})
    with pytest.raises(error, match="on purpose"):
        trainer.fit(module or Momentum(), train or batches(8), batches(1))


FAILURES: dict[str, dict[str, Any]] = {
    "step": {"module": FailsInStep},
    "hook before the step": {"hooks": lambda: [FailsIn("on_train_batch_start", 5)]},
    "hook after the step": {"hooks": lambda: [FailsIn("on_step_end", 5)]},
    "loader": {"train": FailingLoader(batches(8))},
    "validation": {"hooks": lambda: [FailsIn("on_validation_batch_end", 8)], "at": 8},
    "epoch end": {"hooks": lambda: [FailsIn("on_train_epoch_end", 8)], "at": 8},
    "interrupt": {
        "hooks": lambda: [FailsIn("on_train_batch_start", 5, KeyboardInterrupt)],
        "error": KeyboardInterrupt,
    },
    "before the update": {"hooks": lambda: [FailsIn("on_before_optimizer_step", 5)]},
}


@pytest.mark.parametrize("where", FAILURES)
def test_a_failed_run_leaves_its_newest_state_and_continues_from_it(tmp_path: Path, where: str) -> None:
    how = dict(FAILURES[where])
    step, hooks, module = how.pop("at", 5), how.pop("hooks", list)(), how.pop("module", Momentum)
    torch.manual_seed(1)
    fail(tmp_path / "cut", module(), hooks, max_epochs=2, **how)
    manifest = read_manifest(tmp_path / "cut" / "checkpoints" / "last")
    assert (manifest["step"], manifest["reason"]) == (step, "exception")
    again = train(tmp_path / "cut", every=0, seed=2, max_epochs=2, val=batches(1))
    whole = train(tmp_path / "whole", every=0, max_epochs=2, val=batches(1))
    found, wanted = state_of(again), state_of(whole)
    assert found["counters"] == wanted["counters"]
    assert same(found["module"], wanted["module"]) and same(found["optimizers"], wanted["optimizers"])


def test_a_failure_after_a_scheduler_has_advanced_does_not_advance_it_again(tmp_path: Path) -> None:
    class FailsAtScheduler(Momentum):
        has_failed = False

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def lr_scheduler_step(self, scheduler: Any) -> None:
            scheduler.step()
            if scheduler.last_epoch == 5 and not self.has_failed:
                self.has_failed = True
                raise Boom("on purpose")

    fail(tmp_path, FailsAtScheduler())
    saved = read(tmp_path / "checkpoints" / "last")
    assert saved["counters"]["step"] == saved["schedulers"][0]["last_epoch"] == 5


def test_a_failure_inside_an_accumulation_window_leaves_a_state_that_trains_on(tmp_path: Path) -> None:
    fail(tmp_path, hooks=[FailsIn("on_train_batch_end", 1)], accumulate_grad_batches=3)
    assert read_manifest(tmp_path / "checkpoints" / "last")["step"] == 1
    assert train(tmp_path, every=0, seed=2, accumulate_grad_batches=3, val=batches(1)).global_step == 3


def test_weights_that_an_optimizer_has_left_half_updated_do_not_replace_the_state_before(
    tmp_path: Path,
) -> None:
    class Torn(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            self.count = getattr(self, "count", 0) + 1
            if self.count == 6:
                next(iter(self.param_groups[0]["params"])).data.add_(1.0)
                raise Boom("on purpose")
            return super().step(closure)

    class Net(Momentum):
        def configure_optimizers(self) -> Any:
            return Torn(self.parameters())

    fail(tmp_path, Net(), [WaitsForTheClock(steps=(4,))])  # its on_checkpoint_save refuses other reasons
    assert read_manifest(tmp_path / "checkpoints" / "last")["step"] == 4


def test_a_run_that_fails_before_its_first_update_leaves_nothing(tmp_path: Path) -> None:
    fail(tmp_path, hooks=[FailsIn("on_train_batch_start", 0)])
    assert not (tmp_path / "checkpoints").exists()


def test_a_disk_that_fails_too_does_not_hide_the_first_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "checkpoints").write_text("a file, so that no checkpoint can be written")
    fail(tmp_path, hooks=[FailsIn("on_train_batch_start", 5)])
    assert "could not be written" in caplog.text


def test_a_state_that_is_not_finite_leaves_the_one_before(tmp_path: Path) -> None:
    class Breaks(Hook):
        def on_step_end(self, step: int, module: Any) -> None:
            if step == 6:
                next(module.parameters()).data.fill_(float("nan"))

    with pytest.raises(NonFiniteLoss):
        train(tmp_path, WaitsForTheClock(steps=(4,)), Breaks(), every=0)
    assert read_manifest(tmp_path / "checkpoints" / "last")["step"] == 4


# ---- when it cannot be written -----------------------------------------------------------------------------------


def test_a_run_that_cannot_write_it_trains_on_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints").write_text("a file, so that no checkpoint can be written")
    heard: list[str] = []

    class Listens(Hook):
        def on_checkpoint_failed(self, reason: str) -> None:
            heard.append(reason)

    trainer = train(tmp_path, Listens(), WaitsForTheClock(steps=(3,)), every=0, enable_progress_bar=True)
    assert (trainer.status, trainer.global_step, heard) == ("completed", 8, ["last", "last"])
    assert "the model is NOT saved" in caplog.text
    assert capsys.readouterr().err.splitlines()[-1].startswith("Model: NOT saved. ")


def test_a_checkpoint_that_a_hook_asks_for_still_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file, so that no checkpoint can be written")
    with pytest.raises(CheckpointError):
        train(tmp_path, every=5)
    assert train(tmp_path, every=5, checkpoint={"on_error": "warn"}).status == "completed"


class CountsBatches(Hook):
    count = 0

    def on_train_batch_end(self) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


@pytest.mark.parametrize("event", ["train_batch_end", "after_backward"])
def test_hooks_that_may_lack_a_counted_batch_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, event: str
) -> None:
    trainer = quiet(run_dir=tmp_path, checkpoint={"last": True})
    trainer.on(event, every=3)(lambda: 1 / 0)
    trainer.add_hook(CountsBatches())
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Net(), batches(4))
    assert ("may lack it after a resume: counts_batches." in caplog.text) == (event == "train_batch_end")
