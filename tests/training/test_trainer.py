"""The facade: options, verbs, hooks by name, functions as hooks, own events, explain."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet
from torch import nn

import hookline
from hookline import EVENTS, DataModule, Hook, HookError, HooklineError, OptionError, Trainer, on


class Counter(Hook):
    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.count = 0

    def on_train_batch_end(self) -> None:
        self.count += 1


# ---- making one --------------------------------------------------------------------------------------------------


def test_hooks_may_be_instances_classes_or_marked_functions_and_callbacks_is_the_same() -> None:
    calls: list[int] = []

    @on("train_batch_end")
    def function(batch_idx: int) -> None:
        calls.append(batch_idx)

    instance = Counter("first")
    trainer = quiet(hooks=[instance, Counter], callbacks=[function])
    trainer.fit(Net(), batches(3))
    assert trainer.hooks.list_hooks() == ["first", "counter", "function"]
    assert (instance.count, trainer.hooks["counter"].count, calls) == (3, 3, [0, 1, 2])


def test_an_unknown_option_is_refused_with_the_closest_right_one() -> None:
    with pytest.raises(OptionError, match="Trainer has no option 'max_epoch'. Did you mean 'max_epochs'"):
        Trainer(max_epoch=3)  # type: ignore[call-arg]


def test_one_hook_stands_for_a_list_of_one() -> None:
    def listed(**given: Any) -> list[str]:
        return Trainer(enable_progress_bar=False, logger=None, **given).hooks.list_hooks()

    @on("train_start")
    def function() -> None: ...

    class Plain:
        def on_train_start(self) -> None: ...

    class Iterable(Hook):
        def __iter__(self) -> Any:
            return iter(())

    for one, name in [
        (Counter(), "counter"),
        (Counter, "counter"),
        (function, "function"),
        (Plain(), "plain"),
    ]:
        assert listed(hooks=one) == listed(callbacks=one) == [name]
    assert listed(hooks=Iterable(), callbacks=Counter()) == ["iterable", "counter"]
    assert listed(hooks=None, callbacks=None) == []


def test_without_a_logger_the_run_has_none() -> None:
    assert not Trainer(logger=None).loggers and not Trainer(logger=False).loggers and Trainer().loggers


def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    trainer = Trainer(default_root_dir="~/all", run_dir=Path("~") / "one", audit={"trace": "~/t.json"})
    options = trainer.options
    assert (options.default_root_dir, options.run_dir, trainer.audit.trace) == (
        str(tmp_path / "all"),
        tmp_path / "one",
        str(tmp_path / "t.json"),
    )
    trainer = quiet(run_dir="~/run", checkpoint=True)
    trainer.fit(Net(), batches())
    assert Path(trainer.run_dir) == tmp_path / "run"
    again = quiet(run_dir="~/run", checkpoint=True, max_epochs=2)
    again.fit(Net(), batches(), resume="~/run/checkpoints/last")
    assert again.state.resumed


def test_a_hook_is_removed_by_name_as_the_object_or_by_its_class() -> None:
    @on("train_start")
    def function() -> None: ...

    first, second = Counter(name="first"), Counter(name="second")
    trainer = Trainer(hooks=[first, second, function], enable_progress_bar=False)
    with pytest.raises(
        HookError, match="2 hooks are Counter: pass the object or the name of one: first, second"
    ):
        trainer.remove_hook(Counter)
    assert trainer.remove_hook("first") is first
    assert trainer.remove_hook(Counter) is second
    with pytest.raises(HookError, match="Counter.* is not one of the hooks. Hooks: function"):
        trainer.remove_hook(second)
    trainer.remove_hook(function)
    assert trainer.hooks.list_hooks() == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"device": "gpu9"}, "device='gpu9'"),
        ({"precision": "8"}, "precision='8', allowed: 32, 'bf16-mixed', '16-mixed'"),
        ({"strategy": "singel"}, "strategy='singel', allowed: .* Did you mean 'single'"),
        ({"logger": "tensorboard"}, "logger='tensorboard' must be True, False, a Logger"),
    ],
)
def test_wrong_values_are_refused_when_the_trainer_is_made(options: dict[str, Any], text: str) -> None:
    with pytest.raises(OptionError, match=text):
        quiet(**options)


def test_config_reaches_hooks_untouched() -> None:
    config = {"debug": True}
    seen: list[Any] = []
    trainer = quiet(config=config)
    trainer.on("train_begin")(lambda config: seen.append(config))
    trainer.fit(Net(), batches(1))
    assert seen[0] is config


# ---- the verbs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["fit", "validate", "test", "predict"])
def test_something_that_is_no_module_is_refused(verb: str) -> None:
    with pytest.raises(OptionError, match=r"Net is a class; pass an object: Net\(\)"):
        quiet().fit(Net, batches())  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="takes a hookline.Module or any nn.Module, not int"):
        getattr(quiet(), verb)(3, batches())


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_without_a_module_before_any_run_it_says_so(verb: str) -> None:
    with pytest.raises(OptionError, match=rf"{verb}\(\) needs a module: nothing was run before"):
        getattr(quiet(), verb)(loaders=batches())


def test_after_fit_the_module_need_not_be_passed_again() -> None:
    net = Net()
    trainer = quiet()
    trainer.fit(net, batches())
    assert trainer.validate(loaders=batches(2))["val/loss"] == quiet().validate(net, batches(2))["val/loss"]


def test_something_that_is_no_data_module_is_refused() -> None:
    with pytest.raises(OptionError, match="datamodule= takes a hookline.DataModule, not list"):
        quiet().fit(Net(), datamodule=batches())  # type: ignore[arg-type]


def test_attributes_of_ones_own_may_be_put_on_the_trainer() -> None:
    seen: list[int] = []

    class Producer(Hook):
        def on_train_batch_end(self, trainer: Any, batch_idx: int) -> None:
            trainer.hook_data = {"batch": batch_idx}

    class Consumer(Hook):
        def on_train_batch_end(self, trainer: Any) -> None:
            seen.append(trainer.hook_data["batch"])

    quiet(hooks=[Producer(), Consumer()]).fit(Net(), batches(2))
    assert seen == [0, 1]


def test_estimated_steps_outside_a_run_are_refused() -> None:
    with pytest.raises(HooklineError, match="known during a run"):
        _ = quiet().estimated_stepping_batches


# ---- hooks by name -----------------------------------------------------------------------------------------------


def test_a_handle_in_a_with_block_lets_go_of_its_hook() -> None:
    counter = Counter()
    trainer = quiet()
    with trainer.add_hook(counter):
        trainer.fit(Net(), batches(2))
    trainer.fit(Net(), batches(2))
    assert counter.count == 2


# ---- functions ---------------------------------------------------------------------------------------------------


def test_a_function_becomes_a_hook_by_a_decorator_and_can_still_be_called() -> None:
    calls: list[int] = []
    trainer = quiet()

    @trainer.on("train_batch_end", every=2)
    def report(step: int) -> None:
        calls.append(step)

    trainer.fit(Net(), batches(5))
    assert calls == [2, 4]
    report(99)
    assert calls == [2, 4, 99]


def test_one_function_may_hear_several_events() -> None:
    calls: list[int] = []
    trainer = quiet()
    trainer.on("train_start", "on_train_end")(lambda step: calls.append(step))
    trainer.fit(Net(), batches(3))
    assert calls == [0, 3]


def test_a_wrong_event_is_refused_where_it_is_written() -> None:
    with pytest.raises(HookError, match="'train_batch_ends' is not an event of hooks. Did you mean"):
        quiet().on("train_batch_ends")
    with pytest.raises(HooklineError, match="needs an event"):
        quiet().on()


def test_a_wrong_parameter_is_refused_when_it_is_registered() -> None:
    with pytest.raises(HookError, match="on_train_batch_end has no argument 'los'. Did you mean 'loss'"):
        quiet().on("train_batch_end")(lambda los: None)


# ---- own events --------------------------------------------------------------------------------------------------


@pytest.fixture
def on_generated() -> Any:
    event = EVENTS.declare("on_generated", ("text",), "Text was generated.", replaces="text")
    yield event
    EVENTS.forget("on_generated")


def test_a_declared_event_reaches_hooks_and_gives_back_what_they_replace(on_generated: Any) -> None:
    class Shout(Hook):
        def on_generated(self, text: str, epoch: int) -> str:
            return f"{text.upper()} {epoch}"

    answers: list[str] = []
    trainer = quiet(hooks=[Shout()])
    trainer.on("train_end")(lambda trainer: answers.append(trainer.emit("generated", text="hi")))
    trainer.fit(Net(), batches(1))
    assert answers == ["HI 0"]


def test_emitting_with_wrong_facts_is_refused(on_generated: Any) -> None:
    with pytest.raises(HooklineError, match="on_generated has the facts text; got txt. Did you mean 'text'"):
        quiet().emit("generated", txt="hi")


def test_the_loops_own_events_cannot_be_emitted() -> None:
    with pytest.raises(HooklineError, match="is emitted by the loops"):
        quiet().emit("train_batch_end")


# ---- explain -----------------------------------------------------------------------------------------------------


def test_explain_shows_who_listens_before_anything_runs() -> None:
    class Data(DataModule):
        def setup(self, stage: str) -> None:
            raise AssertionError("ran")

    class Listening(Net):
        def on_train_epoch_end(self) -> None: ...

    trainer = quiet(hooks=[Counter("mine")])
    text = str(trainer.explain(Listening(), datamodule=Data()))
    assert "on_train_batch_end" in text and "mine" in text
    assert "on_train_epoch_end" in text and "Listening" in text
    loaders = (batches(1), batches(2))
    explained = trainer.explain(Listening(), *loaders)
    assert [*explained.loaders] == ["train", "val"], "the loaders as for fit"
    assert [*trainer.explain(Listening(), val=loaders[1]).loaders] == ["val"]
    assert [*trainer.explain(Listening(), loaders[0]).loaders] == ["train"]
    assert str(hookline.explain(trainer, Listening(), *loaders)) == str(explained)
    assert not trainer.explain(Listening(), *loaders, stage="test").loaders
    trainer.fit(Net(), batches(1))
    assert trainer.global_step == 1


# ---- importing ---------------------------------------------------------------------------------------------------


def test_importing_hookline_does_not_import_torch() -> None:
    code = "import sys, hookline; assert 'torch' not in sys.modules; hookline.Hook; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, env={**os.environ})


def test_a_plain_module_is_moved_to_the_trainers_device() -> None:
    net = nn.Linear(4, 2)
    trainer = quiet(device="meta")
    trainer.fit(net, batches(1), loss=nn.functional.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    assert net.weight.is_meta
