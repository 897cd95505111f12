"""The events of a validation or a test, and the training that finds everything as it left it."""

from __future__ import annotations

from typing import Any

import pytest
from tiny import Net, batches, quiet
from torch import Tensor, nn

from hookline import Hook, on


class Mixed(Net):
    """One part is frozen in eval mode, one drops out."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.BatchNorm1d(4)
        self.frozen.eval()
        self.drop = nn.Dropout(0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((self.drop(self.frozen(batch[0])), batch[1]), batch_idx)


def modes(module: nn.Module) -> dict[str, bool]:
    return {name: each.training for name, each in module.named_modules()}


def test_validation_restores_every_submodules_own_mode() -> None:
    seen: list[dict[str, bool]] = []

    @on("train_batch_start")
    def look(module: Any) -> None:
        seen.append(modes(module))

    net = Mixed()
    before = modes(net)
    quiet(hooks=[look], val_check_interval=1, num_sanity_val_steps=1).fit(net, batches(3), batches(1))
    assert before["frozen"] is False and before["drop"] is True
    assert seen == [before] * 3
    assert modes(net) == before


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_a_failing_step_still_leaves_the_modes_as_they_were(verb: str) -> None:
    class Failing(Mixed):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            raise ZeroDivisionError

        test_step = predict_step = validation_step

    net = Failing()
    before = modes(net)
    with pytest.raises(ZeroDivisionError):
        getattr(quiet(), verb)(net, batches(2))
    assert modes(net) == before


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_every_verb_leaves_the_modes_as_they_were(verb: str) -> None:
    net = Mixed()
    before = modes(net)
    getattr(quiet(), verb)(net, batches(2))
    assert modes(net) == before


def test_a_module_may_put_itself_into_eval_mode_its_own_way() -> None:
    class KeepDropout(Mixed):
        def on_validation_model_eval(self) -> None:
            self.layer.eval()

        def on_validation_model_train(self) -> None:
            self.layer.train()
            self.restored = True

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            assert self.drop.training and not self.layer.training
            return super().validation_step(batch, batch_idx)

    net = KeepDropout()
    quiet().fit(net, batches(), batches(2))
    assert net.restored


def test_the_facts_of_the_interrupted_batch_are_put_back() -> None:
    facts: list[tuple[int, float, Any]] = []

    class Nested(Hook):
        def on_train_batch_end(self, trainer: Any) -> None:
            trainer.validate()

    class After(Hook):
        order = 1

        def on_train_batch_end(
            self, batch_idx: int, loss: float, batch: Any, outputs: Any, metrics: Any
        ) -> None:
            assert outputs.item() == loss == metrics["loss"]
            facts.append((batch_idx, loss, batch[0]))

    net = Net(lr=0.0)
    data = batches(3)
    quiet(hooks=[Nested(), After()]).fit(net, data, batches(5)[3:])
    assert [(i, loss) for i, loss, _ in facts] == [
        (i, net.training_step(b, 0).item()) for i, b in enumerate(data)
    ]
    assert all(batch is data[i][0] for i, _, batch in facts)


def test_batch_events_say_which_loader_a_batch_is_from() -> None:
    seen: list[tuple[int, str, int]] = []

    @on("validation_batch_start")
    def look(dataloader_idx: int, dataloader_name: str, batch_idx: int) -> None:
        seen.append((dataloader_idx, dataloader_name, batch_idx))

    quiet(hooks=[look]).validate(Net(), {"a": batches(2), "b": batches(1)})
    assert seen == [(0, "a", 0), (0, "a", 1), (1, "b", 0)]


def test_the_end_of_validation_hands_over_the_results_as_floats() -> None:
    class Look(Hook):
        def on_validation_epoch_end(self, metrics: Any) -> None:
            self.at_epoch_end = dict(metrics)

        def on_validation_end(self, metrics: Any) -> None:
            self.at_end = dict(metrics)

        def on_validation_batch_end(self, outputs: Tensor, metrics: Any) -> None:
            assert outputs.grad_fn is None
            assert metrics["loss"] == outputs.item()

    look = Look()
    metrics = quiet(hooks=[look]).validate(Net(), batches(2))
    assert look.at_epoch_end == look.at_end == dict(metrics)
    assert all(type(value) is float for value in look.at_end.values())


def test_what_a_hook_logs_at_the_end_of_validation_is_part_of_the_results() -> None:
    @on("validation_epoch_end")
    def perplexity(trainer: Any, metrics: Any) -> None:
        trainer.log("val/double", 2 * metrics["val/loss"])

    metrics = quiet(hooks=[perplexity]).validate(Net(), batches(2))
    assert metrics["val/double"] == pytest.approx(2 * metrics["val/loss"])
