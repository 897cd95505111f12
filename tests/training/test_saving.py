"""Hooks ask for checkpoints, the loop writes them at its save points, and a resumed run is the run that continued."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

from hookline import CheckpointError, DataModule, Hook, HooklineError, OptionError, Recorder


class Rich(Net):
    """Has everything that must survive: momentum, a schedule, buffers and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((self.drop(self.norm(batch[0])), batch[1]), batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": ExponentialLR(optimizer, 0.9), "interval": self.interval},
        }

    interval = "step"


class ByEpoch(Rich):
    interval = "epoch"


class SaveAt(Hook):
    """Asks for a checkpoint when `step` gets to a number."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_step_end(self, trainer: Any, step: int) -> None:
        if step == self.step:
            trainer.save_checkpoint(self.path)


def interrupted_and_whole(
    cls: type[Rich], loader: Any, save: Hook, path: Path, **options: Any
) -> tuple[Any, Any]:
    """A run that went through, and one that took up its checkpoint in the middle, from other weights."""
    torch.manual_seed(1)
    whole = quiet(hooks=[save], **options)
    whole.fit(cls(), loader)
    torch.manual_seed(2)
    resumed = quiet(**options)
    resumed.fit(cls(), loader, resume=path)
    return whole, resumed


def assert_same_end(whole: Any, resumed: Any) -> None:
    for name, value in whole.module.state_dict().items():
        assert torch.equal(value, resumed.module.state_dict()[name]), name
    assert resumed.state.lr == whole.state.lr
    for counter in ("step", "epoch", "epochs_seen", "batches_seen", "samples_seen"):
        assert getattr(resumed.state, counter) == getattr(whole.state, counter), counter


# ---- saving ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_written_at_the_save_point_after_the_step_and_its_validation(tmp_path: Path) -> None:
    class Ask(Hook):
        def on_train_batch_end(self, trainer: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                trainer.save_checkpoint(tmp_path / "here")
                assert not (tmp_path / "here").exists()

        def on_step_end(self) -> None: ...
        def on_validation_end(self) -> None: ...
        def on_save_checkpoint(self) -> None: ...
        def on_checkpoint_save(self) -> None: ...

    trainer = quiet(hooks=[Ask()], val_check_interval=2)
    with Recorder(trainer) as recorder:
        trainer.fit(Net(), batches(2), batches(1))
    heard = [each.event for each in recorder.calls if each.receiver == "H"]
    assert heard == [
        "on_train_batch_end",
        "on_step_end",
        "on_train_batch_end",
        "on_step_end",
        "on_validation_end",
        "on_save_checkpoint",
        "on_checkpoint_save",
    ]


def test_one_asked_for_at_the_epochs_end_is_written_after_everyone_has_heard_it(tmp_path: Path) -> None:
    order: list[str] = []

    class Ask(Hook):
        def on_train_epoch_end(self, trainer: Any) -> None:
            trainer.save_checkpoint(tmp_path / "epoch", "last")

        def on_checkpoint_save(self) -> None:
            order.append("saved")

    class Last(Hook):
        tier = "monitor"

        def on_train_epoch_end(self) -> None:
            order.append("epoch end")

    quiet(hooks=[Ask(), Last()]).fit(Net(), batches())
    assert order == ["epoch end", "saved"]


def test_one_asked_for_at_the_end_of_training_is_written(tmp_path: Path) -> None:
    trainer = quiet()
    trainer.on("train_end")(lambda trainer: trainer.save_checkpoint(tmp_path / "end"))
    trainer.fit(Net(), batches())
    assert (tmp_path / "end" / "state.json").is_file()


def test_after_a_run_a_checkpoint_is_written_at_once(tmp_path: Path) -> None:
    trainer = quiet()
    trainer.fit(Net(), batches())
    trainer.save_checkpoint(tmp_path / "after")
    assert (tmp_path / "after" / "state.json").is_file()


def test_before_any_run_there_is_nothing_to_save() -> None:
    with pytest.raises(HooklineError, match="nothing to save"):
        quiet().save_checkpoint("anywhere")


def test_an_unknown_reason_is_refused_with_the_nearest() -> None:
    with pytest.raises(OptionError, match="reason='intervall', allowed: .* Did you mean 'interval'"):
        quiet().save_checkpoint("anywhere", "intervall")


def test_a_failed_run_does_not_write_what_was_still_asked_for(tmp_path: Path) -> None:
    def ask_and_fail(trainer: Any) -> None:
        trainer.save_checkpoint(tmp_path / "c")
        raise ZeroDivisionError

    trainer = quiet()
    trainer.on("step_end")(ask_and_fail)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Net(), batches())
    assert list(tmp_path.iterdir()) == []


# ---- resuming ----------------------------------------------------------------------------------------------------


def test_a_run_resumed_at_an_epochs_end_ends_as_the_whole_one(tmp_path: Path) -> None:
    class AtEpochEnd(Hook):
        def on_train_epoch_end(self, trainer: Any, epoch: int) -> None:
            if epoch == 1:
                trainer.save_checkpoint(tmp_path / "c")

    for cls in (Rich, ByEpoch):
        assert_same_end(*interrupted_and_whole(cls, batches(4), AtEpochEnd(), tmp_path / "c", max_epochs=4))


@pytest.mark.parametrize("step", [5, 6, 7, 8])
@pytest.mark.parametrize("cls", [Rich, ByEpoch])
def test_a_run_resumed_in_the_middle_of_an_epoch_ends_as_the_whole_one(
    cls: type[Rich], step: int, tmp_path: Path
) -> None:
    """Four batches per epoch: the last of these numbers is the save point after an epoch's last batch."""
    path = tmp_path / "c"
    assert_same_end(*interrupted_and_whole(cls, batches(4), SaveAt(step, path), path, max_epochs=3))


