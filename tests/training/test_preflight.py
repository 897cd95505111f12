"""What can never come is refused before training begins; what code of the user's declares to log is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet

from hookline import Hook, OptionError, parameter_groups
from hookline.hooks import EarlyStopping, LRMonitor, ModelCheckpoint


class Starts(Hook):
    """Remembers that training has begun."""

    started = False

    def on_train_start(self) -> None:
        self.started = True


def refused(net: Net, *hooks: Any, val: Any = None, **options: Any) -> str:
    starts = Starts()
    trainer = quiet(max_epochs=2, hooks=[*hooks, starts], **options)
    with pytest.raises(OptionError) as caught:
        trainer.fit(net, batches(2), val)
    assert not starts.started and trainer.state.batches_seen == 0
    return str(caught.value)


class Validates(Net):
    """Logs a metric of its own, but only in validations."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val/acc", 1.0)
        self.log("val_loss", 1.0)
        return super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.log("val/late", 1.0)


class Plateau(Validates):
    def __init__(self, strict: bool = True) -> None:
        super().__init__()
        self.strict = strict

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "val/acc", "strict": self.strict},
        }


# ---- metrics of a validation that there is not --------------------------------------------------------------------


@pytest.mark.parametrize("monitor", ["val/loss", "val/acc", "val_loss", "val/late", "val/dl_web/loss"])
@pytest.mark.parametrize("net", [Net, Validates])
def test_a_metric_of_validation_without_validation_data_is_refused(net: type[Net], monitor: str) -> None:
    for hook in (
        EarlyStopping(monitor),
        EarlyStopping(monitor, check_on_train_epoch_end=True),
        ModelCheckpoint(monitor),
    ):
        said = refused(net(), hook)
        assert f"{type(hook).__name__} needs the metric {monitor!r}" in said and "'train/loss'" in said
        assert "no validation data" in said and "strict=False" in said


def test_it_is_refused_in_a_name_too() -> None:
    assert "'val/acc'" in refused(Net(), ModelCheckpoint(filename="{epoch}-{val/acc:.2f}"))
    assert "'val/acc'" in refused(
        Net(), ModelCheckpoint(filename="{epoch}-{val/acc:.2f}", every_n_train_steps=1)
    )


def test_a_learning_rate_schedule_that_waits_for_one_is_refused() -> None:
    assert "lr_scheduler ReduceLROnPlateau needs the metric 'val/acc'" in refused(Plateau())
    quiet().fit(Plateau(strict=False), batches(1))


@pytest.mark.parametrize("off", [0, 0.0])
def test_validation_that_is_switched_off_is_the_reason_that_is_given(off: float) -> None:
    assert f"limit_val_batches={off} switches validation off" in refused(
        Net(), EarlyStopping(), val=batches(1), limit_val_batches=off
    )


def test_hooks_that_act_after_validations_only_need_one() -> None:
    for hook in (
        EarlyStopping("train/loss", check_on_train_epoch_end=False),
        ModelCheckpoint(save_on_train_epoch_end=False),
    ):
        assert (
            f"{type(hook).__name__} acts after validations, and this run has no validation data"
            in refused(Net(), hook)
        )


def test_a_hook_of_ones_own_says_what_it_needs() -> None:
    class Waits(Hook):
        needs_metrics = ("val/acc", "anything/else")

    class After(Hook):
        needs_validation = True

    assert "Waits needs the metric 'val/acc'" in refused(Net(), Waits())
    assert "After acts after validations" in refused(Net(), After())
    quiet(hooks=[Waits(), After()]).fit(Net(), batches(1), batches(1))


def test_strict_false_is_the_way_round(caplog: pytest.LogCaptureFixture) -> None:
    hooks = [
        EarlyStopping(strict=False),
        ModelCheckpoint("val/loss", strict=False),
        ModelCheckpoint(save_on_train_epoch_end=False, dirpath="b", strict=False),
    ]
    quiet(hooks=hooks).fit(Net(), batches(1))
    assert "EarlyStopping monitors 'val/loss', which was not logged" in caplog.text


def test_a_hook_that_is_switched_off_waits_for_nothing() -> None:
    trainer = quiet(hooks=[EarlyStopping()])
    trainer.disable_hook("early_stopping")
    trainer.fit(Net(), batches(1))


def test_a_run_that_has_nothing_to_train_is_not_refused(caplog: pytest.LogCaptureFixture) -> None:
    quiet(max_epochs=0, hooks=[EarlyStopping()]).fit(Net(), batches(1))
    assert "Nothing to train" in caplog.text


# ---- metrics that the user's own code logs ------------------------------------------------------------------------


class LogsInTraining(Net):
    logs_metrics = ("val/loss", "val/acc")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val/loss", 1.0, on_epoch=True, on_step=False)
        return super().training_step(batch, batch_idx)


class LogsInAHook(Hook):
    logs_metrics = ["val/loss"]

    def on_train_epoch_end(self, module: Any) -> None:
        module.log("val/loss", 1.0)


class LogsBefore(Hook):
    def on_fit_start(self, trainer: Any) -> None:
        trainer.log("val/loss", 1.0)


