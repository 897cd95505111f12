"""ParameterSchedule: hyper-parameters, attributes and buffers that change during a run, exact across a resume."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dialects.looped import net_and_sgd, train
from test_budgets import is_ours, per_step, with_hooks, without_hooks
from tiny import Net, batches, quiet, shown
from torch import Tensor, nn
from torch.nn import functional as F

from hookline import Hook, HookError, Line, OptionError
from hookline.hooks import LRSchedule, ParameterSchedule
from hookline.util.errors import HooklineError


class Cold(Net):
    """A net with a temperature, dropout, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 2.0
        self.k = 1
        self.drop = nn.Dropout(0.5)
        self.register_buffer("alpha", torch.tensor(0.25))
        self.writes = 0

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "temperature" and "writes" in self.__dict__:
            self.__dict__["writes"] += 1
        super().__setattr__(name, value)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self.drop(self.layer(batch[0])) / self.temperature
        return F.mse_loss(scores, batch[1]) + self.alpha * self.layer.weight.square().mean()

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [self.layer.weight], "name": "decay"},
            {"params": [self.layer.bias], "name": "plain", "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)


class Sees(Hook):
    """The value that each update was made with, and a checkpoint after every batch."""

    def __init__(self, read: Callable[[Any, Any], Any], folder: Path | None = None) -> None:
        self.read, self.folder = read, folder
        self.seen: list[Any] = []

    def on_before_optimizer_step(self, module: Any, optimizer: Any) -> None:
        self.seen.append(self.read(module, optimizer))

    def on_train_batch_end(self, trainer: Any, batches_seen: int) -> None:
        if self.folder is not None:
            trainer.save_checkpoint(self.folder / f"after-{batches_seen}")


def seen(
    target: str,
    schedule: Any,
    read: Callable[[Any, Any], Any],
    net: Any = None,
    epochs: int = 2,
    **options: Any,
) -> Any:
    sees = Sees(read)
    trainer = {"max_epochs": epochs, **options.pop("trainer", {})}
    hook = ParameterSchedule(target, schedule, **options)
    quiet(hooks=[hook, sees], **trainer).fit(net or Cold(), batches(4))
    return sees.seen


def decay(module: Any, optimizer: Any) -> list[float]:
    return [group["weight_decay"] for group in optimizer.param_groups]


def cosine(t: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * t))


