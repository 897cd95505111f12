"""The loss changed in the course of a run: terms, weights, another loss in its place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import Net, SavesFirstEpoch, batches, quiet
from torch.nn import functional as F

from hookline import Hook, HookError, LossError, OptionError
from hookline.hooks.loss_schedule import LossSchedule


class Dict(Net):
    """Its step also returns what the loss was made of."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        made = self.layer(batch[0])
        return {"loss": F.mse_loss(made, batch[1]), "made": made}


class Gradients(Hook):
    """The loss and the gradient of each update."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradients: list[Any] = []
        self.own: list[float] = []

    def on_before_backward(self, loss: Any) -> None:
        self.own.append(loss.item())  # a user's hook is before the built-in one

    def on_step_end(self, loss: float, module: Any) -> None:
        self.losses.append(loss)
        self.gradients.append(module.layer.weight.grad.clone())


def change(
    net: Net | None = None, *, trainer: dict[str, Any] | None = None, **options: Any
) -> tuple[Gradients, Any]:
    """Two epochs of three equal batches without any learning, so that the loss itself is always the same."""
    seen = Gradients()
    runner = quiet(**{"max_epochs": 2, "hooks": [LossSchedule(**options), seen], **(trainer or {})})
    runner.fit(net or Dict(lr=0.0), batches(1) * 3)
    return seen, runner


def ratio(seen: Gradients) -> list[float]:
    return [round(loss / own, 4) for loss, own in zip(seen.losses, seen.own, strict=True)]


def test_the_weight_of_the_loss_by_moments() -> None:
    seen, _ = change(weight={0: 1.0, 2: 0.5, "1 epoch": 3.0})
    assert ratio(seen) == [1.0, 1.0, 0.5, 3.0, 3.0, 3.0]
    torch.testing.assert_close(seen.gradients[2] * 2, seen.gradients[0])


def test_the_weight_of_the_loss_by_a_function() -> None:
    seen, _ = change(weight=lambda step: 1.0 / (1 + step))
    assert ratio(seen)[:3] == [1.0, 0.5, 0.3333]


def test_a_term_is_added_and_trained_on() -> None:
    seen, _ = change(
        terms={"sum": lambda module: module.layer.weight.sum()}, weights={"sum": {0: 0.0, 3: 2.0}}
    )
    assert seen.losses[:3] == seen.own[:3]
    assert seen.losses[3] != seen.own[3]
    torch.testing.assert_close(seen.gradients[3] - seen.gradients[0], torch.full((2, 4), 2.0))


def test_a_term_without_weight_is_not_computed() -> None:
    calls: list[int] = []

    def costly(module: Any, step: int) -> Any:
        calls.append(step)
        return module.layer.bias.sum()

    change(terms={"costly": costly}, weights={"costly": {"4 steps": 1.0}})
    assert calls == [4, 5]


def test_functions_see_the_batch_and_the_living_outputs() -> None:
    seen, _ = change(terms={"aux": lambda outputs, batch: F.l1_loss(outputs["made"], batch[1])})
    assert all(loss > own for loss, own in zip(seen.losses, seen.own, strict=True))
    plain, _ = change(terms={"aux": lambda outputs, batch: 0 * outputs["made"].sum()})
    assert plain.losses == plain.own


def test_another_loss_takes_its_place_mid_run() -> None:
    seen, _ = change(replace={"1 epoch": lambda outputs, batch: F.l1_loss(outputs["made"], batch[1])})
    assert seen.losses[:3] == seen.own[:3]
    net, batch = Dict(lr=0.0), batches(1)[0]
    seen, _ = change(net, replace={3: lambda outputs, batch: F.l1_loss(outputs["made"], batch[1])})
    assert seen.losses[3] == pytest.approx(F.l1_loss(net.layer(batch[0]), batch[1]).item())
    assert not torch.equal(seen.gradients[3], seen.gradients[0])


def test_a_function_may_use_the_loss_itself() -> None:
    seen, _ = change(replace=lambda loss: loss**2)
    assert seen.losses == pytest.approx([own**2 for own in seen.own])


def test_terms_and_weights_are_logged_for_each_update() -> None:
    rows: list[dict[str, float]] = []
    seen = quiet(
        max_epochs=1,
        log_every_n_steps=1,
        hooks=[LossSchedule({"one": lambda loss: loss * 0 + 1.0}, {"one": 0.5})],
    )
    seen.on("train_metrics")(lambda metrics: rows.append(dict(metrics)))
    seen.fit(Dict(), batches(2))
    assert [(row["loss/one"], row["loss/one_weight"]) for row in rows[:2]] == [(1.0, 0.5)] * 2
    rows.clear()
    quietly = quiet(
        max_epochs=1,
        log_every_n_steps=1,
        hooks=[LossSchedule({"one": lambda loss: loss * 0 + 1.0}, log=False)],
    )
    quietly.on("train_metrics")(lambda metrics: rows.append(dict(metrics)))
    quietly.fit(Dict(), batches(2))
    assert not any("loss/one" in row for row in rows)


def test_it_is_right_under_accumulation() -> None:
    """A window of three equal batches has the gradient of one of them."""
    net, options = Dict(lr=0.0), {"terms": {"sum": lambda module: module.layer.weight.sum()}}
    one, _ = change(net, **options)
    window, _ = change(net, trainer={"accumulate_grad_batches": 3}, **options)
    assert len(window.gradients) == 2
    torch.testing.assert_close(window.gradients[0], one.gradients[0])


def test_a_resumed_run_is_at_its_place_in_the_schedule() -> None:
    saver = SavesFirstEpoch()
    options: dict[str, Any] = {"weight": {0: 1.0, 4: 5.0}}
    quiet(hooks=[LossSchedule(**options), saver]).fit(Dict(lr=0.0), batches(1) * 3)
    seen = Gradients()
    quiet(max_epochs=2, hooks=[LossSchedule(**options), seen]).fit(
        Dict(lr=0.0), batches(1) * 3, resume=saver.path
    )
    assert ratio(seen) == [1.0, 5.0, 5.0]


@pytest.mark.parametrize("made", [lambda loss: 3.0, lambda loss: torch.zeros(2)])
def test_a_term_that_is_no_loss_is_an_error_that_names_it(made: Any) -> None:
    with pytest.raises(LossError, match="the term 'bad' must return a loss"):
        change(terms={"bad": made})


def test_a_loss_that_trains_nothing_is_an_error() -> None:
    with pytest.raises(LossError, match="cannot be differentiated"):
        change(replace=lambda loss: loss.detach())


def test_outputs_are_not_there_in_manual_optimization() -> None:
    class Manual(Dict):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)["loss"]
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
            return loss

    with pytest.raises(HookError, match="`outputs` is not available"):
        change(Manual(), terms={"aux": lambda outputs: outputs["made"].sum()})
    seen, _ = change(Manual(lr=0.0), weight=2.0)
    assert seen.gradients


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "nothing to do"),
        ({"terms": {"a": 3}}, "the term 'a' must be a function"),
        ({"weight": "x"}, "weight='x'"),
        ({"terms": {"a": lambda bacth: 0}}, "has the parameter 'bacth'.*Did you mean 'batch'"),
        ({"weight": {"soon": 1.0}}, "soon"),
        ({"terms": {"aux": lambda loss: loss}, "weights": {"aus": 1.0}}, "Did you mean 'aux'"),
        ({"weight": {-1: 1.0}}, "is not a moment"),
        ({"weight": {0: "x"}}, "weight='x'"),
        ({"weight": {"3 minutes": 1.0}}, "is not a moment"),
        ({"replace": 3}, "must be a function"),
        ({"weight": 2.0, "log": 1}, "log=1"),
        ({"terms": "x"}, "terms='x' must be a mapping from names to functions"),
        (
            {"terms": {"a": lambda loss: loss}, "weights": [1.0]},
            "weights=.* must be a mapping from names to their weights",
        ),
    ],
)
def test_wrong_parameters_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((OptionError, HookError), match=message):
        LossSchedule(**options)