@pytest.mark.parametrize("how", ["module", "hook", "before training", "strict=False"])
def test_a_metric_that_ones_own_code_declares_is_no_reason_to_refuse(how: str) -> None:
    hooks = {"hook": [LogsInAHook()], "before training": [LogsBefore()]}.get(how, [])
    stop = EarlyStopping("val/loss", patience=1, strict=how != "strict=False")
    trainer = quiet(max_epochs=4, hooks=[*hooks, stop])
    if how == "strict=False":
        trainer.on("train_epoch_end")(lambda trainer: trainer.log("val/loss", 1.0))
    trainer.fit(LogsInTraining() if how == "module" else Net(), batches(1))
    assert (stop.checks, trainer.status) == (2, "stopped")


def test_a_metric_that_is_not_among_the_declared_ones_is_refused() -> None:
    assert "`logs_metrics = ('val/f1',)`" in refused(LogsInTraining(), EarlyStopping("val/f1"))


@pytest.mark.parametrize(
    "odd", [True, None, 3, "val/acc", torch.nn.Identity()], ids=lambda each: type(each).__name__
)
def test_an_attribute_of_a_module_with_another_meaning_declares_nothing(odd: Any) -> None:
    net = Net()
    net.logs_metrics = odd
    assert "val/loss" in refused(net, EarlyStopping("val/loss"))


def test_names_that_tell_nothing_are_judged_when_they_are_looked_for() -> None:
    trainer = quiet(hooks=[EarlyStopping("accuracy")])
    with pytest.raises(OptionError, match="monitors 'accuracy', which was not logged"):
        trainer.fit(Net(), batches(1))
    assert trainer.global_step == 1


# ---- when to validate ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"check_val_every_n_epoch": 2}, {"num_sanity_val_steps": 2}])
def test_an_interval_longer_than_an_epoch_is_refused_before_training(options: dict[str, int]) -> None:
    said = refused(Net(), val=batches(1), val_check_interval=3, **options)
    assert (
        "val_check_interval=3 is never reached: an epoch has 2 batches" in said
        and "check_val_every_n_epoch" in said
    )


def test_a_fraction_of_an_epoch_without_a_length_is_refused_before_training() -> None:
    starts = Starts()
    with pytest.raises(OptionError, match="val_check_interval=0.5 is a fraction"):
        quiet(val_check_interval=0.5, hooks=[starts], max_steps=2).fit(
            Net(), (each for each in batches(4)), batches(1)
        )
    assert not starts.started


def test_without_validation_data_the_interval_says_nothing() -> None:
    quiet(val_check_interval=30).fit(Net(), batches(1))


class Grouped(Net):
    """Has groups for its optimizer by rules."""

    def __init__(self, rules: Any, optimizer: Any = torch.optim.AdamW) -> None:
        super().__init__()
        self.rules, self.optimizer = rules, optimizer

    def configure_optimizers(self) -> Any:
        groups = parameter_groups(self, self.rules)
        optimizer = self.optimizer(groups, lr=0.5)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


def test_which_pattern_matches_which_parameters_is_shown_before_the_run(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    net = Grouped({"biases": {"weight_decay": 0.0}})
    with caplog.at_level("INFO", "hookline"):
        trainer = quiet(hooks=[LRMonitor()], gradient_clip_val=1.0, max_epochs=2)
        trainer.fit(net, batches(1))
    assert [" ".join(each.split()) for each in caplog.text.splitlines() if "layer." in each] == [
        "rest 1 8 0.5 0.01 layer.weight",
        "biases 1 2 0.5 0 layer.bias",
    ]
    assert trainer.metrics["lr-AdamW/biases"] == 0.05  # after the scheduler's first step
    capfd.readouterr()
    quiet(enable_progress_bar=True).fit(Net(), batches(1))
    assert "Parameter groups" not in capfd.readouterr().err
    quiet(enable_progress_bar=True).fit(net, batches(1))
    assert "Parameter groups of AdamW:\ngroup " in capfd.readouterr().err


def test_a_setting_of_a_group_that_the_optimizer_would_ignore_is_refused() -> None:
    said = refused(Grouped({"biases": {"weigth_decay": 0.0}}))
    assert said.startswith("The group 'biases' sets 'weigth_decay', which AdamW does not have.")
    assert "Did you mean 'weight_decay'?" in said

    class Own(torch.optim.SGD):
        """An optimizer of another package may read entries that it does not declare."""

    quiet().fit(Grouped({"biases": {"weigth_decay": 1.0}}, Own), batches(1))
    quiet().fit(Grouped({"biases": {"lr_scale": 0.5}}), batches(1))  # the user's own code may read it


# ---- schedulers of an earlier fit ---------------------------------------------------------------------------------


def test_a_scheduler_that_an_earlier_fit_has_advanced_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Decays(Net):
        def __init__(self) -> None:
            super().__init__()
            self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)

        def configure_optimizers(self) -> Any:
            return {"optimizer": self.optimizer, "lr_scheduler": self.schedule}

    net = Decays()
    quiet(max_epochs=2, run_dir=tmp_path, checkpoint=True).fit(net, batches(2))
    quiet(max_epochs=3, run_dir=tmp_path, checkpoint=True).fit(Decays(), batches(2), resume="auto")
    assert "has advanced" not in caplog.text
    quiet(max_epochs=1).fit(net, batches(2))
    assert "StepLR has advanced 2 times before this run" in caplog.text
    assert "the first learning rate is 0.025" in caplog.text
