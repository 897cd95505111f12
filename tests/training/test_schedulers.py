"""Learning-rate schedulers advance by step, by epoch, or on a metric, exactly as often as a loop by hand would."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, ReduceLROnPlateau

from hookline import END_EPOCH, SKIP_BATCH, SKIP_STEP, Hook, OptionError


class Scheduled(Net):
    """The learning rate is halved every time the scheduler advances; 0.1 at first."""

    def __init__(self, **schedule: Any) -> None:
        super().__init__()
        self.schedule = schedule

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": ExponentialLR(optimizer, 0.5), **self.schedule},
        }


class Rates(Hook):
    """The learning rate at every batch's start, and how often it has been halved by the end of each epoch."""

    def __init__(self) -> None:
        self.at_start: list[float] = []
        self.halvings: list[int] = []

    def on_train_batch_start(self, lr: float) -> None:
        self.at_start.append(lr)

    def on_train_epoch_end(self, lr: float) -> None:
        self.halvings.append(round(-torch.tensor(lr / 0.1).log2().item()))


class Stream:
    """A loader that cannot tell its length."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def rates(net: Net, loader: Any = None, hook: Rates | None = None, **options: Any) -> Rates:
    hook = hook or Rates()
    quiet(hooks=[hook], **options).fit(net, batches(4) if loader is None else loader, batches(1))
    return hook


def test_by_epoch_is_the_default() -> None:
    got = rates(Scheduled(), max_epochs=3)
    assert got.at_start == [0.1] * 4 + [0.05] * 4 + [0.025] * 4


def test_by_step_advances_after_every_update() -> None:
    assert rates(Scheduled(interval="step")).at_start == [0.1, 0.05, 0.025, 0.0125]


def test_by_step_counts_updates_not_batches() -> None:
    assert rates(Scheduled(interval="step"), accumulate_grad_batches=2).at_start == [0.1, 0.1, 0.05, 0.05]


def test_frequency_makes_it_every_nth() -> None:
    assert rates(Scheduled(interval="step", frequency=2)).at_start == [0.1, 0.1, 0.05, 0.05]
    assert rates(Scheduled(frequency=2), max_epochs=4).halvings == [0, 1, 1, 2]


def test_weights_with_a_schedule_equal_a_loop_written_by_hand() -> None:
    net = Scheduled(interval="step")
    twin = Scheduled(interval="step")
    twin.load_state_dict(net.state_dict())
    quiet(max_epochs=2).fit(net, batches())
    made = twin.configure_optimizers()
    optimizer, scheduler = made["optimizer"], made["lr_scheduler"]["scheduler"]
    for batch in batches() * 2:
        optimizer.zero_grad()
        twin.training_step(batch, 0).backward()
        optimizer.step()
        scheduler.step()
    assert torch.equal(net.layer.weight, twin.layer.weight)


def test_an_epochs_scheduler_has_advanced_when_the_last_batch_ends() -> None:
    seen: list[float] = []
    trainer = quiet()
    trainer.on("train_batch_end")(lambda lr: seen.append(lr))
    trainer.fit(Scheduled(), batches(2))
    assert seen == [0.1, 0.05]


def test_the_step_reports_the_rate_it_used() -> None:
    used: list[float] = []
    trainer = quiet()
    trainer.on("step_end")(lambda lr: used.append(lr))
    trainer.fit(Scheduled(interval="step"), batches(3))
    assert used == [0.1, 0.05, 0.025]


# ---- as often as there are updates and epochs, whatever happens in them ------------------------------------------


def test_a_skipped_update_does_not_advance_it() -> None:
    class SkipFirst(Rates):
        def on_before_optimizer_step(self, step: int, batches_seen: int) -> Any:
            return SKIP_STEP if batches_seen == 0 else None

    assert rates(Scheduled(interval="step"), hook=SkipFirst()).halvings == [3]


@pytest.mark.parametrize("loader", [lambda data: data, Stream], ids=["known length", "unknown length"])
def test_a_short_last_window_advances_it_too(loader: Callable[[Any], Any]) -> None:
    got = rates(Scheduled(interval="step"), loader(batches(3)), accumulate_grad_batches=2, max_epochs=2)
    assert got.halvings == [2, 4]


def test_a_window_closed_by_a_skipped_batch_advances_it_too() -> None:
    class SkipSecond(Rates):
        def on_train_batch_start(self, batch_idx: int) -> Any:  # type: ignore[override]
            return SKIP_BATCH if batch_idx == 1 else None

    assert rates(Scheduled(interval="step"), hook=SkipSecond(), accumulate_grad_batches=2).halvings == [2]


@pytest.mark.parametrize("signal", [END_EPOCH, SKIP_BATCH])
def test_an_epoch_advances_it_once_however_it_ends(signal: Any) -> None:
    class AtLast(Rates):
        def on_train_batch_start(self, batch_idx: int) -> Any:  # type: ignore[override]
            return signal if batch_idx == 3 else None

    assert rates(Scheduled(), hook=AtLast(), max_epochs=3).halvings == [1, 2, 3]


def test_an_epoch_of_unknown_length_advances_it_once() -> None:
    assert rates(Scheduled(), Stream(batches(4)), max_epochs=3).halvings == [1, 2, 3]


def test_an_epoch_that_was_stopped_half_way_does_not_advance_it() -> None:
    assert rates(Scheduled(), max_steps=6, max_epochs=None).halvings == [1, 1]


# ---- on a metric -------------------------------------------------------------------------------------------------


class Plateau(Net):
    """Cut the rate as soon as the metric fails to get better; here it never does."""

    def __init__(self, monitor: str | None = "val/loss", **schedule: Any) -> None:
        super().__init__()
        self.schedule = {"monitor": monitor, **schedule}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.tensor(1.0)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
                **self.schedule,
            },
        }


def test_a_plateau_scheduler_gets_the_epochs_metric() -> None:
    assert rates(Plateau(), max_epochs=4).at_start[::4] == [0.1, 0.1, 0.05, 0.025]


def test_a_plateau_scheduler_can_watch_the_training_loss() -> None:
    class Worse(Plateau):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * 0 + self.current_epoch

    assert rates(Worse("train/loss"), max_epochs=3).at_start[::4] == [0.1, 0.1, 0.05]


@pytest.mark.parametrize("strict", [True, False])
def test_a_plateau_scheduler_counts_validations_and_not_epochs_without_one(strict: bool) -> None:
    seen = rates(Plateau(strict=strict), max_epochs=7, check_val_every_n_epoch=2).at_start[::4]
    assert seen == [0.1, 0.1, 0.1, 0.1, 0.05, 0.05, 0.025]  # validations end epochs 1, 3 and 5


def test_a_plateau_scheduler_advances_on_a_value_that_a_hook_logs_in_every_epoch() -> None:
    class Own(Rates):
        def on_train_epoch_end(self, trainer: Any) -> None:
            trainer.log("size", 1.0)

    seen = rates(Plateau("size"), hook=Own(), max_epochs=3, check_val_every_n_epoch=3).at_start[::4]
    assert seen == [0.1, 0.1, 0.05]


def test_a_plateau_scheduler_without_a_metric_to_watch_is_refused() -> None:
    with pytest.raises(OptionError, match="ReduceLROnPlateau needs a metric to watch"):
        quiet().fit(Plateau(None), batches(), batches(1))


def test_a_metric_that_was_not_logged_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(
        OptionError, match=r"monitors 'val_loss', which was not logged. Did you mean 'val/loss'"
    ):
        quiet().fit(Plateau("val_loss"), batches(), batches(1))


def test_strict_false_only_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "hookline"):
        rates(Plateau("val_loss", strict=False))
    assert "monitors 'val_loss', which was not logged" in caplog.text


# ---- several -----------------------------------------------------------------------------------------------------


def test_every_optimizer_has_its_own_schedule() -> None:
    class Two(Net):
        def configure_optimizers(self) -> Any:
            first = torch.optim.SGD([self.layer.weight], lr=1.0)
            second = torch.optim.SGD([self.layer.bias], lr=1.0)
            by_step = {"scheduler": LambdaLR(first, lambda n: 0.9**n), "interval": "step"}
            return [
                {"optimizer": first, "lr_scheduler": by_step},
                {"optimizer": second, "lr_scheduler": ExponentialLR(second, 0.5)},
            ]

    trainer = quiet(max_epochs=2)
    trainer.fit(Two(), batches(3))
    first, second = trainer.optimizers
    assert first.param_groups[0]["lr"] == pytest.approx(0.9**6)
    assert second.param_groups[0]["lr"] == 0.25
    assert len(trainer.state.schedulers) == 2


def test_a_hooks_own_learning_rate_is_used_and_stays() -> None:
    class Half(Hook):
        def on_train_batch_start(self, optimizers: list[Any], batch_idx: int) -> None:
            if batch_idx == 1:
                optimizers[0].param_groups[0]["lr"] = 0.05

    used: list[float] = []
    trainer = quiet(hooks=[Half()])
    trainer.on("step_end")(lambda lr: used.append(lr))
    trainer.fit(Net(), batches(3))
    assert used == [0.1, 0.05, 0.05]


class PlateauByStep(Net):
    """Records the metric of each call of its scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", float(self.global_step))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = ReduceLROnPlateau(optimizer, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": plateau, "monitor": "score", "interval": "step", "frequency": 2},
        }

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.seen.append(float(metric))
        scheduler.step(metric)