def test_a_data_loader_that_draws_a_seed_does_not_shift_the_random_numbers_of_a_resumed_run(
    tmp_path: Path,
) -> None:
    data = TensorDataset(torch.randn(12, 4), torch.randn(12, 2))
    loader = DataLoader(data, batch_size=3)
    path = tmp_path / "c"
    assert_same_end(*interrupted_and_whole(Rich, loader, SaveAt(6, path), path, max_epochs=3))


def test_an_open_accumulation_window_is_resumed(tmp_path: Path) -> None:
    class InTheMiddle(Hook):
        def on_train_batch_end(self, trainer: Any, batches_seen: int) -> None:
            if batches_seen == 3:
                trainer.save_checkpoint(tmp_path / "c")

    whole, resumed = interrupted_and_whole(
        Rich, batches(4), InTheMiddle(), tmp_path / "c", max_epochs=2, accumulate_grad_batches=2
    )
    assert_same_end(whole, resumed)


def test_the_epochs_mean_loss_counts_the_batches_before_the_resume(tmp_path: Path) -> None:
    path = tmp_path / "c"
    whole, resumed = interrupted_and_whole(Rich, batches(4), SaveAt(2, path), path)
    assert resumed.metrics["train/loss"] == pytest.approx(whole.metrics["train/loss"])


def test_the_loss_scale_is_resumed(tmp_path: Path) -> None:
    data = [(x, y * 1000) for x, y in batches(4)]

    def fit(**arguments: Any) -> Any:
        trainer = quiet(precision="16-mixed", device="cpu", max_epochs=arguments.pop("max_epochs"))
        trainer.fit(Net(), data, **arguments)
        return trainer

    first = fit(max_epochs=1)
    first.save_checkpoint(tmp_path / "c")
    scale = first.strategy.precision.scaler.get_scale()
    assert scale < 2**16
    scales: list[float] = []
    second = quiet(precision="16-mixed", device="cpu", max_epochs=2)
    second.on("train_start")(lambda trainer: scales.append(trainer.strategy.precision.scaler.get_scale()))
    second.fit(Net(), data, resume=tmp_path / "c")
    assert scales == [scale]


class Counts(Hook):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.batches = 0
        self.resumed: list[tuple[str, bool]] = []

    def on_train_start(self, resumed: bool) -> None:
        self.resumed.append(("train start", resumed))

    def on_train_epoch_start(self, resumed: bool, epoch: int) -> None:
        self.resumed.append((f"epoch {epoch}", resumed))

    def on_train_batch_end(self) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]


def test_hooks_get_their_own_state_back_by_name(tmp_path: Path) -> None:
    quiet(hooks=[Counts("a"), Counts("b"), SaveAt(3, tmp_path / "c")]).fit(Net(), batches(4))
    b, new = Counts("b"), Counts("new")
    quiet(hooks=[new, b]).fit(Net(), batches(4), resume=tmp_path / "c")
    assert b.batches == 4
    assert new.batches == 1


