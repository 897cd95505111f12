"""Parameters that train later: which, from when, and that everything is as before afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import SavesFirstEpoch, batches, quiet
from torch import Tensor, nn
from torch.nn import functional as F

from hookline import Hook, HookError, LossError, Module, OptionError
from hookline.hooks.freeze_schedule import FreezeSchedule


class Parts(Module):
    def __init__(self, decay: float = 0.1, momentum: float = 0.0) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 2)
        self.decay, self.momentum = decay, momentum

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.head(self.backbone(batch[0])), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        trained = [each for each in self.parameters() if each.requires_grad]  # as many people write it
        return torch.optim.SGD(trained, lr=0.1, weight_decay=self.decay, momentum=self.momentum)


class Watch(Hook):
    """After each update: which parameters have changed."""

    def __init__(self) -> None:
        self.changed: list[set[str]] = []
        self.before: dict[str, Tensor] = {}
        self.means: list[float] = []

    def on_train_start(self, module: Any) -> None:
        self._look(module)

    def on_step_end(self, module: Any) -> None:
        before = self.before
        self._look(module)
        self.changed.append(
            {name.split(".")[0] for name in before if not torch.equal(before[name], self.before[name])}
        )
        self.means.append(float(module.backbone[1].running_mean.sum()))

    def _look(self, module: Any) -> None:
        self.before = {name: each.detach().clone() for name, each in module.named_parameters()}


def freeze(
    schedule: dict[str, str], net: Parts | None = None, *, epochs: int = 3, **options: Any
) -> tuple[FreezeSchedule, Watch, Parts]:
    net, hook, watch = net or Parts(), FreezeSchedule(schedule, **options), Watch()
    quiet(max_epochs=epochs, hooks=[hook, watch]).fit(net, batches(2), batches(1))
    return hook, watch, net


HEAD, ALL = {"head"}, {"head", "backbone"}


def test_a_pattern_is_frozen_until_its_epoch_weight_decay_included() -> None:
    _, watch, _ = freeze({"backbone.*": "2 epochs"})
    assert watch.changed == [HEAD, HEAD, HEAD, HEAD, ALL, ALL]


def test_or_until_its_step() -> None:
    _, watch, _ = freeze({"backbone.*": "3 steps"})
    assert watch.changed == [HEAD, HEAD, HEAD, ALL, ALL, ALL]


def test_of_several_patterns_the_latest_moment_counts() -> None:
    _, watch, _ = freeze({"backbone.*": "1 step", "backbone.0.*": "1 epoch", "*.1.*": "4 steps"})
    assert watch.changed == [HEAD, HEAD, ALL, ALL, ALL, ALL]


def test_the_first_update_of_a_thawed_parameter_is_its_gradient_alone() -> None:
    """Nothing was collected for it while it was frozen, although the optimizer has momentum."""
    net, seen = Parts(decay=0.0, momentum=0.9), []
    trainer = quiet(hooks=[FreezeSchedule({"backbone.*": "1 step"})])
    trainer.on("before_optimizer_step", after="1 step")(
        lambda: seen.append(net.backbone[0].weight.detach().clone())
    )
    trainer.on("after_optimizer_step", after="2 steps")(
        lambda: seen.append(net.backbone[0].weight + 0.1 * net.backbone[0].weight.grad)
    )
    trainer.fit(net, batches(2))
    torch.testing.assert_close(seen[0], seen[1])


def test_a_frozen_parameter_has_no_gradient_and_is_in_its_group() -> None:
    seen: list[Any] = []
    net, hook = Parts(), FreezeSchedule({"backbone.*": "9 epochs"})
    trainer = quiet(hooks=[hook])
    trainer.on("before_optimizer_step")(
        lambda module, optimizer: seen.append(
            (
                [each.grad is None for each in module.backbone.parameters()],
                len(optimizer.param_groups[0]["params"]),
            )
        )
    )
    trainer.fit(net, batches(1))
    assert seen == [([True] * 4, 6)]


def test_what_was_not_trained_before_never_is() -> None:
    net = Parts()
    net.backbone[0].bias.requires_grad_(False)
    hook, watch, _ = freeze({"backbone.*": "1 epoch"}, net)
    assert not net.backbone[0].bias.requires_grad
    assert net.backbone[0].weight.requires_grad
    assert watch.changed[-1] == ALL


@pytest.mark.parametrize("fails", [True, False])
def test_when_the_run_is_over_everything_is_as_it_was(fails: bool) -> None:
    net = Parts()
    hook = FreezeSchedule({"backbone.*": "9 epochs"}, batchnorm_eval=True)
    trainer = quiet(hooks=[hook])
    trainer.on("step_end")(lambda: 1 / 0 if fails else None)
    if fails:
        with pytest.raises(ZeroDivisionError):
            trainer.fit(net, batches(1))
    else:
        trainer.fit(net, batches(1))
    assert all(each.requires_grad for each in net.parameters())
    assert all(each.training for each in net.modules())
    assert hook.frozen == []


@pytest.mark.parametrize(("still", "distinct"), [(True, 1), (False, 2)])
def test_running_statistics_stand_still_if_told_so(still: bool, distinct: int) -> None:
    _, watch, net = freeze({"backbone.*": "1 epoch"}, batchnorm_eval=still, epochs=2)
    assert len(set(watch.means[:2])) == distinct
    assert len(set(watch.means[1:])) == 3  # from the second epoch on they move again


@pytest.mark.parametrize(("moment", "changed"), [("1 epoch", [ALL, ALL]), ("3 steps", [HEAD, ALL])])
def test_a_resumed_run_knows_who_is_frozen(moment: str, changed: list[set[str]]) -> None:
    saver = SavesFirstEpoch()
    quiet(hooks=[FreezeSchedule({"backbone.*": moment}), saver]).fit(Parts(), batches(2))
    watch = Watch()
    quiet(max_epochs=2, hooks=[FreezeSchedule({"backbone.*": moment}), watch]).fit(
        Parts(), batches(2), resume=saver.path
    )
    assert watch.changed == changed


def test_a_pattern_that_fits_nothing_is_refused_before_the_first_step() -> None:
    trainer = quiet(hooks=[FreezeSchedule({"backbon.*": "1 epoch"})])
    with pytest.raises(HookError, match=r"'backbon\.\*' matches no parameter of Parts.*backbone.0.weight"):
        trainer.fit(Parts(), batches(1))
    assert trainer.global_step == 0


def test_a_parameter_without_an_optimizer_is_refused() -> None:
    class Forgets(Parts):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.head.parameters(), lr=0.1)

    with pytest.raises(HookError, match=r"'backbone.0.weight' is in no optimizer"):
        quiet(hooks=[FreezeSchedule({"backbone.*": "1 epoch"})]).fit(Forgets(), batches(1))


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({}, "must be a mapping"),
        ("backbone.*", "must be a mapping"),
        ({"a": 3}, "must say steps or epochs"),
        ({"a": "3"}, "must say steps or epochs"),
        ({"a": "3 minutes"}, "is not a moment.*units: steps, epochs"),
        ({"a": "3 epoks"}, "unknown unit 'epoks'"),
        ({"a": "-1 steps"}, "is not a number"),
    ],
)
def test_wrong_schedules_are_refused(schedule: Any, message: str) -> None:
    with pytest.raises((OptionError, HookError), match=message):
        FreezeSchedule(schedule)


@pytest.mark.parametrize("schedule", [{"*": "2 epochs"}, {"backbone.*": "1 epoch", "head.*": "5 steps"}])
def test_a_schedule_that_leaves_nothing_to_train_is_refused_before_the_first_step(
    schedule: dict[str, str],
) -> None:
    net, watch = Parts(), Watch()
    trainer = quiet(hooks=[FreezeSchedule(schedule), watch])
    with pytest.raises(
        HookError, match="has frozen backbone.0.weight, .* and 1 more. Parts has no other trainable parameter"
    ) as caught:
        trainer.fit(net, batches(2))
    assert all(pattern in str(caught.value) for pattern in schedule)
    assert trainer.state.batches_seen == 0
    assert all(each.requires_grad for each in net.parameters())


def test_a_loss_of_frozen_parameters_only_names_the_schedule() -> None:
    class Unused(Parts):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(1, 1)

    with pytest.raises(LossError) as caught:
        freeze({"backbone.*": "2 epochs", "head.*": "2 epochs"}, Unused())
    (note,) = [each for each in caught.value.__notes__ if "FreezeSchedule" in each]
    assert "'head.*': '2 epochs'" in note and "has frozen backbone.0.weight" in note
    assert "does the loss depend on anything else?" in note
