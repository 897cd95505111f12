"""Trials beside a run: a short fit inside the set-up of another one, and batches that leave nothing behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet
from torch.utils.data import DataLoader, TensorDataset

from hookline import DataModule, Hook
from hookline.training.trial import SHORT
from hookline.util.errors import HooklineError


class Probe(Hook):
    """Notes what a short fit has, and ends it after two steps."""

    def __init__(self) -> None:
        self.options: Any = None
        self.steps = 0
        self.hooks: list[str] = []

    def on_train_start(self, trainer: Any) -> None:
        self.options, self.hooks = trainer.options, trainer.hooks.list_hooks()

    def on_step_end(self, trainer: Any) -> None:
        self.steps += 1
        if self.steps == 2:
            trainer.stop("enough")


class Outer(Hook):
    """Runs a short fit in `setup`."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe

    def setup(self, trainer: Any, module: Any) -> None:
        trainer.fit_aside(self.probe, {"max_steps": 5}, module, **trainer.batch_sizes.arguments)


class Data(DataModule):
    def train_dataloader(self) -> Any:
        return batches(3)


class Logs(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("step", float(self.trainer.global_step))  # needs the run that the module is attached to
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    "arguments", [{"train": batches(3)}, {"datamodule": Data()}], ids=["loader", "module"]
)
def test_a_fit_inside_the_set_up_of_a_run_has_one_hook_and_leaves_the_run_alone(arguments: Any) -> None:
    probe, net = Probe(), Logs()
    trainer = quiet(hooks=[Outer(probe)], seed=1, max_epochs=2)
    trainer.fit(net, arguments.get("train"), datamodule=arguments.get("datamodule"))
    assert probe.steps == 2 and probe.hooks == ["probe"] and probe.options.max_steps == 5
    assert {name: getattr(probe.options, name) for name in SHORT} == dict(SHORT)
    assert trainer.global_step == 6 and trainer.status == "completed"
    assert trainer.metrics["step"] == 5.0  # in the last batch of the second epoch


def test_a_failure_of_the_short_fit_is_one_of_the_run_and_the_modes_are_restored() -> None:
    class Fails(Probe):
        def on_step_end(self, trainer: Any) -> None:
            trainer.module.eval()
            raise ValueError("broken")

    net = Net()
    with pytest.raises(ValueError, match="broken"):
        quiet(hooks=[Outer(Fails())]).fit(net, batches(2))
    assert net.training


def test_random_streams_are_those_before() -> None:
    net, before = Net(), torch.get_rng_state()
    quiet().fit_aside(Probe(), {"seed": 4}, net, batches(3))
    assert torch.equal(torch.get_rng_state(), before)


def test_batch_sizes_belong_to_a_run_before_its_loader_is_made() -> None:
    loader = DataLoader(TensorDataset(torch.randn(12, 4), torch.randn(12, 2)), 2)
    seen: list[Any] = []

    class Sets(Hook):
        def setup(self, trainer: Any) -> None:
            trainer.batch_sizes.set(6)

        def on_train_start(self, trainer: Any) -> None:
            seen.append((trainer.num_training_batches, trainer.batch_sizes.largest(), trainer.is_resuming))
            with pytest.raises(HooklineError, match="until the training loader is made"):
                trainer.batch_sizes.set(3)

    trainer = quiet(hooks=[Sets()])
    trainer.fit(Net(), loader)
    assert seen == [(2, 12, False)] and not trainer.is_resuming
    with pytest.raises(HooklineError, match="works during a run"):
        _ = trainer.batch_sizes


def test_a_trial_trains_without_events_counters_or_logs() -> None:
    events: list[str] = []
    fits: list[bool] = []

    class Listens(Hook):
        def on_train_batch_start(self) -> None:
            events.append("batch")

        def on_after_batch_transfer(self) -> None:
            events.append("transfer")

    class Tries(Hook):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            weight = module.layer.weight.detach().clone()
            fits.extend(trainer.batch_sizes.fits(size, 2) for size in (3, 12, 13))
            assert not torch.equal(module.layer.weight, weight) and module.layer.weight.grad is None
            assert trainer.global_step == 0 and not trainer.metrics and trainer.state.samples_seen == 0
            events.append("over")

    loader = DataLoader(TensorDataset(torch.randn(12, 4), torch.randn(12, 2)), 2)
    quiet(hooks=[Listens(), Tries()]).fit(Logs(), loader)
    assert fits == [True, True, True]  # the last one is a batch of all samples
    # what may change a batch takes part, because the training step may need it
    assert events[: events.index("over")] == ["transfer"] * 4