def test_a_hook_added_during_a_resumed_run_gets_its_saved_state(tmp_path: Path) -> None:
    quiet(hooks=[Counts("late"), SaveAt(2, tmp_path / "c")]).fit(Net(), batches(4))
    late = Counts("late")
    trainer = quiet()
    trainer.on("train_start")(lambda trainer: trainer.add_hook(late) and None)
    trainer.fit(Net(), batches(4), resume=tmp_path / "c")
    assert late.batches == 2 + 2


def test_starts_are_heard_again_with_the_resumed_flag(tmp_path: Path) -> None:
    first = Counts("a")
    quiet(hooks=[first, SaveAt(2, tmp_path / "c")], max_epochs=2).fit(Net(), batches(4))
    again = Counts("a")
    quiet(hooks=[again], max_epochs=2).fit(Net(), batches(4), resume=tmp_path / "c")
    assert first.resumed == [("train start", False), ("epoch 0", False), ("epoch 1", False)]
    assert again.resumed[:2] == [("train start", True), ("epoch 0", True)]


def test_the_first_batch_after_a_resume_is_the_next_one(tmp_path: Path) -> None:
    seen: list[tuple[int, int, int]] = []
    quiet(hooks=[SaveAt(6, tmp_path / "c")], max_epochs=2).fit(Net(), batches(4))
    trainer = quiet(max_epochs=2)
    trainer.on("train_batch_start")(lambda epoch, batch_idx, step: seen.append((epoch, batch_idx, step)))
    trainer.fit(Net(), batches(4), resume=tmp_path / "c")
    assert seen == [(1, 2, 6), (1, 3, 7)]


def test_no_sanity_check_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    checks: list[bool] = []

    def fit(*hooks: Any, **arguments: Any) -> None:
        trainer = quiet(hooks=hooks, num_sanity_val_steps=1)
        trainer.on("sanity_check_start")(lambda resumed: checks.append(resumed))
        trainer.fit(Net(), batches(4), batches(1), **arguments)

    fit(SaveAt(2, tmp_path / "c"))
    fit(resume=tmp_path / "c")
    assert checks == [False]


def test_a_validation_that_was_done_before_the_save_is_not_done_again(tmp_path: Path) -> None:
    quiet(hooks=[SaveAt(2, tmp_path / "c")], val_check_interval=2).fit(Net(), batches(4), batches(1))
    seen: list[int] = []
    trainer = quiet(val_check_interval=2)
    trainer.on("validation_start")(lambda step: seen.append(step))
    trainer.fit(Net(), batches(4), batches(1), resume=tmp_path / "c")
    assert seen == [4]


def test_a_checkpoint_of_weights_that_an_evaluation_loaded_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = quiet(max_epochs=2, run_dir=tmp_path, checkpoint=True)
    trainer.on("train_epoch_end")(lambda trainer: trainer.save_checkpoint(tmp_path / "checkpoints" / "early"))
    net = Net()
    trainer.fit(net, batches(2))
    trainer.save_checkpoint(tmp_path / "checkpoints" / "own")
    trainer.test(net, batches(1), checkpoint="auto")  # the newest: these are the weights that it has
    assert "has loaded into the model" not in caplog.text
    trainer.test(net, batches(1), checkpoint=tmp_path / "checkpoints" / "early")
    trainer.save_checkpoint(tmp_path / "checkpoints" / "mixed")
    assert "counters and optimizers of step 4, and the weights of" in caplog.text


def test_everything_is_in_place_when_on_checkpoint_load_is_heard(tmp_path: Path) -> None:
    quiet(hooks=[SaveAt(3, tmp_path / "c")]).fit(Rich(), batches(4))

    class Look(Hook):
        def on_checkpoint_load(self, path: Path, step: int, optimizers: list[Any], lr: float) -> None:
            self.seen = (path, step, len(optimizers[0].state_dict()["state"]), lr)

    look = Look()
    quiet(hooks=[look]).fit(Rich(), batches(4), resume=tmp_path / "c")
    assert look.seen == (tmp_path / "c", 3, 4, pytest.approx(0.1 * 0.9**3))


