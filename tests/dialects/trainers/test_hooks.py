"""Hooks of trainers: their names, state, parameters and manager."""

from __future__ import annotations

from typing import Any

import pytest
from dialects.trainers.documented import (
    CUSTOM_HOOK,
    MANAGEMENT,
    QUICK_START,
    STATE,
    Heard,
    parts,
    run_block,
    simple,
)
from test_budgets import per_step
from tiny import Net, batches

import hookline.interop.trainers
from hookline import Hook, HookError, Recorder, every
from hookline.interop.trainers import (
    CheckpointHook,
    ConsoleLogHook,
    HookManager,
    JSONLogHook,
    TrainingHook,
    get_trainer,
)


def test_the_custom_hook_has_its_name_and_averages_losses_that_are_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer = simple(101)
    names = run_block(CUSTOM_HOOK, {"trainer": trainer})
    assert trainer.hooks.list_hooks() == ["my_custom_hook"]
    trainer.train()
    losses = trainer.hooks.get_hook("my_custom_hook").losses
    assert isinstance(trainer.hooks.get_hook("my_custom_hook"), names["CustomHook"])
    assert len(losses) == 101 and all(type(loss) is float for loss in losses)
    assert capsys.readouterr().out.splitlines() == [
        f"Average loss: {losses[0]:.4f}",
        f"Average loss: {sum(losses) / 101:.4f}",
    ]


def test_hooks_are_managed_by_name_as_the_document_does(capsys: pytest.CaptureFixture[str]) -> None:
    names = run_block(QUICK_START, parts(1))
    capsys.readouterr()
    run_block(MANAGEMENT, {**names, "my_hook": Heard("mine")})
    assert capsys.readouterr().out == "['json_log', 'checkpoint', 'mine']\n"


def test_the_state_has_the_documents_keys_with_true_values_in_the_middle_of_an_epoch() -> None:
    names, moments = parts(5), []

    class Looks(TrainingHook):
        def on_batch_end(self, batch_idx: int, loss: float, state: Any) -> None:
            losses.append(loss)
            if (state["current_epoch"], state["current_batch_idx"]) == (3, 2):
                moments.append({**state})

    losses: list[float] = []
    trainer = get_trainer("simple", **names, num_epochs=3)
    trainer.add_hook(Looks())
    trainer.train()
    documented = run_block(STATE, dict(names))["state"]
    (state,) = moments
    assert list(state)[:9] == list(documented)
    assert [type(state[key]) for key in documented] == [type(value) for value in documented.values()]
    assert (state["model"], state["optimizer"], state["device"]) == (
        names["model"],
        names["optimizer"],
        names["device"],
    )
    assert state["latest_loss"] == losses[12]
    assert state["avg_loss"] == pytest.approx(sum(losses[10:13]) / 3)  # of this epoch so far
    assert (state["model_params"], state["status"]) == (10, "training")


def test_the_nine_keys_are_true_before_during_and_after_training_evaluation_and_a_failure() -> None:
    names: dict[str, Any] = parts(2)
    trainer = get_trainer("simple", **names, num_epochs=2)
    seen: list[tuple[Any, ...]] = []

    def look(state: Any) -> None:
        assert (state["model"], state["optimizer"], state["device"]) == (
            names["model"],
            names["optimizer"],
            names["device"],
        )
        seen.append(
            (state["current_epoch"], state["current_batch_idx"], state["model_params"], state["status"])
        )

    class Everywhere(TrainingHook):
        def on_train_begin(self, state: Any) -> None:
            look(state)

        def on_epoch_begin(self, epoch: int, state: Any) -> None:
            assert epoch == state["current_epoch"]
            look(state)

        def on_after_backward(self, epoch: int, state: Any) -> None:  # an event the document does not have
            assert epoch == state["current_epoch"]
            look(state)

        def on_train_end(self, state: Any) -> None:
            look(state)

        def on_evaluate_begin(self, state: Any) -> None:
            look(state)

    assert (trainer.state["latest_loss"], trainer.state["avg_loss"]) == (None, None)
    look(trainer.state)
    trainer.add_hook(Everywhere())
    trainer.train()
    look(trainer.state)
    epochs = [(epoch, batch, 10, "training") for epoch in (1, 2) for batch in (0, 0, 1)]
    assert seen == [
        (1, 0, 10, "created"),
        (1, 0, 10, "training"),
        *epochs,
        (2, 1, 10, "completed"),
        (2, 1, 10, "completed"),
    ]
    losses = trainer.state["latest_loss"], trainer.state["avg_loss"]
    trainer.evaluate()
    look(trainer.state)
    assert seen[-2:] == [(2, 1, 10, "running"), (2, 1, 10, "completed")]
    assert (trainer.state["latest_loss"], trainer.state["avg_loss"]) == losses

    trainer.dataloader = [*batches(1), "no batch"]
    with pytest.raises(TypeError):
        trainer.train()
    look(trainer.state)
    assert seen[-1][-1] == "error"


