"""A trainer with options, function hooks, handles, and what a run gives back."""

from __future__ import annotations

import datetime
from pathlib import Path

import torch
from a_module import Data, Manual, Regression, Watch
from many_hooks import hooks

from hookline import (
    JSONLines,
    Metrics,
    Recorder,
    StopTraining,
    Trainer,
    declare_event,
    every,
    on,
    seed_everything,
)


@on("step_end", every="2 steps")
def report(step: int, loss: float) -> None:
    assert step % 2 == 0 and loss >= 0.0


@every(2)
@on("train_batch_end", "validation_batch_end")
def look(batch_idx: int) -> None:
    assert batch_idx >= 0


def main() -> Metrics:
    seed_everything(1)
    trainer = Trainer(
        hooks=[*hooks(), report, look, Watch],
        logger=[JSONLines()],
        strategy="single",
        device=torch.device("cpu"),
        precision="bf16-mixed",
        config={"anything": 1},
        max_epochs=2,
        max_steps=100,
        max_time=datetime.timedelta(hours=1),
        gradient_clip_val=1.0,
        gradient_clip_algorithm="norm",
        accumulate_grad_batches=1,
        val_check_interval=0.5,
        limit_val_batches=1,
        enable_progress_bar=False,
        run_dir=Path("run"),
        log_every_n_steps=1,
    )

    @trainer.on("train_epoch_end", name="epochs")
    def count(epoch: int) -> None:
        if epoch > 5:
            raise StopTraining("enough")

    count.remove()
    with (
        trainer.add_hook(Watch(), name="second") as handle,
        Recorder(trainer, events=["train_start"]) as recorder,
    ):
        metrics = trainer.fit(Regression(), Data())
        name: str = handle.name
    events: list[str] = recorder.events()
    assert events == ["on_train_start"] and name == "second"
    steps: int = trainer.global_step
    loss: float = metrics["train/loss"]
    assert steps == 4 and loss >= 0.0
    assert trainer.status == "completed"
    Trainer(logger=False, max_epochs=1, enable_progress_bar=False).fit(Manual(), datamodule=Data())
    return metrics


class Theirs:
    """A data module as another package has it, which is recognised when it comes from there."""

    def prepare_data(self) -> None: ...

    def setup(self, stage: str | None = None) -> None: ...

    def train_dataloader(self) -> object: ...


def with_the_data_of_another_package(trainer: Trainer, data: Theirs) -> None:
    trainer.fit(Regression(), datamodule=data)
    trainer.validate(Regression(), datamodule=data)


def own_event() -> float:
    declare_event("on_reward", facts=("reward",), doc="A reward came in.", replaces="reward")
    trainer = Trainer(logger=False, enable_progress_bar=False)

    @trainer.on("reward")
    def double(reward: float) -> float:
        return reward * 2

    doubled: float = trainer.emit("on_reward", reward=1.5)
    assert double.name == "double"
    return doubled


if __name__ == "__main__":
    main()
