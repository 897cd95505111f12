"""The learning rate of a running fit is changed, and each later rate of its schedule with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from control.asking import AskAt, asked
from tiny import Net, batches, quiet
from torch.optim import SGD, lr_scheduler
from torch.optim.swa_utils import SWALR

from hookline import Hook, HookError
from hookline.control.client import Refused
from hookline.control.learning_rate import RateChange
from hookline.hooks import LRFinder, LRSchedule, ParameterSchedule
from hookline.loggers import read_log

STEPS, AT = 24, 7
"""The steps of a run, and the one after which the rate is changed."""


class Scheduled(Net):
    """Two parameter groups, and a scheduler that advances with every step."""

    def __init__(self, make: Callable[[Any], Any] | None = None, rates: tuple[Any, Any] = (0.1, 0.1)) -> None:
        super().__init__()
        self.make, self.rates = make, rates
        torch.nn.init.constant_(self.layer.weight, 0.1)
        torch.nn.init.constant_(self.layer.bias, 0.1)

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [self.layer.weight], "lr": self.rates[0], "name": "weights"},
            {"params": [self.layer.bias], "lr": self.rates[1], "name": "biases"},
        ]
        optimizer = SGD(groups, lr=0.1, momentum=0.9, foreach=False)
        if self.make is None:
            return optimizer
        scheduler = self.make(optimizer)
        monitor = "mark" if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else None
        made = {"scheduler": scheduler, "interval": "step", "monitor": monitor}
        return {"optimizer": optimizer, "lr_scheduler": made}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("mark", 1.0)
        return super().training_step(batch, batch_idx)


class Rates(Hook):
    """Keeps the rates of every update."""

    def __init__(self) -> None:
        self.used: list[list[float]] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.used.append([float(group["lr"]) for group in optimizer.param_groups])


def trained(net: Net, *hooks: Hook, steps: int = STEPS, **options: Any) -> list[list[float]]:
    """Train, and return the rates of every update."""
    rates = Rates()
    resume = options.pop("resume", None)
    quiet(hooks=[*hooks, rates], max_epochs=-1, max_steps=steps, **options).fit(net, batches(), resume=resume)
    return rates.used


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "constant": lambda o: lr_scheduler.ConstantLR(o, 0.5, 10),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / 10) / (1 + step // 5)),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "steps": lambda o: lr_scheduler.StepLR(o, 5, 0.5),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [4, 9], 0.5),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 15),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, STEPS, 2.0),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10, eta_min=0.01),  # over its minimum, and up again
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5, eta_min=0.01),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.3, STEPS + 1),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=4),
    "swa": lambda o: SWALR(o, swa_lr=0.03, anneal_epochs=12),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, mode="max", patience=1, factor=0.5, min_lr=0.002),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, 1.0, 10), lr_scheduler.CosineAnnealingLR(o, 14, eta_min=0.001)],
        [10],
    ),
    "chain": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 9), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter in")
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_each_later_rate_of_a_schedule_is_the_factor_times_what_it_would_have_been(kind: str) -> None:
    make = SCHEDULERS[kind]
    plain = trained(Scheduled(make))
    ask = AskAt(AT, "lr", value="x0.25")
    changed = trained(Scheduled(make), ask)
    answer = ask.answer
    assert [each["group"] for each in answer["groups"]] == [0, 1] and answer["step"] == AT
    for number, (before, after) in enumerate(zip(plain, changed, strict=True)):
        assert after == pytest.approx(
            [each * (0.25 if number >= AT else 1.0) for each in before], rel=1e-9
        ), number


@pytest.mark.filterwarnings("ignore:The epoch parameter in")
@pytest.mark.parametrize("kind", [*SCHEDULERS, "schedule hook"])
def test_the_next_update_has_the_rate_that_was_asked_for_and_a_resume_has_it_too(kind: str) -> None:
    make = SCHEDULERS.get(kind)

    def hooks() -> list[Hook]:
        return [] if make is not None else [LRSchedule("cosine", total=STEPS, warmup=10)]

    def ask(at: int = AT) -> list[Hook]:
        return [AskAt(at, "lr", value=0.02)]

    options = {"run_dir": "run", "logger": True, "seed": 1}
    whole = Scheduled(make)
    used = trained(whole, *hooks(), *ask(), **options)
    assert used[AT] == pytest.approx([0.02, 0.02], rel=1e-9)
    assert used[AT + 1 :] != [[0.02, 0.02]] * (STEPS - AT - 1), "the schedule continues"
    half, resumed = Scheduled(make), Scheduled(make)
    options["run_dir"] = "parts"
    # changed at the last step, whose state is saved before and after it
    saves = AskAt(AT, "checkpoint")
    first = trained(half, *hooks(), *ask(), saves, steps=AT, checkpoint=True, **options)
    second = trained(resumed, *hooks(), resume="auto", checkpoint=True, **options)
    assert first + second == used
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))


def test_one_group_is_chosen_by_its_number_or_its_name_and_the_log_has_the_command() -> None:
    first, second = AskAt(3, "lr", value=1e-3, group=1), AskAt(6, "lr", value="x10", group="biases")
    used = trained(
        Scheduled(SCHEDULERS["one cycle"]),
        first,
        second,
        run_dir="run",
        logger=True,
        checkpoint={"last": False},
    )
    assert used[3][1] == pytest.approx(1e-3) and used[3][0] > 0.01
    plain = trained(Scheduled(SCHEDULERS["one cycle"]))
    factor = used[3][1] / plain[3][1]
    assert [each[0] for each in used] == [each[0] for each in plain]
    assert [each[1] for each in used[6:]] == pytest.approx([10 * factor * each[1] for each in plain[6:]])
    found = [each for each in read_log("run/log.jsonl") if each["type"] == "control"]
    assert [(each["command"], each["value"], each["group"], each["step"]) for each in found] == [
        ("lr", "0.001", 1, 3),
        ("lr", "x10", "biases", 6),
    ]
    group = found[1]["groups"][0]
    assert group["name"] == "biases" and group["lr"] == pytest.approx(10 * group["before"])


def test_groups_with_different_rates_get_the_same_rate_or_keep_their_ratio() -> None:
    alike, ratio = AskAt(2, "lr", value="0.03"), AskAt(2, "lr", value="x0.5")
    assert trained(Scheduled(None, (0.1, 0.2)), alike, steps=4)[2:] == [[0.03, 0.03]] * 2
    assert trained(Scheduled(None, (0.1, 0.2)), ratio, steps=4)[2:] == [[0.05, 0.1]] * 2
    said = alike.answer["said"]
    assert said == "from 0.1 to 0.03, 0.2 to 0.03, from step 3 on"


@pytest.mark.parametrize("kind", ["lambda", "one cycle", "cosine", "schedule hook", "none"])
def test_a_rate_that_is_a_tensor_stays_the_same_tensor(kind: str) -> None:
    rates = (torch.tensor(0.1), torch.tensor(0.1))
    ask = AskAt(AT, "lr", value="0.02")
    seen: list[Any] = []

    class Sees(Hook):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            seen.append(optimizer.param_groups[0]["lr"])

    hooks = [LRSchedule("linear", total=STEPS)] if kind == "schedule hook" else []
    used = trained(Scheduled(SCHEDULERS.get(kind), rates), *hooks, ask, Sees())
    assert used[AT] == pytest.approx([0.02, 0.02], rel=1e-5)
    assert isinstance(seen[-1], torch.Tensor) and all(each is seen[0] for each in seen)
    if kind != "none":
        assert used[-1] != pytest.approx(used[AT], rel=1e-3)


class Own(lr_scheduler.LambdaLR):
    def get_lr(self) -> Any:
        return [0.05 for _ in self.base_lrs]


class NotOfTorch:
    def __init__(self, optimizer: Any) -> None: ...
    def step(self) -> None: ...
    def state_dict(self) -> Any:
        return {}


def zero_first(optimizer: Any) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step == AT else 1.0)


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "zero": (None, {"value": 0}, "above 0, such as 1e-4, or a factor above 0, such as x0.5"),
    "not a number": (None, {"value": "fast"}, "lr 'fast': give a learning rate above 0"),
    "nothing": (None, {}, "lr None"),
    "a factor of infinity": (None, {"value": "xinf"}, "lr 'xinf'"),
    "true": (None, {"value": True}, "lr True"),
    "no such group": (
        None,
        {"value": 1, "group": 2},
        "no parameter group 2. Groups: 0 to 1, or by name: weights",
    ),
    "no such name": (None, {"value": 1, "group": "weight"}, "Did you mean 'weights'?"),
    "a list of groups": (None, {"value": 1, "group": [1]}, "group=[1] must be the number"),
    "a rule of its own": (
        lambda o: Own(o, lambda step: 1.0),
        {"value": 1},
        "Own would overwrite the learning rate",
    ),
    "another package": (NotOfTorch, {"value": 1}, "NotOfTorch would overwrite"),
    "one minimum for all": (SCHEDULERS["cosine"], {"value": 1, "group": 0}, "has one eta_min=0.01 for all 2"),
    "a rate of zero": (zero_first, {"value": 1}, "is 0 at this step of LambdaLR"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_not_last_or_means_nothing_is_refused_with_the_reason(case: str) -> None:
    make, given, said = REFUSED[case]
    net = Scheduled(make)
    with pytest.raises(HookError, match=r"^lr") as refused:
        trained(net, AskAt(AT, "lr", **given), steps=AT + 1)
    assert said in str(refused.value)


def test_a_factor_scales_a_schedule_whose_rate_is_zero_at_this_step() -> None:
    plain, ask = trained(Scheduled(zero_first)), AskAt(AT, "lr", value="x0.5")
    used = trained(Scheduled(zero_first), ask)
    assert used[AT] == [0.0, 0.0] and used[AT + 1 :] == [
        [each / 2 for each in row] for row in plain[AT + 1 :]
    ]


def test_the_schedule_hook_and_the_range_test_say_when_they_would_overwrite_it() -> None:
    ask = AskAt(AT, "lr", value="0.02")
    schedule = LRSchedule(lambda step: 0.0 if step == AT else 1.0)
    used = trained(Scheduled(), schedule, ask)
    assert "LRSchedule sets the learning rate of step 7 to 0" in ask.answer["error"]
    assert used[AT + 1] == [0.1, 0.1]
    during = AskAt(AT, "lr", value="0.02")
    trained(Scheduled(), LRFinder(steps=12), during)
    assert "LRFinder sets the learning rate of every step" in during.answer["error"]
    beside = AskAt(AT, "lr", value="0.02")
    used = trained(Scheduled(), ParameterSchedule("optimizer.lr", "linear", end=0.0), beside)
    assert "ParameterSchedule sets optimizer.param_groups[0].lr" in beside.answer["error"]
    assert used[AT + 1][0] > 0.02
    other = AskAt(AT, "lr", value="0.02")
    trained(Scheduled(), ParameterSchedule("optimizer.weight_decay", {0: 0.1, 9: 0.0}), other)
    assert "error" not in other.answer


def test_a_schedule_hook_that_is_switched_off_continues_in_proportion_when_it_is_on_again() -> None:
    def hooks() -> list[Hook]:
        off, on = AskAt(3, "disable", hook="lr_schedule"), AskAt(9, "enable", hook="lr_schedule")
        return [LRSchedule("linear", total=STEPS), off, on]

    plain = trained(Scheduled(), *hooks())
    used = trained(Scheduled(), *hooks(), AskAt(6, "lr", value="x0.5"))
    assert used[6:] == [pytest.approx([each / 2 for each in row]) for row in plain[6:]]


def test_a_change_is_parsed_from_text_and_numbers() -> None:
    assert RateChange.parse(" 1e-4 ", "1") == RateChange("1e-4", 1e-4, False, 1)
    assert RateChange.parse("x2", "rest") == RateChange("x2", 2.0, True, "rest")


def test_a_shell_and_a_program_are_refused_in_the_same_words() -> None:
    answers, _ = asked(("lr", {"value": "x0"}), ("lr", {"value": "1e-3"}))
    assert isinstance(answers[0], Refused) and "lr 'x0': give a learning rate above 0" in str(answers[0])
    assert answers[1]["groups"] == [{"group": 0, "name": None, "before": 0.1, "lr": 0.001}]


def test_a_change_after_the_last_checkpoint_of_a_run_is_saved_too() -> None:
    class Late(AskAt):
        def on_checkpoint_save(self, trainer: Any) -> None:
            AskAt.on_train_batch_end(self, trainer, self.at, 0)

        def on_train_batch_end(self) -> None: ...  # type: ignore[override]

    options = {"run_dir": "run", "logger": True, "checkpoint": True}
    late = Late(8, "lr", value=0.02)
    trained(Scheduled(), AskAt(8, "checkpoint"), late, steps=8, **options)
    assert late.answer["step"] == 8
    assert trained(Scheduled(), steps=9, resume="auto", **options) == [[0.02, 0.02]]
