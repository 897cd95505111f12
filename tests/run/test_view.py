"""What hooks reach as `trainer`: where the run is, stopping, logging and hooks by name."""

from __future__ import annotations

import operator
import re
import traceback
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet

from hookline import Hook, HookError, Trainer
from hookline.util.errors import ATTRIBUTES


class Counter(Hook):
    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.count = 0

    def on_train_batch_end(self) -> None:
        self.count += 1


def test_properties_tell_where_the_run_is() -> None:
    net = Net()
    trainer = quiet(max_epochs=2)
    trainer.fit(net, batches(3))
    assert trainer.model is trainer.module is net
    assert (trainer.global_step, trainer.current_epoch, trainer.status) == (6, 1, "completed")
    assert len(trainer.optimizers) == 1
    assert trainer.device == torch.device("cpu")


def test_hooks_are_added_removed_and_switched_by_name() -> None:
    counter = Counter()
    trainer = quiet()
    handle = trainer.add_hook(counter, name="mine")
    assert handle.name == "mine"
    trainer.fit(Net(), batches(2))
    trainer.disable_hook("mine")
    trainer.fit(Net(), batches(2))
    assert (counter.count, trainer.hooks.list_hooks()) == (2, [])
    trainer.enable_hook("mine")
    trainer.fit(Net(), batches(2))
    assert counter.count == 4
    assert trainer.remove_hook("mine") is counter
    trainer.fit(Net(), batches(2))
    assert counter.count == 4


def test_a_hook_switched_off_in_the_middle_hears_nothing_from_the_next_event_on() -> None:
    counter = Counter("mine")
    trainer = quiet(hooks=[counter])
    trainer.on("step_end", when=lambda step: step == 2)(lambda trainer: trainer.disable_hook("mine"))
    trainer.on("step_end", when=lambda step: step == 4)(lambda trainer: trainer.enable_hook("mine"))
    trainer.fit(Net(), batches(6))
    assert counter.count == 4


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(HookError, match="There is no hook named 'countr'. Did you mean 'counter'"):
        quiet(hooks=[Counter()]).remove_hook("countr")


def test_hooks_log_through_the_trainer() -> None:
    class Logs(Hook):
        def on_train_batch_end(self, trainer: Any, batch_idx: int) -> None:
            trainer.log("batch", batch_idx, on_step=False, on_epoch=True)
            trainer.log_dict({"a": 1.0, "b": 2.0})

    metrics = quiet(hooks=[Logs()]).fit(Net(), batches(3))
    assert (metrics["batch"], metrics["a"], metrics["b"]) == (1.0, 1.0, 2.0)


def test_a_request_to_stop_can_be_taken_back() -> None:
    class ChangeOfMind(Hook):
        def on_after_backward(self, trainer: Any) -> None:
            trainer.should_stop = True

        def on_train_batch_end(self, trainer: Any) -> None:
            assert trainer.should_stop
            trainer.should_stop = False

    trainer = quiet(hooks=[ChangeOfMind()])
    trainer.fit(Net(), batches(4))
    assert trainer.global_step == 4
    assert trainer.status == "completed"


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("callback_metrics", "Did you mean 'metrics'?"),
        ("logged_metrics", "Did you mean 'metrics'?"),
        ("log_dir", "Use trainer.run_dir."),
        ("is_global_zero", "Use trainer.strategy.rank == 0; a hook can request the fact `rank`."),
        (
            "evaluating",
            "Use trainer.state.stage: 'fit', 'validate', 'test' or 'predict'. "
            "The module's `training` is False in an evaluation.",
        ),
        (
            "training",
            "Use trainer.state.stage: 'fit', 'validate', 'test' or 'predict'. "
            "The module's `training` is True while it trains.",
        ),
        ("lightning_module", "Use trainer.model."),
        ("num_val_batches", "Use trainer.num_batches('val')."),
    ],
)
def test_an_attribute_from_another_system_leads_to_ours(name: str, advice: str) -> None:
    trainer = quiet()
    trainer.fit(Net(), batches(1))
    with pytest.raises(
        AttributeError, match=re.escape(f"'Trainer' object has no attribute '{name}'. {advice}")
    ) as refused:
        getattr(trainer, name)
    told = "".join(traceback.format_exception(refused.value))
    assert told.rstrip().endswith(advice)  # Python adds no suggestion of its own
    assert not hasattr(trainer, name)


def test_what_the_advice_for_lightnings_names_says_exists() -> None:
    trainer = quiet()
    trainer.fit(Net(), batches(1))
    used = {path for text in ATTRIBUTES.values() for path in re.findall(r"trainer((?:\.\w+)+)", text)}
    assert len(used) > 10
    for path in used:
        assert operator.attrgetter(path[1:])(trainer) is not None or path == ".num_training_batches", path


def test_a_row_that_is_logged_as_in_lightning_says_what_to_call() -> None:
    class Logging(Net):
        def on_train_epoch_end(self) -> None:
            self.logger.log_metrics({"a": 1.0}, step=self.global_step)

    with pytest.raises(TypeError) as failed:
        quiet().fit(Logging(), batches(1))
    assert any(note.startswith("Call self.log(name, value)") for note in failed.value.__notes__)


def test_the_logger_is_the_experiment_and_the_trainer_says_so() -> None:
    trainer = quiet()
    assert trainer.logger.experiment is trainer.logger and not hasattr(trainer.logger, "unknown")
    with pytest.raises(AttributeError, match=r"Use trainer.logger, or request the fact `logger`"):
        trainer.experiment.add_scalar("a", 1)  # type: ignore[attr-defined]
    assert not hasattr(trainer, "experiment")


def test_a_hook_has_the_experiment_of_the_module_by_every_name() -> None:
    seen: list[Any] = []

    class Looks(Hook):
        def on_validation_epoch_end(self, trainer: Any, module: Any, logger: Any, experiment: Any) -> None:
            seen.extend(
                [trainer.logger.experiment, module.experiment, module.logger.experiment, logger, experiment]
            )

    quiet(hooks=[Looks()]).fit(Net(), batches(1), batches(1))
    assert len({id(each) for each in seen}) == 1


def test_a_property_that_fails_keeps_its_own_error() -> None:
    class Failing(Trainer):
        @property
        def mine(self) -> int:
            return self.inner.missing

        inner = None

    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'missing'"):
        _ = Failing().mine
    with pytest.raises(AttributeError, match="'Trainer' object has no attribute 'other'"):
        _ = quiet().other  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({"sync_dist": True}, "leave it out: values of all ranks are reduced"),
        ({"reduce_fx": "sum"}, "pass reduce='mean', 'sum'"),
        ({"logger": False}, "on_train_metrics"),
    ],
)
def test_the_error_for_an_argument_of_log_that_only_lightning_has_says_what_to_do(
    given: Any, hint: str
) -> None:
    class Logs(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("x", 1.0, **given)

    class LogsInHook(Hook):
        def on_train_batch_end(self, trainer: Any) -> None:
            trainer.log_dict({"x": 1.0}, **given)

    for hooks, module in (([], Logs()), ([LogsInHook()], Net())):
        with pytest.raises(TypeError, match="unexpected keyword argument") as refused:
            quiet(hooks=hooks).fit(module, batches(1))
        assert hint in "\n".join(refused.value.__notes__)
