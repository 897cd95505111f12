"""The live state: facts as attributes, the same as a dictionary, and costly ones worked out once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from metrics.reads import CountReads
from tiny import Net, batches, quiet

from hookline import Hook, State
from hookline.engine.events import FACT_ROWS
from hookline.run.state import detach_all, is_scalar, progress

DOCUMENTED_KEYS = (
    "model",
    "optimizer",
    "device",
    "current_epoch",
    "current_batch_idx",
    "latest_loss",
    "avg_loss",
    "model_params",
    "status",
)


class Watch(Hook):
    """Calls `look(state)` at the end of every batch."""

    def __init__(self, look: Any) -> None:
        self.look = look

    def on_train_batch_end(self, state: State) -> None:
        self.look(state)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"epochs": None}, "step 1,234"),
        ({"epochs": 5}, "step 1,234, 5 epochs"),
        ({"epochs": 1, "batches": 1}, "step 1,234, 1 epoch and 1 batch"),
        ({"epochs": 2, "is_inside": True}, "step 1,234, 2 epochs and part of the next"),
        ({"epochs": 0}, "step 1,234, 0 epochs"),
        ({"epochs": 0, "batches": 7}, "step 1,234, 7 batches of the first epoch"),
        ({"epochs": 0, "is_inside": True}, "step 1,234, in the first epoch"),
    ],
    ids=str,
)
def test_how_far_a_run_is_counts_completed_epochs(given: dict[str, Any], said: str) -> None:
    assert progress(1234, **given) == said


def test_the_nine_documented_keys_are_live() -> None:
    seen: list[dict[str, Any]] = []
    net = Net()
    quiet(max_epochs=2, hooks=[Watch(lambda s: seen.append({key: s[key] for key in DOCUMENTED_KEYS}))]).fit(
        net, batches(2)
    )
    assert [(each["current_epoch"], each["current_batch_idx"]) for each in seen] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert all(each["model"] is net and each["status"] == "training" for each in seen)
    assert all(each["model_params"] == 10 and str(each["device"]) == "cpu" for each in seen)
    assert all(isinstance(each["optimizer"], torch.optim.SGD) for each in seen)
    first, second, third, _ = seen
    assert first["avg_loss"] == pytest.approx(first["latest_loss"])
    assert second["avg_loss"] == pytest.approx((first["latest_loss"] + second["latest_loss"]) / 2)
    assert third["avg_loss"] == pytest.approx(third["latest_loss"])  # an epoch's average starts anew


@pytest.mark.parametrize(
    "fact", [fact.name for fact in FACT_ROWS if fact.everywhere and fact.name != "state"]
)
def test_every_fact_known_everywhere_is_a_key_too(fact: str) -> None:
    trainer = quiet()
    trainer.fit(Net(), batches(1))
    assert fact in trainer.state
    expected = trainer.state.logger if fact == "experiment" else getattr(trainer.state, fact)
    assert trainer.state[fact] is expected or trainer.state[fact] == expected


def test_tokens_are_counted_only_on_request() -> None:
    silent = quiet()
    silent.fit(Net(), batches(2))
    asked = quiet()
    asked.on("train_end")(lambda tokens_seen: None)
    asked.fit(Net(), batches(2, size=3))
    assert (silent.state.tokens_seen, asked.state.tokens_seen) == (0, 24)


def test_keys_of_your_own_can_be_added_but_facts_cannot_be_replaced() -> None:
    state = State()
    state["mine"] = 1
    assert state["mine"] == 1 and "mine" in state and "mine" in list(state)
    del state["mine"]
    assert "mine" not in state
    for key in ("status", "model", "step"):
        with pytest.raises(TypeError, match=f"state\\['{key}'\\] is a fact"):
            state[key] = 5


def test_an_unknown_key_names_the_closest() -> None:
    with pytest.raises(KeyError, match="latest_los'.*Did you mean 'latest_loss'"):
        State()["latest_los"]
    assert State().get("nothing like it") is None


def test_it_is_a_whole_mapping() -> None:
    state = State()
    state["mine"] = 1
    assert len(state) == len(list(state)) == len(set(state))
    assert set(dict(state)) == set(state)


def test_before_a_run_everything_is_none_empty_or_zero() -> None:
    state = State()
    assert (state.loss, state.window_loss, state.grad_norm, state.lr, state.outputs) == (None,) * 5
    assert (state.step, state.epoch, dict(state.metrics), state["model_params"]) == (0, 0, {}, 0)
    assert (state["latest_loss"], state["avg_loss"], state["optimizer"]) == (None, None, None)


def test_a_typo_in_an_attribute_is_an_error() -> None:
    with pytest.raises(AttributeError):
        State().stpe = 1  # type: ignore[attr-defined]


def test_the_loss_is_read_once_however_many_ask() -> None:
    class Asks(Hook):
        def on_train_batch_end(self, loss: float, state: State) -> None:
            assert loss == state.loss == state["latest_loss"]

    with CountReads() as counter:
        quiet(hooks=[Asks("a"), Asks("b"), Asks("c")]).fit(Net(), batches(4))
    assert (
        len(counter.reads) == 4 + 2
    )  # and whether the weights are finite, before the first step and when all is over


def test_outputs_are_what_the_step_returned_without_its_graph() -> None:
    class Returns(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return {"loss": loss, "deep": [loss, (loss, "text")], "n": 3}

    seen: list[Any] = []
    trainer = quiet()
    trainer.on("train_batch_end")(lambda outputs: seen.append(outputs))
    trainer.fit(Returns(), batches(1))
    (outputs,) = seen
    assert outputs["n"] == 3 and outputs["deep"][1][1] == "text" and isinstance(outputs["deep"][1], tuple)
    assert not any(
        each.requires_grad for each in (outputs["loss"], outputs["deep"][0], outputs["deep"][1][0])
    )


def test_batch_metrics_have_plain_keys_and_everything_logged_in_this_batch() -> None:
    class Returns(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 0:
                self.log("first_only", 1.0)
            return {"loss": super().training_step(batch, batch_idx), "acc": 0.5, "text": "no"}

    seen: list[dict[str, float]] = []
    trainer = quiet()
    trainer.on("train_batch_end")(
        lambda metrics, loss: seen.append({**metrics, "same": metrics["loss"] == loss})
    )
    trainer.fit(Returns(), batches(2))
    assert [sorted(each) for each in seen] == [["acc", "first_only", "loss", "same"], ["acc", "loss", "same"]]
    assert all(each["same"] and each["acc"] == 0.5 for each in seen)


def test_the_window_loss_is_the_mean_of_its_batches() -> None:
    losses: list[float] = []
    windows: list[float] = []
    trainer = quiet(accumulate_grad_batches=2)
    trainer.on("train_batch_end")(lambda loss: losses.append(loss))
    trainer.on("step_end")(lambda loss: windows.append(loss))
    trainer.fit(Net(), batches(5))
    assert windows == pytest.approx([(losses[0] + losses[1]) / 2, (losses[2] + losses[3]) / 2, losses[4]])


def test_a_second_fit_starts_from_a_fresh_state() -> None:
    trainer = quiet()
    trainer.fit(Net(), batches(3))
    trainer.fit(Net(), batches(2))
    assert (trainer.state.step, trainer.state.batches_seen) == (2, 2)


def test_it_says_where_the_run_is() -> None:
    state = State(stage="fit", epoch=2, batch_idx=5, step=17, status="training")
    assert repr(state) == "<State: fit, epoch 2, batch 5, step 17, training>"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.0, True),
        (3, True),
        (torch.tensor(1.0), True),
        (torch.zeros(1, 1), True),
        (True, False),
        ("1", False),
        (None, False),
        (torch.zeros(2), False),
        ([1.0], False),
    ],
)
def test_a_scalar_is_a_number_or_a_tensor_of_one_element(value: Any, expected: bool) -> None:
    assert is_scalar(value) is expected


def test_detaching_keeps_kinds_and_leaves_other_things_alone() -> None:
    thing = object()
    value = {"a": [torch.ones(1, requires_grad=True)], "b": (thing,), "c": "text"}
    result = detach_all(value)
    assert not result["a"][0].requires_grad and result["b"] == (thing,) and result["c"] == "text"
    assert value["a"][0].requires_grad  # the original is untouched
