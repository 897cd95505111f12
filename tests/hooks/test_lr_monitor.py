"""LRMonitor: rates under the names people know, as the update used them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet

from hookline import SKIP_BATCH, Hook, Trainer
from hookline.hooks.lr_monitor import LRMonitor
from hookline.hooks.lr_schedule import LRSchedule
from hookline.util.errors import OptionError


def with_optimizers(make: Any) -> Net:
    """A net whose optimizers are what `make(net)` returns."""
    return type("Made", (Net,), {"configure_optimizers": lambda self: make(self)})()


def rows(run_dir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["type"] == "metrics"]


def logged(module: Net, run_dir: Path, hook: LRMonitor, name: str, **options: Any) -> list[tuple[int, float]]:
    Trainer(run_dir=run_dir, enable_progress_bar=False, hooks=[hook], **options).fit(module, batches(3))
    return [(row["step"], row["metrics"][name]) for row in rows(run_dir) if name in row["metrics"]]


def names(module: Net, **options: Any) -> set[str]:
    trainer = quiet(hooks=[LRMonitor(**options)])
    trainer.fit(module, batches(1))
    return {name for name in trainer.metrics if name != "train/loss"}


def halved(net: Net, **schedule: Any) -> dict[str, Any]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.8)
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), **schedule},
    }


def test_every_epoch_has_the_rate_it_was_trained_with(tmp_path: Path) -> None:
    found = logged(with_optimizers(halved), tmp_path, LRMonitor(), "lr-SGD", max_epochs=3)
    assert found == [(3, 0.8), (6, 0.4), (9, 0.2)]


def falling(step: int) -> float:
    return 1 - step / 9


def test_an_epoch_has_the_rate_of_its_first_update_also_with_the_hook_that_sets_it(tmp_path: Path) -> None:
    found = []
    for kind in ("hook", "scheduler"):
        hooks = [LRSchedule(falling)] if kind == "hook" else []
        module = Net() if kind == "hook" else with_optimizers(by_scheduler)
        options = {"run_dir": tmp_path / kind, "enable_progress_bar": False, "max_epochs": 3}
        Trainer(hooks=[*hooks, LRMonitor()], **options).fit(module, batches(3))
        found.append([row["metrics"]["lr-SGD"] for row in rows(tmp_path / kind) if row["step"] in (3, 6, 9)])
    first = Net().configure_optimizers().param_groups[0]["lr"]
    assert found[0] == found[1] == pytest.approx([first, first * falling(3), first * falling(6)])


def by_scheduler(net: Net) -> Any:
    optimizer = Net.configure_optimizers(net)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, falling)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def test_a_warm_up_shows_in_the_first_epoch() -> None:
    trainer = quiet(hooks=[LRSchedule("linear", warmup=3, total=9), LRMonitor()], max_epochs=1)
    trainer.fit(Net(), batches(3))
    assert trainer.metrics["lr-SGD"] == Net().configure_optimizers().param_groups[0]["lr"] / 4


def test_a_resume_inside_an_epoch_logs_the_same(tmp_path: Path) -> None:
    def fit(*hooks: Hook, resume: Any = None, folder: str) -> list[float]:
        trainer = Trainer(
            run_dir=tmp_path / folder,
            enable_progress_bar=False,
            max_epochs=3,
            hooks=[LRSchedule(falling), LRMonitor(), *hooks],
        )
        trainer.fit(Net(), batches(3), resume=resume)
        return [row["metrics"]["lr-SGD"] for row in rows(tmp_path / folder) if "lr-SGD" in row["metrics"]]

    class Breaks(Hook):
        def on_step_end(self, step: int) -> None:
            if step == 5:
                raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        fit(Breaks(), folder="resumed")
    assert fit(folder="resumed", resume="auto") == fit(folder="whole")


def test_an_epoch_without_an_update_has_the_rate_at_its_start() -> None:
    class Skips(Hook):
        def on_train_batch_start(self) -> Any:
            return SKIP_BATCH

    trainer = quiet(hooks=[LRMonitor(), Skips()], max_epochs=1)
    trainer.fit(Net(), batches(2))
    assert trainer.metrics["lr-SGD"] == Net().configure_optimizers().param_groups[0]["lr"]


def test_a_second_fit_with_the_same_hook_begins_again() -> None:
    hook = LRMonitor()
    for rate in (0.5, 0.25):
        trainer = quiet(hooks=[hook], max_epochs=1)
        trainer.fit(
            with_optimizers(lambda net, rate=rate: torch.optim.SGD(net.parameters(), lr=rate)), batches(2)
        )
        assert trainer.metrics["lr-SGD"] == rate


def test_every_logged_step_has_the_rate_that_its_update_used(tmp_path: Path) -> None:
    module = with_optimizers(lambda net: halved(net, interval="step"))
    found = logged(module, tmp_path, LRMonitor(frequency="step"), "lr-SGD", max_epochs=1, log_every_n_steps=1)
    assert found == [(1, 0.8), (2, 0.4), (3, 0.2)]


def test_a_rate_kept_as_a_tensor_is_taken_before_the_scheduler_changes_it(tmp_path: Path) -> None:
    def make(net: Net) -> Any:
        optimizer = torch.optim.SGD(net.parameters(), lr=torch.tensor(0.5), foreach=False)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
                "interval": "step",
            },
        }

    found = logged(
        with_optimizers(make),
        tmp_path,
        LRMonitor(frequency="step"),
        "lr-SGD",
        max_epochs=1,
        log_every_n_steps=1,
    )
    assert found == [(1, 0.5), (2, 0.25), (3, 0.125)]


def test_steps_whose_metrics_are_not_logged_cost_no_row(tmp_path: Path) -> None:
    found = logged(Net(), tmp_path, LRMonitor(frequency="step"), "lr-SGD", max_epochs=2, log_every_n_steps=2)
    assert [step for step, _ in found] == [2, 4, 6]


def two_groups(net: Net, **first: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [{"params": [net.layer.weight], **first}, {"params": [net.layer.bias], "lr": 0.01}], lr=0.1
    )


def test_groups_and_optimizers_have_the_names_people_know() -> None:
    assert names(Net()) == {"lr-SGD"}
    assert names(with_optimizers(two_groups)) == {"lr-SGD/pg1", "lr-SGD/pg2"}
    assert names(with_optimizers(lambda net: two_groups(net, name="weights"))) == {
        "lr-SGD/weights",
        "lr-SGD/pg2",
    }
    assert names(with_optimizers(lambda net: two_groups(net, name="pg2"))) == {"lr-SGD/pg1", "lr-SGD/pg2"}
    two = with_optimizers(
        lambda net: [torch.optim.Adam([net.layer.weight]), torch.optim.Adam([net.layer.bias])]
    )
    assert names(two) == {"lr-Adam", "lr-Adam-1"}
    mixed = with_optimizers(
        lambda net: [torch.optim.Adam([net.layer.weight]), torch.optim.SGD([net.layer.bias], lr=0.1)]
    )
    assert names(mixed) == {"lr-Adam", "lr-SGD"}


def test_a_schedulers_name_takes_the_place_of_the_optimizers() -> None:
    assert names(with_optimizers(lambda net: halved(net, name="warm"))) == {"warm"}


def test_each_group_has_its_own_value() -> None:
    trainer = quiet(hooks=[LRMonitor()])
    trainer.fit(with_optimizers(two_groups), batches(1))
    assert (trainer.metrics["lr-SGD/pg1"], trainer.metrics["lr-SGD/pg2"]) == (0.1, 0.01)


def test_momentum_betas_and_weight_decay_if_asked_for() -> None:
    def values(make: Any) -> dict[str, float]:
        trainer = quiet(hooks=[LRMonitor(log_momentum=True, log_weight_decay=True)])
        trainer.fit(with_optimizers(make), batches(1))
        return {name: value for name, value in trainer.metrics.items() if name != "train/loss"}

    sgd = values(lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01))
    assert sgd == {"lr-SGD": 0.1, "lr-SGD-momentum": 0.9, "lr-SGD-weight_decay": 0.01}
    adam = values(
        lambda net: torch.optim.AdamW(net.parameters(), lr=0.1, betas=(0.8, 0.95), weight_decay=0.3)
    )
    assert adam == {
        "lr-AdamW": 0.1,
        "lr-AdamW-momentum": 0.8,
        "lr-AdamW-beta2": 0.95,
        "lr-AdamW-weight_decay": 0.3,
    }


def test_a_group_added_in_the_middle_is_there_from_the_next_epoch_on(tmp_path: Path) -> None:
    extra = torch.nn.Parameter(torch.zeros(1))
    trainer = quiet(max_epochs=2, hooks=[LRMonitor()])
    trainer.on("train_epoch_end", once=True)(
        lambda optimizers: optimizers[0].add_param_group({"params": [extra], "lr": 0.7})
    )
    trainer.fit(Net(), batches(2))
    assert trainer.metrics["lr-SGD/pg2"] == 0.7


@pytest.mark.parametrize(
    "wrong",
    [{"frequency": "steps"}, {"frequency": None}, {"log_momentum": "no"}, {"log_weight_decay": 1}],
    ids=str,
)
def test_wrong_parameters_are_refused(wrong: dict[str, Any]) -> None:
    hint = r".*Did you mean 'step'\?" if wrong.get("frequency") == "steps" else ""
    with pytest.raises(OptionError, match=f"LRMonitor: {next(iter(wrong))}=.*{hint}"):
        LRMonitor(**wrong)
