"""Schedules that lead to the end of the run: what is its end after a resume with other settings?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, quiet
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hookline import SKIP_STEP, Hook, OptionError
from hookline.hooks import LRSchedule, ParameterSchedule

DATA = TensorDataset(torch.randn(64, 4), torch.randn(64, 2))


class Values(Hook):
    """The learning rate and the weight decay of each update; leaves out the updates of some batches."""

    tier = "builtin"

    def __init__(self, skipped: tuple[int, ...] = ()) -> None:
        self.skipped, self.seen = skipped, list[tuple[float, float]]()

    def on_before_optimizer_step(self, optimizer: Any, batches_seen: int) -> Any:
        group = optimizer.param_groups[0]
        self.seen.append((round(group["lr"], 6), round(group["weight_decay"], 6)))
        return SKIP_STEP if batches_seen in self.skipped else None


def train(
    run_dir: Path,
    batch_size: int = 8,
    cut: int = -1,
    epochs: int = 4,
    skipped: tuple[int, ...] = (),
    **options: Any,
) -> tuple[list[tuple[float, float]], int]:
    """Train and return what every update used, and the number of updates in all. cut: after so many."""
    schedules = [LRSchedule("linear"), ParameterSchedule("optimizer.weight_decay", "linear", end=1.0)]
    values = Values(skipped)
    trainer = quiet(
        max_epochs=epochs, run_dir=run_dir, seed=0, hooks=[values, *schedules], checkpoint=True, **options
    )

    @trainer.on("step_end")
    def stop(step: int) -> None:
        if step == cut:
            trainer.stop("cut")

    net, last = Net(lr=1.0), run_dir / "checkpoints" / "last"  # "auto" does not continue a stopped run
    trainer.fit(net, DataLoader(DATA, batch_size, shuffle=True), resume=last if last.exists() else None)
    return values.seen, trainer.global_step


@pytest.mark.parametrize("cut", [20, 16], ids=["inside an epoch", "between two epochs"])
@pytest.mark.parametrize("how", ["batch size", "accumulation"])
def test_a_larger_batch_after_a_resume_leaves_the_schedule_its_way_to_the_end(
    tmp_path: Path, cut: int, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, cut=cut)
    changed: Any = {"batch_size": 16} if how == "batch size" else {"accumulate_grad_batches": 2}
    seen, steps = train(tmp_path, **changed)
    total = cut + (32 - cut) // 2
    assert steps == total
    assert f"the run has {total} steps now; when it was saved, it had 32" in caplog.text
    assert [lr for lr, _ in seen] == pytest.approx([1 - step / total for step in range(cut, total)], abs=1e-6)
    assert [decay for _, decay in seen] == pytest.approx(
        [step / total for step in range(cut, total)], abs=1e-6
    )


def test_the_changed_length_stays_in_the_next_resume(tmp_path: Path) -> None:
    train(tmp_path / "whole", cut=20)
    train(tmp_path / "killed", cut=20)
    whole, _ = train(tmp_path / "whole", batch_size=16)
    first, _ = train(tmp_path / "killed", batch_size=16, cut=23)
    second, _ = train(tmp_path / "killed", batch_size=16)
    assert first + second == whole


def test_a_resume_with_the_same_settings_keeps_the_length_though_updates_were_left_out(
    tmp_path: Path,
) -> None:
    skipped = (3, 4, 11)
    whole, _ = train(tmp_path / "whole", skipped=skipped)
    first, _ = train(tmp_path / "killed", skipped=skipped, cut=15)
    second, _ = train(tmp_path / "killed", skipped=skipped)
    assert first + second == whole


def test_max_steps_is_the_end_also_with_another_batch_size(tmp_path: Path) -> None:
    train(tmp_path, cut=4, epochs=-1, max_steps=12)
    seen, steps = train(tmp_path, batch_size=32, epochs=-1, max_steps=12)
    assert steps == 12
    assert [lr for lr, _ in seen] == pytest.approx([1 - step / 12 for step in range(4, 12)], abs=1e-6)


def test_a_loader_without_a_length_is_named_as_the_reason() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(DATA)

    trainer = quiet(max_epochs=2, hooks=[LRSchedule("cosine")])
    text = (
        r"the number of steps of the run is unknown, because the training loader has no length; pass total="
    )
    with pytest.raises(OptionError, match=text):
        trainer.fit(Net(), DataLoader(Stream(), 8))
