"""The learning rate by schedule: its course, its minimum, warm-up, and living with others who change it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet

from hookline import Hook, HookError, OptionError
from hookline.config import load_config
from hookline.hooks.lr_schedule import SCHEDULES, LRSchedule, register_schedule


class Rates(Hook):
    """The rate that every update used."""

    def __init__(self) -> None:
        self.used: list[float] = []

    def on_step_end(self, lr: float) -> None:
        self.used.append(round(lr, 6))


def rates(
    schedule: Any = "cosine",
    *hooks: Any,
    net: Any = None,
    trainer: dict[str, Any] | None = None,
    **options: Any,
) -> list[float]:
    """A run of 2 epochs of 4 batches that begins with a learning rate of 1."""
    seen = Rates()
    runner = quiet(
        **{"max_epochs": 2, "hooks": [LRSchedule(schedule, **options), *hooks, seen], **(trainer or {})}
    )
    runner.fit(net or Net(lr=1.0), batches(4), batches(1))
    return seen.used


@pytest.mark.parametrize(
    ("name", "course"),
    [
        ("constant", [1.0] * 8),
        ("linear", [1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]),
        ("cosine", [round(0.5 * (1 + math.cos(math.pi * n / 8)), 6) for n in range(8)]),
        ("polynomial", [round((1 - n / 8) ** 2, 6) for n in range(8)]),
        ("rex", [round((1 - n / 8) / (1 - n / 16), 6) for n in range(8)]),
    ],
)
def test_the_course_over_the_whole_run(name: str, course: list[float]) -> None:
    assert rates(name) == course


def test_options_of_a_schedule() -> None:
    assert rates("polynomial", power=1.0) == rates("linear")
    assert rates("wsd", decay_fraction=0.5) == [1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]


def test_warm_up_and_a_minimum() -> None:
    assert rates("linear", warmup=4, min_lr_ratio=0.2) == [0.2, 0.4, 0.6, 0.8, 1.0, 0.8, 0.6, 0.4]
    assert rates("constant", warmup=1) == [0.5, *[1.0] * 7]


def test_a_given_total_ends_at_the_minimum_and_stays() -> None:
    assert rates("linear", total=4, min_lr_ratio=0.1)[4:] == [0.1] * 4


def test_by_epochs() -> None:
    assert rates("linear", interval="epoch", total=4) == [1.0] * 4 + [0.75] * 4
    assert rates("linear", interval="epoch") == [1.0] * 4 + [0.5] * 4


def test_by_a_function_of_step_epoch_or_total() -> None:
    assert rates(lambda step: 1 / (1 + step))[:3] == [1.0, 0.5, 0.333333]
    assert rates(lambda epoch: 0.1**epoch) == [1.0] * 4 + [0.1] * 4
    assert rates(lambda step, total, low=0.5: max(low, 1 - step / total))[-1] == 0.5


@pytest.fixture
def forget() -> Iterator[None]:
    known = dict(SCHEDULES)
    yield
    SCHEDULES.clear()
    SCHEDULES.update(known)


def test_a_schedule_of_ones_own_by_name(forget: None) -> None:
    @register_schedule("stairs")
    def stairs(t: float, steps: int = 2) -> float:
        return 1 - math.floor(t * steps) / steps

    assert rates("stairs") == [1.0] * 4 + [0.5] * 4
    assert rates("stairs", steps=4)[2] == 0.75
    with pytest.raises(OptionError, match="'stairs' already"):
        register_schedule("stairs")(stairs)
    with pytest.raises(OptionError, match="'cosine' already"):
        register_schedule("cosine")(stairs)
    with pytest.raises(OptionError, match="first parameter is `t`"):
        register_schedule("other")(lambda x: 1.0)


def test_steps_are_updates_not_batches() -> None:
    assert rates("linear", trainer={"accumulate_grad_batches": 2}) == [1.0, 0.75, 0.5, 0.25]


def test_each_group_keeps_its_own_proportion() -> None:
    class Groups(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(
                [{"params": [self.layer.weight], "lr": 1.0}, {"params": [self.layer.bias], "lr": 0.1}]
            )

    seen: list[list[float]] = []
    trainer = quiet(hooks=[LRSchedule("linear")])
    trainer.on("after_optimizer_step")(
        lambda optimizer: seen.append([round(each["lr"], 6) for each in optimizer.param_groups])
    )
    trainer.fit(Groups(), batches(4))
    assert seen == [[1.0, 0.1], [0.75, 0.075], [0.5, 0.05], [0.25, 0.025]]


def test_a_hook_that_changes_the_rate_scales_the_schedule() -> None:
    class Halve(Hook):
        def on_step_end(self, step: int, optimizers: Any) -> None:
            if step == 2:
                optimizers[0].param_groups[0]["lr"] *= 0.5

    assert rates("linear", Halve()) == [
        1.0,
        0.875,
        *[each / 2 for each in (0.75, 0.625, 0.5, 0.375, 0.25, 0.125)],
    ]


def test_reduce_on_plateau_scales_it_too() -> None:
    class Plateau(Net):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, factor=0.1, patience=0, threshold=1e9
            )
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "train/loss"}}

    used = rates("constant", net=Plateau(lr=1.0), trainer={"max_epochs": 3})
    assert used == [1.0] * 4 + [0.1] * 4 + [0.01] * 4


def test_a_scheduler_with_a_course_of_its_own_is_refused() -> None:
    class Both(Net):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    with pytest.raises(HookError, match="LRSchedule and StepLR would both write"):
        rates("linear", net=Both())


class Save(Hook):
    def on_step_end(self, trainer: Any, step: int) -> None:
        if step == 3:
            trainer.save_checkpoint()

    def on_checkpoint_save(self, path: Any, reason: str) -> None:
        if reason == "manual":  # not the run's last state
            self.path = path


def test_a_resumed_run_continues_in_its_course_and_says_when_more_epochs_change_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    saver, seen = Save(), Rates()
    whole = rates("cosine", saver, warmup=2)
    trainer = quiet(max_epochs=2, hooks=[LRSchedule("cosine", warmup=2), seen])
    trainer.fit(Net(lr=1.0), batches(4), batches(1), resume=saver.path)
    assert seen.used == whole[3:]
    assert "LRSchedule" not in caplog.text
    trainer = quiet(max_epochs=3, hooks=[LRSchedule("cosine", warmup=2)])
    trainer.fit(Net(lr=1.0), batches(4), batches(1), resume=saver.path)
    assert "the run has 12 steps now; when it was saved, it had 8" in caplog.text
    assert "total=8" in caplog.text


def test_a_second_fit_of_the_same_optimizer_begins_anew() -> None:
    net = torch.nn.Linear(4, 2)
    optimizer, seen = torch.optim.SGD(net.parameters(), lr=1.0), Rates()
    trainer = quiet(hooks=[LRSchedule("linear"), seen])
    for _ in range(2):
        trainer.fit(net, batches(2), loss=torch.nn.functional.mse_loss, optimizer=optimizer)
    assert seen.used == [1.0, 0.5, 1.0, 0.5]


def test_a_warm_up_can_be_a_fraction_of_the_run() -> None:
    for fraction, steps in ((0.5, 4), (0.1, 1), (0.3, 2), (0.99, 7), (0.01, 0), (0.0, 0)):
        assert rates("cosine", warmup=fraction) == rates("cosine", warmup=steps), fraction
    assert rates("constant", warmup=0.25) == rates("constant", warmup=2)  # which needs no total otherwise
    assert rates("linear", warmup=0.2, total=20) == rates("linear", warmup=4, total=20)
    assert rates("linear", warmup=0.5, interval="epoch") == rates("linear", warmup=1, interval="epoch")
    assert rates("cosine", warmup=0.9, trainer={"fast_dev_run": 3}) == rates(
        "cosine", warmup=2, trainer={"fast_dev_run": 3}
    )
    with pytest.raises(OptionError, match="pass total="):
        rates("constant", warmup=0.1, trainer={"max_epochs": -1, "max_time": 60})


@pytest.mark.parametrize(("text", "read"), [("1", 1), ("0.1", 0.1), ("30", 30)])
def test_a_configuration_tells_a_fraction_from_a_number(text: str, read: int | float) -> None:
    Path("run.toml").write_text(
        f"module = 'hookline.testing.TinyModule'\n[hooks.lr]\nclass_path = 'LRSchedule'\nwarmup = {text}\n"
    )
    for overrides in ([], [f"--hooks.lr.warmup={text}"]):
        hook = load_config("run.toml", overrides).build().hooks["lr"]
        assert (hook.warmup, type(hook.warmup)) == (read, type(read))


def test_a_run_without_an_end_needs_a_total() -> None:
    with pytest.raises(OptionError, match="pass total="):
        rates("cosine", trainer={"max_epochs": -1, "max_time": 60})


def test_a_warm_up_longer_than_the_run_is_refused() -> None:
    advice = "Pass a shorter warmup, or train for more than 8 steps"
    with pytest.raises(OptionError, match=f"warmup=8 leaves nothing of the run's 8 steps. {advice}"):
        rates("cosine", warmup=8)


@pytest.mark.parametrize(("trial", "used"), [(True, [1.0]), (3, [0.333333, 0.666667, 1.0])])
def test_a_trial_run_starts_with_a_warm_up_for_the_long_run(trial: int, used: list[float]) -> None:
    assert rates("cosine", warmup=10, trainer={"fast_dev_run": trial}) == used


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_trial_run_shortens_the_warm_up_only_for_itself(interval: Any) -> None:
    schedule, seen = LRSchedule("linear", warmup=3, interval=interval), Rates()
    quiet(hooks=[schedule, seen], fast_dev_run=True).fit(Net(lr=1.0), batches(4))
    quiet(hooks=[schedule, seen], max_epochs=4).fit(Net(lr=1.0), batches(1))
    assert seen.used == [1.0, 0.25, 0.5, 0.75, 1.0] and schedule.warmup == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "cosin"}, "Did you mean 'cosine'"),
        ({"schedule": 3}, "schedule=3"),
        ({"warmup": -1}, "warmup=-1"),
        ({"warmup": 1.0}, "warmup=1.0 must be a whole number from 0, or a fraction of the run"),
        ({"warmup": -0.1}, "a float below 1.0"),
        ({"warmup": math.nan}, "a float below 1.0"),
        ({"warmup": True}, "warmup=True"),
        ({"schedule": lambda stp: 1.0}, "has the parameter 'stp'.*Did you mean 'step'"),
        ({"total": 0}, "total=0"),
        ({"schedule": lambda step: 1.0, "warmup": 3}, "not a function"),
        ({"min_lr_ratio": 2}, "min_lr_ratio=2"),
        ({"interval": "epochs"}, "interval='epochs'.*Did you mean 'epoch'"),
        ({"total": 5, "warmup": 5}, "leaves nothing"),
        ({"schedule": "wsd", "decay_fractoin": 0.1}, "Did you mean 'decay_fraction'"),
        ({"schedule": "linear", "power": 2}, "has no option"),
    ],
)
def test_wrong_parameters_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        LRSchedule(**options)


def test_a_second_fit_with_a_new_optimizer_begins_anew() -> None:
    seen = Rates()
    trainer = quiet(hooks=[LRSchedule("linear"), seen])
    trainer.fit(Net(lr=1.0), batches(2))
    trainer.fit(Net(lr=0.1), batches(2))
    assert seen.used == [1.0, 0.5, 0.1, 0.05]


def test_a_change_just_before_a_checkpoint_is_not_lost_in_the_resume() -> None:
    class Halve(Hook):
        def on_step_end(self, step: int, optimizers: Any) -> None:
            if step == 3:
                optimizers[0].param_groups[0]["lr"] *= 0.5

    saver, seen = Save(), Rates()
    whole = rates("linear", Halve(), saver)
    trainer = quiet(max_epochs=2, hooks=[LRSchedule("linear"), seen])
    trainer.fit(Net(lr=1.0), batches(4), batches(1), resume=saver.path)
    assert seen.used == whole[3:]