@pytest.mark.parametrize(
    ("target", "schedule", "options", "read", "values"),
    [
        ("optimizer.weight_decay", "linear", {"end": 0.0, "groups": "decay"}, decay,
         [[0.1 * (1 - n / 8), 0.0] for n in range(8)]),
        ("optimizer.weight_decay", "linear", {"end": 0.5}, decay,
         [[0.1 + 0.05 * n, 0.0625 * n] for n in range(8)]),
        ("optimizer.weight_decay", "cosine", {"start": 1.0, "end": 0.0, "total": 4}, decay,
         [[cosine(min(1.0, n / 4))] * 2 for n in range(8)]),
        ("optimizer.betas[0]", {0: 0.5, 3: 0.8, "1 epoch": 0.9}, {}, lambda m, o: o.param_groups[1]["betas"],
         [(0.5, 0.999)] * 3 + [(0.8, 0.999)] + [(0.9, 0.999)] * 4),
        ("optimizer.param_groups[0].eps", {5: 1e-3}, {}, lambda m, o: o.param_groups[0]["eps"],
         [1e-8] * 5 + [1e-3] * 3),
        ("module.temperature", {0: 4.0, 4: 2.0, 6: 1.0}, {"between": "linear"}, lambda m, o: m.temperature,
         [4.0, 3.5, 3.0, 2.5, 2.0, 1.5, 1.0, 1.0]),
        ("module.temperature", {4: 1.0}, {"between": "linear"}, lambda m, o: m.temperature,
         [2.0, 1.75, 1.5, 1.25] + [1.0] * 4),
        ("module.temperature", {"0 epochs": 4.0, "2 epochs": 1.0}, {"between": "linear"},
         lambda m, o: m.temperature, [4.0] * 4 + [2.5] * 4),
        ("module.temperature", lambda step, epoch, total: step + 100 * epoch + total, {},
         lambda m, o: m.temperature, [8, 9, 10, 11, 112, 113, 114, 115]),
        ("module.temperature", lambda epoch: 10.0 - epoch, {"every": "epoch"}, lambda m, o: m.temperature,
         [10.0] * 4 + [9.0] * 4),
        ("module.temperature", "linear", {"end": 0.0, "every": "epoch"}, lambda m, o: m.temperature,
         [2.0] * 4 + [1.0] * 4),
        ("module.k", lambda step: step, {}, lambda m, o: m.k, [*range(8)]),
        ("module.drop.p", {"1 epoch": 0.0}, {}, lambda m, o: m.drop.p, [0.5] * 4 + [0.0] * 4),
        ("module.alpha", "polynomial", {"end": 0.0, "power": 1.0}, lambda m, o: float(m.alpha),
         [0.25 * (1 - n / 8) for n in range(8)]),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_each_update_is_made_with_the_value_of_its_step(
    target: str, schedule: Any, options: Any, read: Any, values: list[Any]
) -> None:
    found = seen(target, schedule, read, **options)
    assert [torch.tensor(each).tolist() for each in found] == [
        pytest.approx(torch.tensor(each).tolist()) for each in values
    ]


def test_with_accumulation_a_window_has_one_value() -> None:
    during: list[float] = []

    class Looks(Hook):
        def on_before_backward(self, module: Any) -> None:
            during.append(module.temperature)

    hook = ParameterSchedule("module.temperature", lambda step: 1.0 + step)
    quiet(hooks=[hook, Looks()], accumulate_grad_batches=2).fit(Cold(), batches(4))
    assert during == [1.0, 1.0, 2.0, 2.0]


def test_a_value_is_written_only_when_it_changes_and_stays_when_the_run_is_over() -> None:
    net = Cold()
    hook = ParameterSchedule("module.temperature", {3: 1.5, 6: 1.0})
    quiet(hooks=[hook], max_epochs=3).fit(net, batches(4))
    assert net.writes == 3 and net.temperature == 1.0  # the first value, and two moments


def test_rates_that_are_tensors_and_buffers_stay_the_same_objects() -> None:
    rate = torch.tensor(0.1)

    class Tensors(Cold):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=rate)

    net = Tensors()
    alpha = net.alpha
    hooks = [
        ParameterSchedule("optimizer.lr", "linear", end=0.0),
        ParameterSchedule("module.alpha", {2: 0.75}),
    ]
    quiet(hooks=hooks).fit(net, batches(4))
    assert net.alpha is alpha and float(alpha) == 0.75 and float(rate) == pytest.approx(0.0)


def test_nothing_is_read_from_the_device_while_it_trains() -> None:
    class OnMeta(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("alpha", torch.tensor(1.0))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * self.alpha

    hook = ParameterSchedule("module.alpha", "linear", start=1.0, end=0.0)
    trainer = quiet(hooks=[hook], device="meta", log_every_n_steps=10**6)
    trainer.fit(OnMeta(), batches(4))
    assert trainer.global_step == 4


def run_of(folder: Path | None = None, resume: Any = None, epochs: int = 3) -> tuple[list[Any], Cold]:
    torch.default_generator.manual_seed(0)
    net = Cold()
    sees = Sees(
        lambda m, o: (*decay(m, o), m.temperature, float(m.alpha), o.param_groups[0]["betas"], m.drop.p),
        folder,
    )
    hooks = [
        ParameterSchedule("optimizer.weight_decay", "cosine", end=0.0),
        ParameterSchedule("module.temperature", {"1 epoch": 1.0, 10: 0.5}, name="t"),
        ParameterSchedule("module.alpha", "linear", end=1.0, name="a"),
        ParameterSchedule("optimizer.betas[0]", {6: 0.5}, name="b"),
        ParameterSchedule("module.drop.p", lambda epoch: 0.1 * (epoch + 1), every="epoch", name="p"),
        sees,
    ]
    quiet(hooks=hooks, max_epochs=epochs, accumulate_grad_batches=2).fit(net, batches(8), resume=resume)
    return sees.seen, net


def test_a_run_that_resumes_anywhere_has_the_same_values_and_weights_to_the_bit(tmp_path: Path) -> None:
    values, net = run_of(folder=tmp_path)
    assert len(set(map(str, values))) == len(values) == 12
    for cut in (1, 7, 8, 9, 12, 13, 20, 23):
        found, other = run_of(resume=tmp_path / f"after-{cut}")
        assert found == values[-len(found) :] and found
        assert all(
            torch.equal(a, b)
            for a, b in zip(net.state_dict().values(), other.state_dict().values(), strict=True)
        )


def test_a_validation_before_the_first_batch_of_a_resumed_run_has_the_value_too(tmp_path: Path) -> None:
    class Looks(Hook):
        def __init__(self) -> None:
            self.seen: list[float] = []

        def on_validation_batch_start(self, module: Any) -> None:
            self.seen.append(module.temperature)

    looks = Looks()
    hook = ParameterSchedule("module.temperature", lambda step: 5.0 + step)
    trainer = quiet(hooks=[hook, looks], num_sanity_val_steps=1, val_check_interval=2)
    trainer.fit(Cold(), batches(4), batches(1))
    assert looks.seen == [5.0, 7.0, 9.0]


def test_values_are_logged_as_they_were_used() -> None:
    rows: list[dict[str, Any]] = []

    class Rows(Hook):
        order = 10**6

        def on_train_metrics(self, metrics: dict[str, Any]) -> None:
            rows.append(dict(metrics))

    hooks = [
        ParameterSchedule("module.temperature", "linear", start=4.0, end=0.0, log=True),
        ParameterSchedule("optimizer.weight_decay", "linear", end=0.0, log="decay"),
        ParameterSchedule("optimizer.eps", {0: 1e-6}, log="eps"),
        ParameterSchedule("module.k", {0: 3}),
        Rows(),
    ]
    quiet(hooks=hooks, log_every_n_steps=2).fit(Cold(), batches(4))
    assert [row["module.temperature"] for row in rows] == [3.0, 1.0, 1.0]  # the last one is that of the epoch
    assert [row["decay/optimizer.param_groups[0].weight_decay"] for row in rows] == pytest.approx(
        [0.075, 0.025, 0.025]
    )
    assert rows[0]["eps"] == 1e-6 and "module.k" not in rows[0]


def test_a_hook_that_is_added_during_a_run_begins_there() -> None:
    class Adds(Hook):
        def on_step_end(self, trainer: Any, step: int) -> None:
            if step == 2:
                trainer.add_hook(ParameterSchedule("module.temperature", {0: 9.0, 3: 8.0}))

    sees = Sees(lambda m, o: m.temperature)
    quiet(hooks=[Adds(), sees]).fit(Cold(), batches(5))
    assert sees.seen == [2.0, 2.0, 2.0, 8.0, 8.0]


def test_another_hook_is_a_target_too() -> None:
    class Noise(Hook):
        level = 1.0

        def __init__(self) -> None:
            self.seen: list[float] = []

        def on_train_batch_start(self) -> None:
            self.seen.append(self.level)

    noise = Noise()
    quiet(hooks=[ParameterSchedule("hooks.noise.level", "linear", end=0.0), noise]).fit(Net(), batches(4))
    assert noise.seen == [1.0, 0.75, 0.5, 0.25]


class Cycles(Cold):
    kind: Any = torch.optim.lr_scheduler.StepLR

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        options: dict[str, Any] = {"step_size": 2}
        if self.kind is torch.optim.lr_scheduler.OneCycleLR:
            options = {"max_lr": 0.1, "total_steps": 100}
        return [optimizer], [self.kind(optimizer, **options)]


class OneCycle(Cycles):
    kind = torch.optim.lr_scheduler.OneCycleLR


@pytest.mark.parametrize(
    ("net", "hooks", "text"),
    [
        (Cycles, [ParameterSchedule("optimizer.lr", "linear", end=0.0)], "and StepLR would both write"),
        (OneCycle, [ParameterSchedule("optimizer.momentum", {3: 0.5})], "and OneCycleLR would both write"),
        (Net, [LRSchedule("linear"), ParameterSchedule("optimizer.lr", {3: 0.5})], "and LRSchedule would both"),
        (
            Cold,
            [ParameterSchedule("module.*.p", {1: 0.0}), ParameterSchedule("module.drop.p", {1: 0.1}, name="b")],
            "Two hooks ParameterSchedule would both write module.drop.p",
        ),
        (Cold, [ParameterSchedule("optimizer.wieght_decay", {1: 0.0})], "Did you mean 'weight_decay'"),
        (Cold, [ParameterSchedule("module.temperature", {1: "hot"})], "the schedule gives 'hot'"),
        (Cold, [ParameterSchedule("module.temperature", lambda: "hot")], "the schedule gives 'hot'"),
        (Cold, [ParameterSchedule("module.temperature", lambda step: 1 / step if step else math.inf)], "gives inf"),
        (Cold, [ParameterSchedule("module.k", "linear", end=5.0)], "the whole number 1, and the schedule 'linear'"),
    ],
    ids=shown,
)  # fmt: skip
def test_what_cannot_be_scheduled_is_refused_before_the_first_step(net: Any, hooks: Any, text: str) -> None:
    trainer = quiet(hooks=hooks)
    with pytest.raises(HooklineError, match=text):
        trainer.fit(net(), batches(2))
    assert trainer.global_step == 0


def test_a_scheduler_beside_another_hyper_parameter_is_fine() -> None:
    read = lambda m, o: o.param_groups[0]["momentum"]  # noqa: E731
    assert seen("optimizer.momentum", {0: 0.5, 4: 0.1}, read, Cycles()) == [0.5] * 4 + [0.1] * 4


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("module", {0: 1.0}), "must be the path of a value"),
        (("modul.temperature", {0: 1.0}), "Did you mean 'module'"),
        (("module.t", "cosin"), "Did you mean 'cosine'"),
        (("module.t", "cosine"), "needs end=, the value that it leads to"),
        (("module.t", {}), "must be a name"),
        (("module.t", 3.0), "must be a name"),
        (("module.t", {"soon": 1.0}), "soon"),
        (("module.t", {0: None}), "must be a number, True, False or text"),
        (("module.t", lambda steps: 1.0), "has the parameter 'steps'. Did you mean 'step'"),
    ],
    ids=shown,
)
def test_wrong_arguments_are_refused(arguments: Any, text: str) -> None:
    with pytest.raises(HooklineError, match=text):
        ParameterSchedule(*arguments)


