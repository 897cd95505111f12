"""Strategies by their names."""

from __future__ import annotations

import pytest
import torch

from hookline import DDP, FSDP, Accelerated, OptionError, SingleDevice, Trainer
from hookline.distributed import make_strategy


@pytest.mark.parametrize(
    ("name", "kind"), [("ddp", DDP), ("fsdp", FSDP), ("accelerate", Accelerated), ("auto", SingleDevice)]
)
def test_a_strategy_by_its_name(name: str, kind: type) -> None:
    strategy = make_strategy(name, "cpu", "bf16-mixed")
    assert type(strategy) is kind
    assert strategy.precision.name == "bf16-mixed"
    assert (strategy.rank, strategy.world_size) == (0, 1)


def test_in_a_job_of_several_processes_auto_is_ddp(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    trainer = Trainer()
    assert isinstance(trainer.strategy, DDP)
    assert (trainer.strategy.rank, trainer.strategy.local_rank, trainer.strategy.world_size) == (1, 1, 2)
    assert not trainer.loggers  # one record of a run, by rank zero


def test_a_strategy_is_made_from_its_name_or_taken_as_it_is() -> None:
    own = SingleDevice(torch.device("cpu"))
    assert make_strategy(own, "auto", 32) is own
    assert isinstance(make_strategy("auto", "cpu", 32), SingleDevice)
    assert make_strategy("single", "cpu", "bf16-mixed").precision.name == "bf16-mixed"
    with pytest.raises(OptionError, match="strategy='ddpp', allowed: 'auto', 'single'"):
        make_strategy("ddpp", "cpu", 32)
