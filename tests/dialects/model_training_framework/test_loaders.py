"""Several loaders, as the framework's configuration mixes them."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from dialects.model_training_framework.documented import Coder, make, silent, training_step
from tiny import batches

from hookline import OptionError
from hookline.interop.model_training_framework import (
    EpochLengthPolicy,
    GenericTrainer,
    MultiDataLoaderConfig,
    PerformanceConfig,
    SamplingStrategy,
    TrainerHooks,
    ValAggregation,
    ValidationConfig,
)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 2.0),  # over all samples: 3 of them at 1, 3 at 2 and 3 at 3
        ({"aggregation": ValAggregation.MACRO_AVG_EQUAL_LOADERS}, 1.75),
        ({"aggregation": ValAggregation.PRIMARY_METRIC_PER_LOADER}, 1.0),
        (
            {
                "aggregation": ValAggregation.CUSTOM,
                "aggregation_fn": lambda found: {"loss": max(each["loss"] for each in found.values())},
            },
            2.5,
        ),
        ({"validation_weights": [3.0, 1.0]}, 1.375),
    ],
)
def test_the_results_of_several_validation_loaders_become_one_as_configured(
    settings: dict[str, Any], expected: float
) -> None:
    config = silent(validation=ValidationConfig(**settings))
    config.val_loader_config.dataloader_names = ["short", "long"]
    trainer = make(config, losses=(1.0, 2.0, 3.0))
    found = trainer.fit(
        [batches(1)], [batches(1), batches(2)], max_epochs=1
    )  # each batch once, however unequal the loaders
    assert found["val/loss"] == pytest.approx(expected)
    assert found["val/dl_short/loss"] == 1.0 and found["val/dl_long/loss"] == 2.5


class Draws(TrainerHooks):
    """Notes which loader each batch came from, by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[str] = []

    def on_epoch_start(self, trainer: Any, epoch: int) -> None:
        self.epochs.append("")

    def on_train_batch_end(
        self, trainer: Any, batch: Any, loader_idx: int, loader_name: str, metrics: Any
    ) -> None:
        assert trainer.multi_loader_manager.names[loader_idx] == loader_name
        self.epochs[-1] += loader_name[0]


@pytest.mark.parametrize(
    ("settings", "drawn"),
    [
        ({}, "webwww"),
        ({"sampling_strategy": SamplingStrategy.SEQUENTIAL}, "wwwweb"),
        ({"sampling_strategy": SamplingStrategy.ALTERNATING, "alternating_pattern": [0, 0, 1, 2]}, "wwebww"),
        (
            {
                "sampling_strategy": SamplingStrategy.WEIGHTED,
                "dataloader_weights": [2, 1, 1],
                "steps_per_epoch": 4,
                "epoch_length_policy": EpochLengthPolicy.FIXED_NUM_STEPS,
            },
            "wewb",
        ),
        ({"epoch_length_policy": EpochLengthPolicy.MIN_OF_LENGTHS}, "w"),
        ({"epoch_length_policy": EpochLengthPolicy.MAX_OF_LENGTHS, "burst_size": 2}, "wwee"),
        ({"cycle_short_loaders": True}, "webweb"),
        ({"sampling_strategy": "sequential", "cycle_short_loaders": False}, "wwwweb"),
    ],
)
def test_several_loaders_are_drawn_from_as_configured(settings: dict[str, Any], drawn: str) -> None:
    draws = Draws()
    config = silent(
        train_loader_config=MultiDataLoaderConfig(dataloader_names=["web", "extra", "books"], **settings)
    )
    make(config, draws).fit([batches(4), batches(1), batches(1)], max_epochs=1)
    assert draws.epochs == [drawn]


def test_a_fixed_number_of_steps_is_drawn_from_endless_loaders() -> None:
    class Endless:
        def __iter__(self) -> Any:
            return itertools.cycle(batches(1))

    draws = Draws()
    config = silent()
    config.train_loader_config = MultiDataLoaderConfig(
        epoch_length_policy=EpochLengthPolicy.FIXED_NUM_STEPS, steps_per_epoch=5
    )
    make(config, draws).fit({"web": Endless(), "extra": Endless()}, max_epochs=2)
    assert draws.epochs == ["wewew", "wewew"] or draws.epochs == ["wewew", "ewewe"]


