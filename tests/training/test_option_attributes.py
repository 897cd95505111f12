"""The options of a trainer are attributes; limits can be set between runs and in a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import Net, batches, quiet

from hookline import Hook, OptionError, Trainer
from hookline.run.options import OPTION_NAMES


def test_every_option_can_be_read() -> None:
    trainer = quiet(max_epochs=3, gradient_clip_val=0.5)
    assert trainer.max_epochs == 3 and trainer.max_steps == -1
    assert trainer.gradient_clip_val == 0.5
    assert all(hasattr(Trainer, name) for name in OPTION_NAMES)


def test_a_fit_with_a_higher_limit_trains_longer(tmp_path: Path) -> None:
    trainer = quiet(max_epochs=2, run_dir=tmp_path, checkpoint=True)
    module = Net()
    trainer.fit(module, batches())
    trainer.max_epochs = 5
    trainer.fit(module, batches(), resume="auto")
    assert trainer.state.epochs_seen == 5 and trainer.global_step == 20


def test_a_hook_can_set_a_limit_in_a_run() -> None:
    class Sets(Hook):
        def on_train_epoch_end(self, trainer: Any, epoch: int) -> None:
            if epoch == 0:
                trainer.max_epochs = 3

    trainer = quiet(max_epochs=10, hooks=[Sets()])
    trainer.fit(Net(), batches())
    assert trainer.state.epochs_seen == 3
    trainer.max_time = "1 minute"
    assert trainer.max_time == 60.0


def test_values_are_checked_and_other_options_are_refused() -> None:
    trainer = quiet(min_epochs=1)
    with pytest.raises(OptionError, match="max_epochs"):
        trainer.max_epochs = -3
    with pytest.raises(OptionError, match="min_epochs=1 is more than max_epochs=0"):
        trainer.max_epochs = 0
    assert trainer.max_epochs == 1
    with pytest.raises(
        OptionError, match="chosen when the trainer is made.*accumulate_grad_batches, max_epochs"
    ):
        trainer.gradient_clip_val = 1.0
    trainer.remark = "free"
    with pytest.raises(OptionError, match=r"no argument 'max_epochs'. It is an option of Trainer: Trainer\("):
        trainer.fit(Net(), batches(), max_epochs=3)