def test_a_plateau_scheduler_by_step_gets_the_metric_of_the_validation_after_that_step() -> None:
    module = PlateauByStep()
    quiet(val_check_interval=2).fit(module, batches(6), batches(1))
    assert module.seen == [2.0, 4.0, 6.0]
    module = PlateauByStep()
    quiet(accumulate_grad_batches=2, val_check_interval=4).fit(
        module, (each for each in batches(8)), batches(1)
    )
    assert module.seen == [2.0, 4.0]
    module = PlateauByStep()
    quiet(accumulate_grad_batches=4).fit(module, iter(batches(6)), batches(1))  # a short last window
    assert module.seen == [2.0]


def test_a_resume_from_a_validation_advances_a_plateau_scheduler_by_step_once() -> None:
    class SavesInValidation(Hook):
        def on_validation_start(self, trainer: Any, sanity_checking: bool) -> None:
            if trainer.global_step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    module = PlateauByStep()
    trainer = quiet(val_check_interval=2, hooks=SavesInValidation(), run_dir="run", checkpoint=True)
    with contextlib.suppress(SystemExit):
        trainer.fit(module, batches(6), batches(1))
    assert module.seen == []
    again = PlateauByStep()
    quiet(val_check_interval=2, run_dir="run", checkpoint=True).fit(
        again, batches(6), batches(1), resume="auto"
    )
    assert again.seen == [2.0, 4.0, 6.0]
