"""Epochs, when validation is due, what is limited, and how a run ends."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet
from torch.utils.data import DataLoader, TensorDataset

from hookline import END_EPOCH, Hook, OptionError, Recorder, StopTraining, on
from hookline.hooks import ModelCheckpoint


class Stream:
    """A loader that cannot tell its length."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


class Diary(Hook):
    """Which training batches ran, and after which of them validation did."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, int]] = []
        self.validated_after: list[tuple[int, int]] = []
        self.validation_batches = 0

    def on_train_batch_end(self, epoch: int, batch_idx: int) -> None:
        self.batches.append((epoch, batch_idx))

    def on_validation_start(self) -> None:
        self.validated_after.append(self.batches[-1] if self.batches else (-1, -1))

    def on_validation_batch_end(self) -> None:
        self.validation_batches += 1


def diary(loader: Any = None, val: Any = None, **options: Any) -> Diary:
    """The diary of a run with these options."""
    hook = Diary()
    quiet(hooks=[hook], **options).fit(
        Net(), batches(4) if loader is None else loader, batches(2) if val is None else val
    )
    return hook


# ---- the order of events -----------------------------------------------------------------------------------------


class HearsAll(Hook):
    def on_fit_start(self) -> None: ...
    def on_sanity_check_start(self) -> None: ...
    def on_sanity_check_end(self) -> None: ...
    def on_train_start(self) -> None: ...
    def on_train_epoch_start(self) -> None: ...
    def on_train_batch_start(self) -> None: ...
    def on_before_zero_grad(self) -> None: ...
    def on_before_backward(self) -> None: ...
    def on_after_backward(self) -> None: ...
    def on_before_optimizer_step(self) -> None: ...
    def on_gradient_clip(self) -> None: ...
    def on_after_optimizer_step(self) -> None: ...
    def on_train_batch_end(self) -> None: ...
    def on_step_end(self) -> None: ...
    def on_validation_start(self) -> None: ...
    def on_validation_end(self) -> None: ...
    def on_train_epoch_end(self) -> None: ...
    def on_train_end(self) -> None: ...
    def on_fit_end(self) -> None: ...
    def setup(self) -> None: ...
    def teardown(self) -> None: ...


def test_a_run_fires_its_events_in_the_order_of_the_contract() -> None:
    trainer = quiet(
        hooks=[HearsAll()], num_sanity_val_steps=1, gradient_clip_val=1.0, accumulate_grad_batches=2
    )
    with Recorder(trainer) as recorder:
        trainer.fit(Net(), batches(2), batches(1))
    heard = [each.event for each in recorder.calls if each.receiver == "H"]
    assert heard == [
        "setup",
        "on_fit_start",
        "on_sanity_check_start",
        "on_validation_start",
        "on_validation_end",
        "on_sanity_check_end",
        "on_train_start",
        "on_train_epoch_start",
        "on_train_batch_start",
        "on_before_zero_grad",
        "on_before_backward",
        "on_after_backward",
        "on_train_batch_end",
        "on_train_batch_start",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_gradient_clip",
        "on_after_optimizer_step",
        "on_train_batch_end",
        "on_step_end",
        "on_validation_start",
        "on_validation_end",
        "on_train_epoch_end",
        "on_train_end",
        "on_fit_end",
        "teardown",
    ]


# ---- when validation is due --------------------------------------------------------------------------------------


def test_validation_runs_at_the_end_of_every_epoch() -> None:
    assert diary(max_epochs=2).validated_after == [(0, 3), (1, 3)]


def test_validation_runs_at_the_end_of_an_epoch_of_unknown_length() -> None:
    assert diary(Stream(batches(4)), max_epochs=2).validated_after == [(0, 3), (1, 3)]


def test_a_whole_val_check_interval_counts_batches() -> None:
    assert diary(batches(5), val_check_interval=2).validated_after == [(0, 1), (0, 3)]
    assert diary(Stream(batches(5)), val_check_interval=2).validated_after == [(0, 1), (0, 3)]


def test_a_fractional_val_check_interval_is_a_share_of_the_epoch() -> None:
    assert diary(batches(4), val_check_interval=0.5).validated_after == [(0, 1), (0, 3)]
    assert diary(batches(4), val_check_interval=0.01).validated_after == [(0, i) for i in range(4)]


def test_a_fractional_val_check_interval_needs_a_length() -> None:
    with pytest.raises(
        OptionError,
        match=r"val_check_interval=0.5 is a fraction of an epoch, but the training loader has no length",
    ):
        diary(Stream(batches(4)), val_check_interval=0.5)


def test_check_val_every_n_epoch_leaves_epochs_out() -> None:
    assert diary(max_epochs=5, check_val_every_n_epoch=2).validated_after == [(1, 3), (3, 3)]


def test_both_intervals_together_validate_within_every_nth_epoch() -> None:
    got = diary(max_epochs=2, check_val_every_n_epoch=2, val_check_interval=2)
    assert got.validated_after == [(1, 1), (1, 3)]


def test_an_epoch_that_a_hook_ends_early_is_still_validated_and_closed() -> None:
    ended: list[int] = []

    class EndEarly(Diary):
        def on_train_batch_start(self, batch_idx: int) -> Any:
            return END_EPOCH if batch_idx == 2 else None

        def on_train_epoch_end(self, epoch: int, metrics: Any) -> None:
            assert "val/loss" in metrics
            ended.append(epoch)

    hook = EndEarly()
    quiet(hooks=[hook], max_epochs=2).fit(Net(), batches(5), batches(2))
    assert hook.validated_after == [(0, 1), (1, 1)]
    assert ended == [0, 1]


def test_validation_comes_before_the_epochs_end_and_its_metrics_are_there() -> None:
    class Look(Hook):
        def on_train_epoch_end(self, metrics: Any) -> None:
            self.metrics = dict(metrics)

    look = Look()
    quiet(hooks=[look]).fit(Net(), batches(), batches(2))
    assert {"train/loss", "val/loss"} <= set(look.metrics)


def test_limit_val_batches_zero_switches_validation_off() -> None:
    assert diary(limit_val_batches=0, num_sanity_val_steps=2).validated_after == []


# ---- limits ------------------------------------------------------------------------------------------------------


def test_limits_take_a_number_of_batches_or_a_share() -> None:
    assert len(diary(limit_train_batches=3).batches) == 3
    assert len(diary(limit_train_batches=0.5).batches) == 2
    assert len(diary(Stream(batches(4)), limit_train_batches=3).batches) == 3
    assert diary(val=batches(4), limit_val_batches=3).validation_batches == 3
    assert diary(val=batches(4), limit_val_batches=0.5).validation_batches == 2


def test_a_share_of_a_loader_without_length_is_refused() -> None:
    with pytest.raises(OptionError, match="a fraction needs a loader with a length"):
        diary(Stream(batches(4)), limit_train_batches=0.5)


def test_limit_train_batches_zero_trains_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    before = copy.deepcopy(net.state_dict())
    with caplog.at_level(logging.WARNING, "hookline"):
        quiet(limit_train_batches=0).fit(net, batches())
    assert "limit_train_batches=0" in caplog.text
    assert torch.equal(net.layer.weight, before["layer.weight"])


def test_overfit_batches_repeats_the_same_batches_of_a_shuffled_loader() -> None:
    seen: list[list[float]] = []

    @on("train_batch_start")
    def keep(batch: Any) -> None:
        seen.append(batch[0].flatten().tolist())

    data = DataLoader(
        TensorDataset(torch.arange(40.0).reshape(10, 4), torch.zeros(10, 2)), batch_size=2, shuffle=True
    )
    quiet(hooks=[keep], overfit_batches=2, max_epochs=3).fit(Net(lr=1e-6), data)
    assert len(seen) == 6
    assert seen[:2] == seen[2:4] == seen[4:]


def test_fast_dev_run_does_a_few_batches_of_everything_and_writes_nothing(tmp_path: Any) -> None:
    hook = Diary()
    trainer = quiet(
        hooks=[hook], fast_dev_run=2, logger=True, max_epochs=50, max_steps=50, num_sanity_val_steps=5
    )
    trainer.fit(Net(), batches(9), batches(9))
    assert hook.batches == [(0, 0), (0, 1)]
    assert hook.validated_after == [(0, 1)]
    assert hook.validation_batches == 2
    assert list(tmp_path.iterdir()) == []


def test_a_trial_run_leaves_no_checkpoint_and_begins_anew_where_a_run_has_ended(tmp_path: Any) -> None:
    keep = [ModelCheckpoint(every_n_train_steps=1), ModelCheckpoint("val/loss", dirpath="best")]
    quiet(hooks=keep, fast_dev_run=2, run_dir=tmp_path / "run").fit(
        Net(), batches(3), batches(1), resume="auto"
    )
    assert not list(tmp_path.rglob("manifest.json"))
    quiet(hooks=[ModelCheckpoint(every_n_train_steps=1)], run_dir=tmp_path / "run").fit(Net(), batches(3))
    kept = {each: each.stat().st_mtime_ns for each in tmp_path.rglob("manifest.json")}
    trial = quiet(hooks=[ModelCheckpoint(every_n_train_steps=1)], fast_dev_run=2, run_dir=tmp_path / "run")
    trial.fit(Net(), batches(3), resume="auto")
    assert trial.global_step == 2 and not trial.state.resumed
    assert kept and {each: each.stat().st_mtime_ns for each in tmp_path.rglob("manifest.json")} == kept


def test_fast_dev_run_true_is_one_batch() -> None:
    assert diary(fast_dev_run=True).batches == [(0, 0)]


# ---- how long ----------------------------------------------------------------------------------------------------


def test_max_steps_ends_the_run_in_the_middle_of_an_epoch() -> None:
    hook = diary(max_steps=6, max_epochs=None)
    assert hook.batches[-1] == (1, 1)


def test_max_steps_counts_updates_not_batches() -> None:
    assert len(diary(max_steps=3, max_epochs=None, accumulate_grad_batches=2).batches) == 6


def test_max_epochs_ends_a_run_that_has_steps_left() -> None:
    assert len(diary(max_steps=100, max_epochs=2).batches) == 8


def test_a_run_without_an_epoch_limit_continues_until_it_is_stopped() -> None:
    @on("step_end", when=lambda step: step == 21)
    def enough(trainer: Any) -> None:
        trainer.stop("enough")

    trainer = quiet(max_epochs=-1, hooks=[enough])
    trainer.fit(Net(), batches(4))
    assert trainer.global_step == 21


def test_max_time_ends_the_run() -> None:
    class AnHourPasses(Hook):
        passed = 0.0

        def setup(self, state: Any) -> None:
            state.setup.clock = lambda: time.monotonic() + self.passed

        def on_step_end(self, step: int) -> None:
            self.passed += 3600.0 * (step == 3)

    trainer = quiet(max_time=1800.0, max_epochs=None, hooks=[AnHourPasses()])
    trainer.fit(Net(), batches(2))
    assert trainer.global_step == 3
    assert trainer.status == "stopped"
    assert "max_time" in trainer.state.stop_reason


def test_min_epochs_puts_off_a_request_to_stop() -> None:
    @on("step_end", once=True)
    def stop(trainer: Any) -> None:
        trainer.should_stop = True

    trainer = quiet(min_epochs=2, max_epochs=5, hooks=[stop])
    trainer.fit(Net(), batches(4))
    assert trainer.global_step == 8
    assert trainer.status == "stopped"


def test_min_steps_puts_off_a_request_to_stop_also_over_epochs() -> None:
    @on("step_end", once=True)
    def stop(trainer: Any) -> None:
        trainer.should_stop = True

    trainer = quiet(min_steps=6, max_epochs=5, hooks=[stop])
    trainer.fit(Net(), batches(4))
    assert trainer.global_step == 6
    assert trainer.status == "stopped"


# ---- stopping ----------------------------------------------------------------------------------------------------


def _by_flag(trainer: Any) -> None:
    trainer.should_stop = True


def _by_call(trainer: Any) -> None:
    trainer.stop("because")


def _by_raising(trainer: Any) -> None:
    raise StopTraining("because")


@pytest.mark.parametrize("how", [_by_flag, _by_call, _by_raising])
@pytest.mark.parametrize(
    "event",
    [
        "train_batch_start",
        "before_backward",
        "after_backward",
        "before_optimizer_step",
        "after_optimizer_step",
        "train_batch_end",
        "step_end",
    ],
)
def test_any_hook_can_stop_the_run_at_the_next_batch_boundary(how: Callable[[Any], None], event: str) -> None:
    def ask(trainer: Any) -> None:
        if trainer.state.batch_idx == 1:
            how(trainer)

    ends: list[str] = []
    trainer = quiet(max_epochs=5)
    trainer.on(event)(ask)
    trainer.on("train_end")(lambda status: ends.append(status))
    trainer.fit(Net(), batches(4))
    assert trainer.global_step == 2
    assert trainer.status == "stopped"
    assert ends == ["stopped"]


@pytest.mark.parametrize(
    "event", ["validation_start", "validation_batch_end", "validation_end", "train_epoch_end"]
)
def test_a_hook_can_stop_the_run_during_validation_and_at_the_epochs_end(event: str) -> None:
    trainer = quiet(max_epochs=5)
    trainer.on(event)(_by_raising)
    trainer.fit(Net(), batches(4), batches(2))
    assert trainer.global_step == 4
    assert trainer.state.stop_reason == "because"
    assert trainer.status == "stopped"


def test_the_training_step_can_stop_the_run() -> None:
    class Stopping(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                raise StopTraining("seen enough")
            return super().training_step(batch, batch_idx)

    trainer = quiet(max_epochs=5)
    trainer.fit(Stopping(), batches(4))
    assert trainer.global_step == 2
    assert (trainer.status, trainer.state.stop_reason) == ("stopped", "seen enough")


def test_the_validation_step_can_stop_the_run() -> None:
    class Stopping(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            raise StopTraining("seen enough")

    trainer = quiet(max_epochs=5)
    trainer.fit(Stopping(), batches(4), batches(2))
    assert trainer.global_step == 4
    assert (trainer.status, trainer.state.stop_reason) == ("stopped", "seen enough")
    assert trainer.module.training


def test_a_stopped_epoch_still_has_its_end_and_a_last_validation() -> None:
    heard: list[str] = []
    trainer = quiet(max_epochs=5)
    trainer.on("step_end", when=lambda step: step == 2)(_by_flag)
    trainer.on("validation_end")(lambda: heard.append("validation"))
    trainer.on("train_epoch_end")(lambda: heard.append("epoch end"))
    trainer.on("train_end")(lambda: heard.append("train end"))
    trainer.fit(Net(), batches(4), batches(2))
    assert heard == ["validation", "epoch end", "train end"]


def test_a_run_stopped_at_its_start_trains_nothing_and_still_has_its_end() -> None:
    ends: list[str] = []
    trainer = quiet()
    trainer.on("train_start")(_by_raising)
    trainer.on("train_end")(lambda status: ends.append(status))
    trainer.fit(Net(), batches(4))
    assert trainer.global_step == 0
    assert ends == ["stopped"]


def test_a_run_stopped_before_training_starts_ends_as_stopped() -> None:
    trainer = quiet()
    trainer.on("fit_start")(_by_raising)
    trainer.fit(Net(), batches(4))
    assert trainer.global_step == 0
    assert (trainer.status, trainer.state.stop_reason) == ("stopped", "because")


# ---- loaders that yield nothing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("loader", [[], Stream([])], ids=["known length", "unknown length"])
def test_an_empty_training_loader_is_refused(loader: Any) -> None:
    with pytest.raises(OptionError, match=r"training loader 'train' (is empty|yielded no batch in epoch 0)"):
        quiet().fit(Net(), loader)


def test_a_generator_that_is_exhausted_in_the_second_epoch_is_refused() -> None:
    with pytest.raises(OptionError, match=r"no batch in epoch 1; a generator can be iterated over only once"):
        quiet(max_epochs=2).fit(Net(), (b for b in batches()))


def test_a_generator_serves_for_one_epoch() -> None:
    trainer = quiet()
    trainer.fit(Net(), (b for b in batches()))
    assert trainer.global_step == 4


# ---- the sanity check --------------------------------------------------------------------------------------------


class Noisy(Net):
    """Draws random numbers in validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        torch.rand(7)
        return super().validation_step(batch, batch_idx)


