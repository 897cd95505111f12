"""A resume says which settings are not those of the checkpoint, and which of the two values is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR, SequentialLR, StepLR

from hookline import Hook
from hookline.checkpoint.files import read
from hookline.loggers import read_log
from hookline.training.settings import module_settings

CHANGED = "Settings have changed since the checkpoint was made:"


class Layers(Net):
    def __init__(self, p: float = 0.1, own: float = 0.5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Dropout(p), nn.LayerNorm(4)) for _ in range(3)
        )
        self.attention_dropout = own

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch[0]
        for layer in self.layers:
            x = layer(x)
        return super().training_step((x, batch[1]), batch_idx)


class Configured(Layers):
    """With the optimizer that it is given."""

    def __init__(self, make: Any, **options: Any) -> None:
        super().__init__(**options)
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


class Saves(Hook):
    def on_train_epoch_end(self, trainer: Any) -> None:
        trainer.save_checkpoint("c")


def fit(module: Any, resume: Any = None, *hooks: Hook, **options: Any) -> Any:
    trainer = quiet(**{"hooks": [*hooks, Saves()], "seed": 1, **options})
    trainer.fit(module, batches(), resume=resume)
    return trainer


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [
        each.getMessage().splitlines() for each in caplog.records if each.getMessage().startswith(CHANGED)
    ]
    assert len(found) <= 1, "once for all of them"
    return [line.strip() for line in found[0][1:]] if found else []


def changes(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in said(caplog) if " in the checkpoint, " in line]


def adam(**options: Any) -> Any:
    return lambda parameters: torch.optim.AdamW(parameters, **options)


def scheduled(make: Any, lr: float = 0.1) -> Any:
    def optimizers(parameters: Any) -> Any:
        optimizer = torch.optim.SGD(parameters, lr=lr, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), "interval": "step"}}

    return optimizers


def test_nothing_is_said_if_nothing_has_changed_but_the_limits(caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 1.0,
        "precision": "bf16-mixed",
    }
    fit(Layers(), **options)
    fit(Layers(), "c", max_epochs=3, max_steps=5, **options)
    assert caplog.text == ""


def test_each_setting_is_a_line_with_both_values_and_the_one_that_is_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fit(Configured(adam(lr=0.1)))
    trainer = fit(
        Configured(adam(lr=0.01, betas=(0.8, 0.9), weight_decay=0.5), p=0.3, own=0.2),
        "c",
        max_epochs=2,
        seed=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        gradient_clip_algorithm="value",
        precision="bf16-mixed",
        nonfinite="skip",
    )
    assert changes(caplog) == [
        "accumulate_grad_batches: 1 in the checkpoint, 2 now; 2 is used",
        "gradient_clip_val: None in the checkpoint, 0.5 now; 0.5 is used",
        "gradient_clip_algorithm: 'norm' in the checkpoint, 'value' now; 'value' is used",
        "nonfinite: 'stop' in the checkpoint, 'skip' now; 'skip' is used",
        "seed: 1 in the checkpoint, 2 now; 1 is used",
        "precision: '32' in the checkpoint, 'bf16-mixed' now; 'bf16-mixed' is used",
        "lr of AdamW: 0.1 in the checkpoint, 0.01 now; 0.1 is used",
        "betas of AdamW: [0.9, 0.999] in the checkpoint, [0.8, 0.9] now; [0.9, 0.999] is used",
        "weight_decay of AdamW: 0.01 in the checkpoint, 0.5 now; 0.01 is used",
        "Configured.attention_dropout: 0.5 in the checkpoint, 0.2 now; 0.2 is used",
        "Configured.layers.*.*.p: 0.1 in the checkpoint, 0.3 now; 0.3 is used",
    ]
    assert any("set them in on_checkpoint_load" in line for line in said(caplog))
    group = trainer.state.optimizers[0].param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.1, (0.9, 0.999), 0.01), "as was said"


def test_it_is_in_the_log_of_the_run_too() -> None:
    fit(Net(), run_dir="run", logger=True)
    fit(Net(), "c", run_dir="run", logger=True, max_epochs=2, accumulate_grad_batches=2)
    (record,) = [each for each in read_log("run") if each["type"] == "warning"]
    assert "accumulate_grad_batches: 1 in the checkpoint, 2 now; 2 is used" in record["message"]


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: StepLR(optimizer, 2, gamma=0.5),
        lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=40),
        lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (step + 1)),
        lambda optimizer: SequentialLR(
            optimizer, [LinearLR(optimizer), CosineAnnealingLR(optimizer, 9)], [2]
        ),
    ],
    ids=["step", "one cycle", "lambda", "sequence"],
)
def test_a_learning_rate_that_a_scheduler_has_changed_is_no_news(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fit(Configured(scheduled(make)))
    fit(Configured(scheduled(make)), "c", max_epochs=2)
    fit(Configured(scheduled(make)), "c", max_epochs=3)
    assert caplog.text == ""


def test_a_learning_rate_that_a_hook_has_changed_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    class Halves(Hook):
        def on_step_end(self, optimizers: Any) -> None:
            optimizers[0].param_groups[0]["lr"] *= 0.5

    for epochs in (1, 2, 3):
        fit(Configured(adam(lr=0.1)), "c" if epochs > 1 else None, Halves(), max_epochs=epochs)
    assert caplog.text == ""


def test_a_schedulers_arguments_are_those_of_the_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    fit(Configured(scheduled(lambda optimizer: CosineAnnealingLR(optimizer, 10))))
    trainer = fit(
        Configured(scheduled(lambda optimizer: CosineAnnealingLR(optimizer, 20), lr=0.5)), "c", max_epochs=2
    )
    assert changes(caplog) == [
        "lr of SGD: 0.1 in the checkpoint, 0.5 now; 0.1 is used",
        "T_max of CosineAnnealingLR: 10 in the checkpoint, 20 now; 10 is used",
    ]
    assert trainer.state.schedulers[0].T_max == 10


def test_many_groups_with_the_same_change_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    def groups(lr: float) -> Any:
        return lambda parameters: torch.optim.SGD([{"params": [each]} for each in parameters], lr=lr)

    fit(Configured(groups(0.1)))
    fit(Configured(groups(0.2)), "c", max_epochs=2)
    assert changes(caplog) == ["lr of SGD: 0.1 in the checkpoint, 0.2 now; 0.1 is used (in 14 groups)"]


def test_it_is_said_again_at_the_next_resume_as_long_as_it_is_so(caplog: pytest.LogCaptureFixture) -> None:
    fit(Configured(adam(lr=0.1)))
    fit(Configured(adam(lr=0.2)), "c", max_epochs=2, accumulate_grad_batches=2)
    caplog.clear()
    fit(Configured(adam(lr=0.2)), "c", max_epochs=3, accumulate_grad_batches=2)
    assert changes(caplog) == ["lr of AdamW: 0.1 in the checkpoint, 0.2 now; 0.1 is used"]
    caplog.clear()
    fit(Configured(adam(lr=0.1)), "c", max_epochs=4, accumulate_grad_batches=2)
    assert caplog.text == ""


def test_a_new_learning_rate_that_is_set_as_advised_is_used_and_no_longer_news(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Sets(Hook):
        def on_checkpoint_load(self, optimizers: Any) -> None:
            optimizers[0].param_groups[0]["lr"] = 0.2

    fit(Configured(adam(lr=0.1)))
    trainer = fit(Configured(adam(lr=0.2)), "c", Sets(), max_epochs=2)
    assert trainer.state.optimizers[0].param_groups[0]["lr"] == 0.2
    caplog.clear()
    fit(Configured(adam(lr=0.2)), "c", max_epochs=3)
    assert changes(caplog) == []


def test_a_seed_that_is_no_longer_given_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    fit(Net(), seed=3)
    fit(Net(), "c", max_epochs=2, seed=None)
    assert caplog.text == ""


def test_a_checkpoint_without_settings_is_resumed_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    class Older(Hook):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            del checkpoint["settings"], checkpoint["record"]

    fit(Net(), None, Older())
    assert "settings" not in read(Path("c"))
    fit(Net(lr=0.5), "c", max_epochs=2, accumulate_grad_batches=2)
    assert caplog.text == ""


def test_layers_that_differ_keep_their_own_values() -> None:
    rates = nn.Sequential(
        *(nn.Dropout(p) for p in (0.1, 0.2)), nn.BatchNorm1d(3, momentum=0.3), nn.Conv1d(1, 1, 1)
    )
    found = module_settings(rates)
    assert found["*.p"] == [0.1, 0.2] and found["*.momentum"] == 0.3 and found["*.padding_mode"] == "zeros"
    assert not any("training" in name or "features" in name for name in found)