def test_the_state_stays_live_takes_keys_of_ones_own_and_knows_the_other_facts() -> None:
    kept: list[Any] = []

    class Notes(TrainingHook):
        def on_train_begin(self, state: Any) -> None:
            kept.append(state)
            state["note"] = "from begin"
            with pytest.raises(TypeError, match="is a fact of the run"):
                state["status"] = "mine"

        def on_train_end(self, state: Any) -> None:
            assert state.get("note") == "from begin" and "note" in state and "note" in dict(state)
            assert (state["num_epochs"], state["is_main_process"], state["step"]) == (1, True, 4)
            with pytest.raises(KeyError, match="no 'avg_los'. Did you mean 'avg_loss'"):
                state["avg_los"]
            del state["note"]
            assert len(state) == len(list(state)) == len(state.copy()) and "'status': 'completed'" in repr(
                state
            )

    trainer = simple()
    trainer.add_hook(Notes())
    trainer.train()
    assert kept[0]["status"] == "completed"


def test_parameters_may_have_any_name_and_filters_work() -> None:
    got: list[Any] = []

    class Renamed(TrainingHook):
        def on_epoch_begin(self, number: int, s: Any) -> None:
            got.append((number, s["status"]))

        @every(2)
        def on_batch_end(self, batch: Any, value: float, s: Any) -> None:
            got.append((type(batch), type(value), s["current_batch_idx"]))

        def on_epoch_end(self, *both: Any) -> None:
            got.append((both[0], both[1]["status"]))

    trainer = simple(4)
    trainer.add_hook(Renamed("renamed"))
    trainer.train()
    assert got == [(1, "training"), (tuple, float, 1), (tuple, float, 3), (1, "training")]


def test_every_way_to_write_parameters_gets_the_right_things() -> None:
    got: dict[str, Any] = {}

    class Many(TrainingHook):
        def on_train_begin(self, state: Any, /, *, module: Any, sanity_checking: bool, mine: int = 7) -> None:
            got["begin"] = (state["status"], type(module).__name__, sanity_checking, mine)

        def on_epoch_begin(
            self, epoch: int, current_epoch: int, state: Any, mine: int = 7, step: int = 8
        ) -> None:
            got["epoch begin"] = (epoch, current_epoch, state["current_epoch"], mine)

        def on_batch_end(self, *args: Any, **kwargs: Any) -> None:
            got["batch end"] = (args[0], type(args[1]), args[2]["current_batch_idx"])

        def on_epoch_end(self) -> None:
            got["epoch end"] = ()

        def on_train_end(self, status: str, state: Any) -> None:
            got["end"] = (status, state["status"])

    trainer = simple(2)
    trainer.add_hook(Many("many"))
    trainer.train()
    assert got == {
        "begin": ("training", "Linear", False, 7),
        "epoch begin": (1, 1, 1, 7),
        "batch end": (1, float, 1),
        "epoch end": (),
        "end": ("completed", "completed"),
    }


def test_methods_are_called_directly_as_they_are_written() -> None:
    hook = Heard()
    hook.on_epoch_begin(4, {})
    hook.on_epoch_end(epoch=4, state={})
    assert hook.heard == [("epoch begin", 4), ("epoch end", 4)]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'state'"):
        hook.on_epoch_end(4)