@pytest.mark.parametrize(
    ("schedule", "options", "text"),
    [
        ({0: 1.0}, {"end": 0.0}, "end= has no effect with a schedule that is a mapping"),
        ({0: 1.0}, {"every": "epoch"}, "every= has no effect with a schedule that is a mapping"),
        (lambda step: 1.0, {"power": 2.0}, "power= has no effect with a schedule that is a function"),
        (lambda step: 1.0, {"between": "linear"}, "between= has no effect"),
        ("linear", {"end": 0.0, "powr": 2.0}, "has no option 'powr'"),
        ("linear", {"end": 0.0, "between": "linear"}, "between= has no effect"),
        ({0: 1.0, 3: 2.0, "1 epoch": 1.0}, {"between": "linear"}, "in steps only or in epochs only"),
        ({0: 1.0, 3: True}, {"between": "linear"}, "=True must be a number"),
        ("linear", {"end": 0.0, "log": ""}, "the name of a metric"),
        ("linear", {"end": 0.0, "groups": []}, "groups"),
    ],
    ids=shown,
)
def test_options_that_do_not_belong_to_a_schedule_are_refused(schedule: Any, options: Any, text: str) -> None:
    with pytest.raises(OptionError, match=text):
        ParameterSchedule("module.temperature", schedule, **options)


