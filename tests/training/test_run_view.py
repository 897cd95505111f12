"""What a trainer shows of its run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny import Net, batches, quiet


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