def test_the_sanity_check_leaves_no_metrics() -> None:
    seen: list[set[str]] = []
    trainer = quiet(num_sanity_val_steps=2, max_steps=1, check_val_every_n_epoch=2)
    trainer.on("sanity_check_end")(lambda state: seen.append(set(state.metrics)))
    trainer.on("train_start")(lambda state: seen.append(set(state.metrics)))
    metrics = trainer.fit(Net(), batches(), batches(2))
    assert seen == [{"val/loss"}, set()]
    assert set(metrics) == {"train/loss"}


def test_a_stop_in_the_sanity_check_says_where_it_was_requested(caplog: pytest.LogCaptureFixture) -> None:
    trainer = quiet(num_sanity_val_steps=1)
    trainer.on("validation_end")(lambda trainer: trainer.stop("good enough"))
    trainer.fit(Net(), batches(), batches(2))
    assert (trainer.status, trainer.global_step) == ("stopped", 0)
    assert "Nothing to train: good enough (requested in the sanity check" in caplog.text


def test_the_sanity_check_does_not_move_the_random_streams() -> None:
    def first_numbers(steps: int) -> torch.Tensor:
        torch.manual_seed(5)
        drawn: list[torch.Tensor] = []
        trainer = quiet(num_sanity_val_steps=steps)
        trainer.on("train_start")(lambda: drawn.append(torch.rand(3)))
        data = DataLoader(TensorDataset(torch.randn(6, 4), torch.randn(6, 2)), batch_size=2, shuffle=True)
        trainer.fit(Noisy(), batches(), data)
        return drawn[0]

    assert torch.equal(first_numbers(0), first_numbers(2))