def test_a_hook_takes_the_place_of_one_with_its_name_unless_it_is_wrong() -> None:
    class Wrong(TrainingHook):
        def on_batch_and(self) -> None: ...

    trainer = simple(1)
    trainer.add_hook(first := Heard("same"))
    with pytest.raises(HookError, match=r"Wrong.on_batch_and is not an event. Did you mean 'on_batch_end'"):
        trainer.add_hook(Wrong("same"))
    assert trainer.hooks.get_hook("same") is first
    trainer.add_hook(second := Heard("same"))
    assert (
        list(trainer.hooks) == [second]
        and len(trainer.hooks) == 1
        and second in trainer.hooks
        and first not in trainer.hooks
    )
    trainer.train()
    assert first.heard == [] and len(second.heard) == 5


def test_a_disabled_hook_hears_nothing_and_is_not_listed_until_it_is_enabled() -> None:
    trainer = simple(1)
    trainer.add_hook(hook := Heard("mine"))
    trainer.disable_hook("mine")
    trainer.train()
    assert (trainer.hooks.list_hooks(), hook.heard) == ([], [])
    trainer.enable_hook("mine")
    trainer.train()
    assert (trainer.hooks.list_hooks(), len(hook.heard)) == (["mine"], 5)
    assert trainer.remove_hook("mine") is hook


def test_a_manager_made_by_hand_skips_disabled_hooks_and_refuses_hooks_it_cannot_call() -> None:
    manager, hook = HookManager(), Heard()
    manager.add_hook(hook)
    manager.disable_hook("heard")
    manager.on_evaluate_begin({})
    manager.on_train_begin({})
    manager.enable_hook("heard")
    manager.on_train_end({})
    manager.on_evaluate_end({})
    assert hook.heard == [("train end",)]
    manager.add_hook(ConsoleLogHook())
    with pytest.raises(
        HookError, match=r"'console_log' is not a TrainingHook of this dialect, so your own loop cannot call"
    ):
        manager.on_train_begin({})
    manager.remove_hook("console_log")
    manager.on_train_begin({})


@pytest.mark.parametrize(
    ("made", "name", "setting", "value"),
    [
        (ConsoleLogHook, "console_log", "log_every_n_batches", 10),
        (JSONLogHook, "json_log", "log_every_n_batches", 100),
        (CheckpointHook, "checkpoint", "every_n_epochs", 1),
    ],
)
def test_built_in_hooks_have_their_documented_names_and_defaults(
    made: Any, name: str, setting: str, value: int
) -> None:
    trainer = simple()
    trainer.add_hook(made())
    assert trainer.hooks.list_hooks() == [name]
    assert getattr(trainer.hooks.get_hook(name), setting) == value


def test_a_method_with_a_parameter_too_many_is_refused_when_it_is_added() -> None:
    class Greedy(TrainingHook):
        def on_epoch_end(self, epoch: int, state: Any, extra: int) -> None: ...

    with pytest.raises(HookError, match=r"Greedy.on_epoch_end: \w+ has no argument 'extra'"):
        simple().add_hook(Greedy())


def test_an_adapted_hook_costs_one_call_for_the_state_over_a_native_one_and_a_silent_one_nothing() -> None:
    class Native(Hook):
        def on_train_batch_end(self, batch_idx: int, loss: float, state: Any) -> None: ...

    class Adapted(TrainingHook):
        def on_batch_end(self, batch_idx: int, loss: float, state: Any) -> None: ...

    class Stateless(TrainingHook):
        def on_batch_end(self, batch_idx: int, loss: float) -> None: ...

    def cost(*hooks: Any) -> float:
        def train(data: Any) -> object:
            trainer = hookline.Trainer(
                hooks=hooks, max_epochs=1, logger=False, enable_progress_bar=False, checkpoint=False
            )
            return trainer.fit(Net(), data)

        return per_step(train)

    assert cost(Adapted("a")) == cost(Native()) + 1
    assert cost(Stateless("s")) == cost(Native())
    assert cost(TrainingHook("t")) == cost()


def test_what_a_hook_of_this_kind_hears_is_recorded_under_hooklines_events_and_its_own_place() -> None:
    trainer = simple(1)
    trainer.add_hook(Heard("mine"))
    with Recorder(trainer.trainer) as recorder:
        trainer.train()
    heard = [call.event for call in recorder.calls if call.name == "mine"]
    assert heard == [
        "on_train_start",
        "on_train_epoch_start",
        "on_train_batch_end",
        "on_train_epoch_end",
        "on_train_end",
    ]
    shown = str(trainer.trainer.explain())
    assert "documented.py" in shown  # where Heard is written