def test_weights_of_losses_change_the_training_and_each_loader_trains_its_own_optimizer() -> None:
    def trained(**settings: Any) -> Coder:
        torch.manual_seed(1)
        model = Coder()
        parts = [
            torch.optim.SGD(model.encoder.parameters(), lr=0.1),
            torch.optim.SGD(model.decoder.parameters(), lr=0.1),
        ]
        performance = PerformanceConfig(clip_grad_norm=None, gradient_accumulation_steps=2)
        trainer = GenericTrainer(silent(performance=performance, **settings), model, parts, logger=False)
        trainer.set_training_step(training_step)
        trainer.fit([batches(2), batches(2)], max_epochs=1)
        return model

    plain, weighted = trained(), trained(loss_weights_per_loader=[1.0, 1000.0])
    assert not torch.equal(plain.encoder.weight, weighted.encoder.weight)
    torch.manual_seed(1)
    untrained, first, both = (
        Coder(),
        trained(per_loader_optimizer_id=[0, 0]),
        trained(per_loader_optimizer_id=[0, 1]),
    )
    assert torch.equal(first.decoder.weight, untrained.decoder.weight) and not torch.equal(
        first.encoder.weight, untrained.encoder.weight
    )
    assert not torch.equal(both.decoder.weight, untrained.decoder.weight) and not torch.equal(
        both.encoder.weight, untrained.encoder.weight
    )


def test_a_hook_changes_weights_strategy_and_loaders_from_the_next_epoch_on() -> None:
    class Curriculum(TrainerHooks):
        def on_epoch_end(self, trainer: Any, epoch: int) -> None:
            if epoch == 0:
                trainer.multi_loader_manager.update_weights([1, 3])
            if epoch == 1:
                trainer.add_dataloader(loader=batches(2), name="hard", weight=4)

        def on_epoch_start(self, trainer: Any, epoch: int) -> None:
            if epoch == 3:
                trainer.multi_loader_config.sampling_strategy = SamplingStrategy.SEQUENTIAL
                trainer.multi_loader_config.dataloader_weights = None
                trainer.multi_loader_manager.rebuild_schedule()

    draws = Draws()
    weighted = MultiDataLoaderConfig(
        SamplingStrategy.WEIGHTED,
        [3, 1],
        dataloader_names=["easy", "medium"],
        epoch_length_policy=EpochLengthPolicy.FIXED_NUM_STEPS,
        steps_per_epoch=8,
    )
    make(silent(train_loader_config=weighted), Curriculum(), draws).fit(
        [batches(2), batches(2)], max_epochs=4
    )
    assert [dict(sorted(Counter(epoch).items())) for epoch in draws.epochs[:3]] == [
        {"e": 6, "m": 2},
        {"e": 2, "m": 6},
        {"e": 1, "h": 4, "m": 3},
    ]
    assert draws.epochs[3] == "eemmhhee"  # one after the other, and from the start


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataloader_names": ["only"]}, r"there are 2 loaders and 1 dataloader_names \(only\)"),
        ({"dataloader_names": ["same", "same"]}, "has a name twice"),
        ({"dataloader_weights": [1.0]}, "has 1 entries for 2 loaders"),
        ({"sampling_strategy": "wieghted"}, "Did you mean 'weighted'"),
        ({"sampling_strategy": SamplingStrategy.WEIGHTED}, "needs weights"),
        (
            {"sampling_strategy": SamplingStrategy.ALTERNATING, "alternating_pattern": [0, 2]},
            "numbered from 0 to 1",
        ),
        ({"epoch_length_policy": EpochLengthPolicy.FIXED_NUM_STEPS}, "FIXED_NUM_STEPS needs steps_per_epoch"),
    ],
)
def test_settings_of_loaders_that_cannot_be_meant_are_refused_before_the_first_step(
    settings: dict[str, Any], message: str
) -> None:
    trainer = make(silent(train_loader_config=MultiDataLoaderConfig(**settings)))
    with pytest.raises(OptionError, match=message):
        trainer.fit([batches(1), batches(1)])
    assert trainer.global_step == 0