def test_the_sanity_check_does_as_many_batches_as_it_is_told() -> None:
    def sanity_batches(steps: int) -> int:
        count = [0]

        class Count(Hook):
            def on_validation_batch_end(self, sanity_checking: bool) -> None:
                count[0] += sanity_checking

        quiet(num_sanity_val_steps=steps, hooks=[Count()]).fit(Net(), batches(), batches(4))
        return count[0]

    assert [sanity_batches(steps) for steps in (0, 2, -1)] == [0, 2, 4]


def test_a_broken_validation_is_found_before_any_training() -> None:
    class Broken(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            raise ZeroDivisionError("in validation")

    trainer = quiet(num_sanity_val_steps=2)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Broken(), batches(), batches(2))
    assert trainer.state.batches_seen == 0


# ---- metrics -----------------------------------------------------------------------------------------------------


def test_train_and_val_loss_are_there_without_being_asked_for_and_weighted_by_batch_size() -> None:
    net = Net(lr=0.0)
    big, small = batches(1, size=6)[0], batches(1, size=2)[0]
    metrics = quiet().fit(net, [big, small], [big, small])
    losses = [net.training_step(b, 0).item() for b in (big, small)]
    mean = (6 * losses[0] + 2 * losses[1]) / 8
    assert losses[0] != pytest.approx(losses[1])
    assert metrics["train/loss"] == pytest.approx(mean)
    assert metrics["val/loss"] == pytest.approx(mean)


def test_every_epochs_mean_is_its_own() -> None:
    means: list[float] = []
    trainer = quiet(max_epochs=3)
    trainer.on("train_epoch_end")(lambda metrics: means.append(metrics["train/loss"]))
    net = Net()
    twin = copy.deepcopy(net)
    trainer.fit(net, batches())
    optimizer = twin.configure_optimizers()
    for mean in means:
        losses = []
        for batch in batches():
            optimizer.zero_grad()
            loss = twin.training_step(batch, 0)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert mean == pytest.approx(sum(losses) / 4)


def test_epoch_counts_from_zero_and_batch_idx_restarts() -> None:
    assert diary(batches(2), max_epochs=2).batches == [(0, 0), (0, 1), (1, 0), (1, 1)]