def test_a_run_without_an_end_needs_a_total() -> None:
    with pytest.raises(OptionError, match="the number of steps of the run is unknown; pass total="):
        seen("module.temperature", "linear", decay, epochs=-1, end=0.0, trainer={"max_time": 60})


def test_a_step_without_a_change_costs_one_comparison_and_epochs_cost_nothing() -> None:
    class Looks(Hook):
        def on_step_end(self, step: int, state: Any) -> None: ...

    def calls(hook: Any) -> float:
        return per_step(lambda data: with_hooks(hook)(data), is_ours)

    assert calls(ParameterSchedule("optimizer.weight_decay", {"5 epochs": 0.1})) == without_hooks(is_ours)
    for schedule in ({10**6: 0.1}, {0: 0.1, 1: 0.2}):
        assert calls(ParameterSchedule("optimizer.weight_decay", schedule)) <= calls_of_a_listener()


def calls_of_a_listener() -> float:
    class Looks(Hook):
        def on_step_end(self, step: int, state: Any) -> None: ...

    # a method that the tests define is not one of Hookline's
    return per_step(lambda data: with_hooks(Looks())(data)) - without_hooks() + without_hooks(is_ours)


def test_weights_follow_the_schedule() -> None:
    """The decay is not only written, the update uses it."""

    def weight(*hooks: Hook) -> Tensor:
        torch.default_generator.manual_seed(0)
        net = Net()
        quiet(hooks=hooks).fit(net, batches(4))
        return net.layer.weight.detach()

    plain = weight()
    assert not torch.equal(plain, weight(ParameterSchedule("optimizer.weight_decay", {2: 0.5})))
    assert torch.equal(plain, weight(ParameterSchedule("optimizer.weight_decay", {4: 0.5})))


def test_the_error_of_a_target_that_is_missing_names_the_hook() -> None:
    with pytest.raises(
        HookError, match="ParameterSchedule: target='module.temprature'.*Did you mean 'temperature'"
    ):
        seen("module.temprature", {0: 1.0}, decay)


def test_a_loop_that_is_written_by_hand_has_the_same_values() -> None:
    values: list[float] = []

    class Looks(Hook):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            values.append(optimizer.param_groups[0]["weight_decay"])

    net, sgd = net_and_sgd()
    hooks = [ParameterSchedule("optimizer.weight_decay", "linear", start=1.0, end=0.0, total=8), Looks()]
    train(Line(net, sgd, hooks=hooks), net, sgd, batches(4), epochs=2)
    assert values == pytest.approx([1 - n / 8 for n in range(8)])