def test_the_order_of_restoring_is_that_of_the_contract(tmp_path: Path) -> None:
    order: list[str] = []

    class Net2(Net):
        def on_load_checkpoint(self) -> None:
            order.append("M on_load_checkpoint")

        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            order.append("M load_state_dict")
            return super().load_state_dict(*args, **kwargs)

    class Data(DataModule):
        def train_dataloader(self) -> Any:
            return batches()

        def state_dict(self) -> dict[str, Any]:
            return {"seen": 5}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            order.append(f"D load_state_dict {state['seen']}")

    class Listen(Hook):
        def setup(self) -> None:
            order.append("H setup")

        def on_load_checkpoint(self) -> None:
            order.append("H on_load_checkpoint")

        def load_state_dict(self, state: dict[str, Any]) -> None:
            order.append("H load_state_dict")

        def on_checkpoint_load(self) -> None:
            order.append("H on_checkpoint_load")

        def on_fit_start(self) -> None:
            order.append("H on_fit_start")

    trainer = quiet(hooks=[Listen()])
    trainer.fit(Net2(), Data())
    trainer.save_checkpoint(tmp_path / "c")
    order.clear()
    trainer.fit(Net2(), Data(), resume=tmp_path / "c")
    assert order == [
        "H setup",
        "M on_load_checkpoint",
        "M load_state_dict",
        "D load_state_dict 5",
        "H on_load_checkpoint",
        "H load_state_dict",
        "H on_checkpoint_load",
        "H on_fit_start",
    ]


def test_a_finished_run_trains_nothing_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = quiet(max_epochs=2)
    trainer.fit(Net(), batches())
    trainer.save_checkpoint(tmp_path / "c")
    again = quiet(max_epochs=2, hooks=[counts := Counts("a")])
    with caplog.at_level(logging.WARNING, "hookline"):
        again.fit(Net(), batches(), resume=tmp_path / "c")
    assert "Nothing to train: max_epochs=2 is reached" in caplog.text
    assert counts.resumed == []
    assert again.status == "completed"
    assert torch.equal(again.module.layer.weight, trainer.module.layer.weight)


def test_a_finished_run_continues_with_more_epochs(tmp_path: Path) -> None:
    trainer = quiet(max_epochs=1)
    trainer.fit(Net(), batches())
    trainer.save_checkpoint(tmp_path / "c")
    more = quiet(max_epochs=3)
    more.fit(Net(), batches(), resume=tmp_path / "c")
    assert more.global_step == 12


def test_something_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        quiet().fit(Net(), batches(), resume=tmp_path)


def test_another_number_of_optimizers_is_refused(tmp_path: Path) -> None:
    class Two(Net):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([self.layer.weight], lr=0.1), torch.optim.SGD([self.layer.bias], lr=0.1)]

    trainer = quiet()
    trainer.fit(Net(), batches())
    trainer.save_checkpoint(tmp_path / "c")
    with pytest.raises(CheckpointError, match="There: SGD. Here: SGD, SGD"):
        quiet(max_epochs=2).fit(Two(), batches(), resume=tmp_path / "c")


def test_a_checkpoint_asked_for_when_the_run_fails_is_written() -> None:
    saved = []

    class Rescue(Hook):
        def on_exception(self, trainer: Any) -> None:
            trainer.save_checkpoint(reason="exception")

        def on_checkpoint_save(self, path: Path, reason: str) -> None:
            saved.append((path.name, reason, path.is_dir()))

        def on_step_end(self, step: int) -> None:
            if step == 2:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        quiet(hooks=[Rescue()]).fit(Net(), batches(4))
    assert saved == [("step-2", "exception", True)]


# ---- the keys that hooks see -------------------------------------------------------------------------------------


class Keys(Hook):
    """What a hook finds in a checkpoint."""

    seen: list[str] = []
    loaded: list[str] = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = list(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = list(checkpoint)


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3}, {"seed": 1}])
def test_every_key_of_a_checkpoint_is_documented_and_there(options: dict[str, Any]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    table = page.partition("### The keys of `checkpoint`")[2].partition("```")[0]
    documented = [
        key
        for row in re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE)
        for key in re.findall(r"`(\w+)`", row)
    ]
    saves, loads = Keys(), Keys()
    trainer = quiet(hooks=[saves], **options)
    trainer.on("step_end", once=True)(lambda trainer: trainer.save_checkpoint("kept"))
    trainer.fit(Net(), batches(4), batches(1))
    assert sorted(saves.seen) == sorted(documented)
    quiet(hooks=[loads], max_epochs=2, **options).fit(Net(), batches(4), batches(1), resume="kept")
    assert set(loads.loaded) == set(documented)
