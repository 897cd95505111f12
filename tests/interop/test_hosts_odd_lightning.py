"""Updates of Lightning's that are out of the ordinary are told as what they are."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as lightning
import pytest
import torch
from interop.hosted import DATA, VAL, LightningNet, by_hand, lightning_trainer, loader
from lightning.pytorch.plugins import MixedPrecision

import hookline
from hookline import Hook
from hookline.hooks import LRSchedule, SlurmRequeue

pytestmark = pytest.mark.filterwarnings("default")


class Story(Hook):
    """Updates with what hooks are told of them."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []
        self.cleared = 0

    def on_before_zero_grad(self) -> None:
        self.cleared += 1

    def on_train_batch_end(self, loss: float | None) -> None:
        self.told.append(loss if loss is None else round(loss, 3))

    def on_step_end(self, step: int, loss: float, grad_norm: float) -> None:
        self.told.append((step, round(loss, 3)))

    def on_step_skipped(self, reason: str) -> None:
        self.told.append(reason)


class Noting(LightningNet):
    """Knows the losses of its own; one batch is as `odd` makes it."""

    def __init__(self, odd: Any = None) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.odd = odd

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        loss = self.odd(loss) if self.odd is not None and batch_idx == 1 else loss
        self.losses.append(float("nan") if loss is None else round(loss.item(), 3))
        return loss


def fit(net: Any, **options: Any) -> tuple[Story, Any]:
    story = Story()
    callback = hookline.hosts.lightning([story])
    lightning_trainer([callback], max_epochs=1, **options).fit(net, loader(DATA[:3]))
    return story, callback.line


def half() -> Any:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=64.0))


def test_with_a_scaler_losses_are_the_module_s_and_an_overflow_is_a_skipped_step() -> None:
    net = Noting(odd=lambda loss: loss * float("inf"))
    story, line = fit(net, plugins=[half()], gradient_clip_val=1.0)
    first, last = net.losses[0], net.losses[2]
    assert story.told == [first, (1, first), "nonfinite", float("inf"), last, (2, last)]
    assert line.global_step == 2


@pytest.mark.parametrize("plugins", [[], [half()]])
def test_a_training_step_that_returns_none_is_no_update(plugins: list[Any]) -> None:
    net = Noting(odd=lambda loss: None)
    story, line = fit(net, plugins=plugins)
    assert story.told[2:4] == ["no_loss", None] and line.global_step == 2
    assert [each[0] for each in story.told if isinstance(each, tuple)] == [1, 2]


def test_lbfgs_is_told_of_with_the_loss_that_its_step_began_with() -> None:
    class Searches(Noting):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    net = Searches()
    story, _ = fit(net)
    assert len(net.losses) == 9
    first = net.losses[::3]
    assert story.told == [first[0], (1, first[0]), first[1], (2, first[1]), first[2], (3, first[2])]
    assert story.cleared == 3


def test_another_run_begins_without_the_metrics_of_the_one_before() -> None:
    class Looks(Hook):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[list[str]] = []

        def on_train_start(self, state: Any) -> None:
            self.seen.append(sorted(state.metrics))

        def on_train_epoch_end(self, metrics: Any) -> None:
            self.seen.append(sorted(metrics))

    looks = Looks()
    callback = hookline.hosts.lightning([looks])
    lightning_trainer([callback], max_epochs=1).fit(LightningNet(), loader(DATA), loader(VAL))
    lightning_trainer([callback], max_epochs=1).fit(LightningNet(), loader(DATA))
    assert looks.seen == [[], ["train/loss", "val/loss"], [], ["train/loss"]]


@pytest.mark.parametrize("options", [{"max_epochs": 0}, {"limit_train_batches": 0}])
def test_a_run_with_nothing_to_train_begins_and_ends_as_at_home(options: dict[str, Any]) -> None:
    class Ends(Hook):
        def __init__(self) -> None:
            super().__init__()
            self.heard: list[str] = []

        def on_fit_start(self, optimizers: list[Any]) -> None:
            self.heard.append(f"start with {len(optimizers)}")

        def on_train_start(self) -> None:
            self.heard.append("train")

        def on_fit_end(self) -> None:
            self.heard.append("end")

    hook = Ends()
    callback = hookline.hosts.lightning([hook])
    lightning_trainer([callback], **options).fit(LightningNet(), loader(DATA))
    assert hook.heard == ["start with 1", "end"] and callback.line.status == "completed"


def test_a_schedule_knows_how_many_updates_lightning_will_make() -> None:
    class Rates(Hook):
        def __init__(self) -> None:
            super().__init__()
            self.rates: list[float] = []

        def on_step_end(self, lr: float) -> None:
            self.rates.append(lr)

    rates = Rates()
    callback = hookline.hosts.lightning([LRSchedule("linear"), rates])
    lightning_trainer([callback], max_epochs=2, window=5).fit(LightningNet(), loader(DATA))
    assert rates.rates == pytest.approx([0.1, 0.05])


def test_a_built_in_hook_that_can_do_nothing_is_refused_when_it_is_added() -> None:
    with pytest.raises(hookline.HookError, match="Lightning's, which requeues by itself"):
        hookline.hosts.lightning([SlurmRequeue()])
    with pytest.raises(
        hookline.HookError, match="always writes the learning rate; choose it by lr_scheduler_type="
    ):
        hookline.hosts.transformers([LRSchedule("linear")])


def test_lightning_s_own_early_stopping_ends_a_loop_that_is_written_by_hand() -> None:
    line = by_hand([lightning.callbacks.EarlyStopping("val/loss", patience=1, min_delta=10.0)], epochs=9)
    assert line.status == "stopped" and line.state.epochs_seen == 2
