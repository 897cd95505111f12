"""What a trainer shows of its run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet

from hookline import OptionError


def test_the_lengths_of_all_loaders_are_known_by_name() -> None:
    trainer = quiet()
    assert trainer.num_batches() == {}
    trainer.fit(Net(), batches(4), {"a": batches(2), "b": (batch for batch in batches(3))})
    assert trainer.num_batches("train") == {"train": 4}
    assert trainer.num_batches("val") == {"a": 2, "b": None}
    assert trainer.num_training_batches == 4


def test_the_schedules_say_when_they_advance() -> None:
    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "interval": "step", "name": "decay"},
            }

    trainer = quiet()
    assert trainer.schedules == []
    trainer.fit(Scheduled(), batches(2))
    assert [(each.name, each.interval) for each in trainer.schedules] == [("decay", "step")]


def test_the_id_of_a_run_is_kept_by_what_continues_it(tmp_path: Path) -> None:
    trainer = quiet(run_dir=tmp_path)
    assert trainer.run_id == ""
    trainer.fit(Net(), batches(1))
    trainer.save_checkpoint()
    first = trainer.run_id
    trainer.test(Net(), batches(1))
    assert first and trainer.run_id == first
    again = quiet(run_dir=tmp_path, max_epochs=2)
    again.fit(Net(), batches(1), resume="auto")
    assert again.run_id == first
    other = quiet()
    other.fit(Net(), batches(1))
    assert other.run_id not in ("", first)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("max_epoch", "max_epochs"),
        ("maxEpochs", "max_epochs"),
        ("max_setps", "max_steps"),
        ("accumulate_grad_batch", "accumulate_grad_batches"),
        ("limit_val_batch", "limit_val_batches"),
        ("shuold_stop", "should_stop"),
    ],
)
def test_a_misspelled_option_is_refused_with_the_right_name(wrong: str, right: str) -> None:
    trainer = quiet()
    with pytest.raises(OptionError, match=f"no option '{wrong}'. Did you mean '{right}'?") as refused:
        setattr(trainer, wrong, 4)
    assert refused.value.option == wrong and not hasattr(trainer, wrong)


def test_hooks_may_share_attributes_of_their_own_on_the_trainer() -> None:
    trainer = quiet()
    for name in ("hook_data", "seeds", "max_loss", "steps", "_max_epoch", "best", "run_dirs", "stopped"):
        setattr(trainer, name, {"seen": 1})
        setattr(trainer, name, {"seen": 2})
        assert getattr(trainer, name) == {"seen": 2}
    trainer.max_epochs = 2
    trainer.fit(Net(), batches(1))
    assert trainer.current_epoch == 1
