"""The decisions of the loop that a trainer of another package may take differently."""

from __future__ import annotations

import pytest
import torch
from tiny import Net, batches, quiet

from hookline import Trainer
from hookline.training.rules import LoopRules


def trained(rules: LoopRules | None, count: int) -> torch.Tensor:
    torch.manual_seed(0)
    module, trainer = Net(), quiet(accumulate_grad_batches=2)
    trainer.rules = rules
    trainer.fit(module, batches(count))
    return torch.cat([each.detach().flatten() for each in module.parameters()])


def test_a_short_window_is_the_mean_of_its_losses_unless_the_rules_say_otherwise() -> None:
    class Divides(LoopRules):
        averages_short_windows = False

    assert torch.equal(trained(None, 4), trained(Divides(), 4))
    assert not torch.equal(trained(None, 3), trained(Divides(), 3))


@pytest.mark.parametrize(("options", "steps"), [({}, 1), ({"min_steps": 3}, 3), ({"min_epochs": 2}, 8)])
def test_a_stop_waits_for_the_least_epochs_and_steps(options: dict[str, int], steps: int) -> None:
    trainer = quiet(max_epochs=5, **options)
    trainer.on("train_batch_end")(lambda trainer: trainer.stop("enough"))
    trainer.fit(Net(), batches(4))
    assert trainer.global_step == steps


def test_rules_decide_whether_a_stop_takes_effect() -> None:
    class Never(LoopRules):
        def may_stop(self, run: object) -> bool:
            return False

    trainer = quiet(max_epochs=2)
    trainer.rules = Never()
    trainer.on("train_batch_end")(lambda trainer: trainer.stop("in vain"))
    trainer.fit(Net(), batches(4))
    assert trainer.global_step == 8


def test_every_trainer_has_rules_of_its_own_while_it_runs() -> None:
    seen = []
    trainer = quiet()
    trainer.on("train_start")(lambda trainer: seen.append(trainer._run.traits.rules))
    trainer.fit(Net(), batches(1))
    assert type(seen[0]) is LoopRules and Trainer.rules is None
