"""From set-up to teardown: who hears what, how a run ends, and what happens when something fails."""

from __future__ import annotations

import copy
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet
from training.witnessed import HEARD, Data, Module, Witness, place

from hookline import CheckpointError, Hook, HookError, StopTraining
from hookline.loggers import CSV, JSONLines, read_log


@pytest.fixture(autouse=True)
def nothing_heard_yet() -> None:
    HEARD.clear()


# ---- the way a run should go -------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_every_verb_sets_up_and_tears_down_with_its_stage(verb: str) -> None:
    stages: list[str] = []

    class Listen(Hook):
        def setup(self, stage: str) -> None:
            stages.append(f"setup {stage}")

        def on_fit_end(self) -> None:
            stages.append("fit end")

        def teardown(self, stage: str) -> None:
            stages.append(f"teardown {stage}")

    getattr(quiet(hooks=[Listen()]), verb)(Net(), batches(2))
    assert stages == [f"setup {verb}", f"teardown {verb}"]


def test_layers_made_in_configure_model_are_trained() -> None:
    class Late(Net):
        def __init__(self) -> None:
            super().__init__()
            del self.layer

        def configure_model(self) -> None:
            self.layer = torch.nn.Linear(4, 2)
            self.before = self.layer.weight.detach().clone()

    net = Late()
    quiet().fit(net, batches())
    assert not torch.equal(net.layer.weight, net.before)


@pytest.mark.parametrize("spelling", ["configure_shared_model", "configure_sharded_model"])
def test_configure_model_has_other_spellings(spelling: str) -> None:
    calls: list[str] = []
    cls = type("Spelled", (Net,), {spelling: lambda self: calls.append(spelling)})
    quiet().fit(cls(), batches(1))
    assert calls == [spelling]


@pytest.mark.parametrize("name", ["configure_hooks", "configure_callbacks"])
def test_hooks_of_the_module_join_for_the_length_of_a_run(name: str) -> None:
    net = type("WithHooks", (Net,), {name: lambda self: [Witness("mine")]})()
    trainer = quiet()
    for _ in range(2):
        HEARD.clear()
        trainer.fit(net, batches())
        assert HEARD == ["mine setup", "mine on_train_end", "mine on_fit_end", "mine teardown"]
        assert trainer.hooks.list_hooks() == []


def test_a_module_may_return_a_single_hook() -> None:
    class WithHook(Net):
        def configure_hooks(self) -> Any:
            return Witness("mine")

    quiet().fit(WithHook(), batches())
    assert "mine teardown" in HEARD


def test_a_hook_that_joins_in_the_middle_is_set_up_at_once_and_torn_down_with_the_others() -> None:
    trainer = quiet()
    trainer.on("train_batch_end", once=True)(lambda trainer: trainer.add_hook(Witness("late")) and None)
    trainer.fit(Net(), batches())
    assert HEARD == ["late setup", "late on_train_end", "late on_fit_end", "late teardown"]


def test_a_hook_that_leaves_in_the_middle_is_torn_down_at_once_and_only_once() -> None:
    trainer = quiet(hooks=[Witness("early")])
    trainer.on("train_batch_end", once=True)(lambda trainer: trainer.remove_hook("early") and None)
    trainer.fit(Net(), batches())
    assert HEARD == ["early setup", "early teardown"]


# ---- a second run ------------------------------------------------------------------------------------------------


def test_a_second_fit_on_one_trainer_is_a_new_run() -> None:
    counts: list[tuple[int, int]] = []
    trainer = quiet(max_epochs=2)
    trainer.on("train_batch_start", once=True)(lambda step, epoch: counts.append((step, epoch)))
    net = Net()
    twin = copy.deepcopy(net)
    first = trainer.fit(net, batches())
    assert trainer.global_step == 8
    second = trainer.fit(twin, batches())
    assert trainer.global_step == 8
    assert counts == [(0, 0), (0, 0)]
    assert torch.equal(net.layer.weight, twin.layer.weight)
    assert dict(first) == dict(second)


def test_a_second_fit_after_a_stop_or_a_failure_starts_clean() -> None:
    def stop_or_fail(step: int, trainer: Any) -> None:
        if trainer.again == 0:
            trainer.stop()
        if trainer.again == 1:
            raise ZeroDivisionError

    trainer = quiet()
    trainer.again = 0
    trainer.on("step_end")(stop_or_fail)
    trainer.fit(Net(), batches())
    assert trainer.status == "stopped"
    trainer.again = 1
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Net(), batches())
    trainer.again = 2
    trainer.fit(Net(), batches())
    assert (trainer.status, trainer.global_step) == ("completed", 4)


def test_a_second_run_starts_with_a_fresh_loss_scale() -> None:
    data = [(x, y * 1000) for x, y in batches(2)]
    trainer = quiet(precision="16-mixed", device="cpu")
    trainer.fit(Net(), data)
    scaler = trainer.strategy.precision.scaler
    assert scaler is not None
    scales: list[float] = []
    trainer.on("train_start")(lambda trainer: scales.append(trainer.strategy.precision.scaler.get_scale()))
    trainer.fit(Net(), data)
    assert scales == [2.0**16]


def test_the_module_knows_its_trainer_only_during_a_run() -> None:
    seen: list[Any] = []

    class Look(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append((self.trainer, self.global_step, self.current_epoch))
            return super().training_step(batch, batch_idx)

    net, trainer = Look(), quiet()
    trainer.fit(net, batches(2))
    assert seen == [(trainer, 0, 0), (trainer, 1, 0)]
    with pytest.raises(Exception, match="is not in a run"):
        _ = net.trainer


# ---- status ------------------------------------------------------------------------------------------------------


def test_status_follows_the_run() -> None:
    seen: list[str] = []

    class Listen(Hook):
        def setup(self, status: str) -> None:
            seen.append(status)

        def on_train_batch_end(self, status: str) -> None:
            seen.append(status)

        def on_train_end(self, status: str) -> None:
            seen.append(status)

        def teardown(self, status: str) -> None:
            seen.append(status)

    quiet(hooks=[Listen()]).fit(Net(), batches(1))
    assert seen == ["training", "training", "completed", "completed"]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ZeroDivisionError(), "error"),
        (KeyboardInterrupt(), "interrupted"),
        (SystemExit(3), "error"),
        (StopTraining(), "stopped"),
    ],
)
def test_status_says_how_the_run_ended(error: BaseException, status: str) -> None:
    trainer = quiet(hooks=[Witness("a", "on_train_batch_end", error)])
    if status == "stopped":
        trainer.fit(Net(), batches())
    else:
        with pytest.raises(type(error)):
            trainer.fit(Net(), batches())
    assert trainer.status == status
    assert ("a on_exception" in HEARD) is (status != "stopped")
    assert ("a on_train_end" in HEARD) is (status == "stopped")
    assert ("a on_fit_end" in HEARD) is (status == "stopped")
    assert HEARD.count("a teardown") == 1


def test_status_is_error_when_on_exception_is_heard() -> None:
    seen: list[str] = []
    trainer = quiet(hooks=[Witness("a", "on_train_batch_end")])
    trainer.on("exception")(lambda status, state: seen.extend([status, state["status"]]))
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Net(), batches())
    assert seen == ["error", "error"]


# ---- when something fails ----------------------------------------------------------------------------------------


def test_the_original_exception_names_the_hook_the_event_and_the_position() -> None:
    class Culprit(Hook):
        def on_train_batch_end(self, batch_idx: int) -> None:
            if batch_idx == 2:
                raise ZeroDivisionError("oh")

    error: BaseException = ZeroDivisionError()
    try:
        quiet(hooks=[Culprit()]).fit(Net(), batches())
    except ZeroDivisionError as caught:
        error = caught
    notes = "\n".join(error.__notes__)
    assert "raised by hook 'culprit' in on_train_batch_end" in notes
    assert "test_lifecycle.py" in notes
    assert "epoch 0, batch 2, step 3" in notes


def test_a_failing_training_step_raises_its_own_exception_with_the_position() -> None:
    class Failing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                raise ZeroDivisionError("in the step")
            return super().training_step(batch, batch_idx)

    with pytest.raises(ZeroDivisionError, match="in the step") as caught:
        quiet().fit(Failing(), batches())
    batch, note = caught.value.__notes__
    assert batch == "batch: float32[3, 4], float32[3, 2]"
    assert "at epoch 0, batch 1, step 1" in note


def test_the_very_same_exception_object_is_heard_and_raised() -> None:
    mine = ZeroDivisionError("mine")
    heard: list[BaseException] = []
    trainer = quiet(hooks=[Witness("a", "on_train_batch_end", mine)])
    trainer.on("exception")(lambda exception: heard.append(exception))
    with pytest.raises(ZeroDivisionError) as caught:
        trainer.fit(Net(), batches())
    assert heard == [mine]
    assert caught.value is mine


def test_keyboard_interrupt_stays_keyboard_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt):
        quiet(hooks=[Witness("a", "on_train_batch_end", KeyboardInterrupt())]).fit(Net(), batches())
    assert HEARD[-2:] == ["a on_exception", "a teardown"]


def test_a_metric_that_an_interrupted_epoch_does_not_have_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Interrupts(Hook):
        def on_train_batch_end(self, batch_idx: int) -> None:
            if batch_idx == 1:
                signal.raise_signal(signal.SIGINT)

    class Prints(Hook):
        def on_train_epoch_end(self, metrics: Any) -> None:
            HEARD.append(metrics["val/loss"])

    trainer = quiet(hooks=[Prints(), Interrupts()], num_sanity_val_steps=0)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(Net(), batches(), batches(2))
    assert (trainer.status, HEARD) == ("interrupted", [])
    assert "There is no metric 'val/loss'" in caplog.text
    assert "The epoch was cut short" in caplog.text
    with pytest.raises(KeyError, match="no metric 'val/loss'"):  # in a whole epoch it is a mistake
        quiet(hooks=[Prints()], num_sanity_val_steps=0).fit(Net(), batches())


@pytest.mark.parametrize("where", ["hook", "training_step", "validation_step"])
def test_stop_iteration_from_user_code_is_an_error_not_an_end(where: str) -> None:
    class Failing(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if where == "training_step":
                next(iter(()))
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            if where == "validation_step":
                next(iter(()))
            return super().validation_step(batch, batch_idx)

    trainer = quiet(hooks=[Witness("a", "on_train_batch_end" if where == "hook" else "", StopIteration())])
    with pytest.raises(StopIteration):
        trainer.fit(Failing(), batches(), batches(2))
    assert trainer.status == "error"


@pytest.mark.parametrize(("failing", "torn_down"), [("a", ["a"]), ("b", ["a", "b"]), ("c", ["a", "b", "c"])])
def test_teardown_reaches_just_those_whose_setup_began(failing: str, torn_down: list[str]) -> None:
    hooks = [Witness(name, "setup" if name == failing else "") for name in ("a", "b", "c")]
    with pytest.raises(ZeroDivisionError, match=f"{failing} failed"):
        quiet(hooks=hooks, strategy=place()).fit(Module(), Data())
    assert [each for each in HEARD if each.endswith("teardown")] == [
        "D teardown",
        *(f"{name} teardown" for name in torn_down),
    ]


def test_a_module_whose_set_up_fails_is_torn_down_and_the_strategy_is_not() -> None:
    module = Module()
    module.fails_in = "setup"
    with pytest.raises(ZeroDivisionError, match="M failed"):
        quiet(hooks=[Witness("a")], strategy=place()).fit(module, Data())
    assert [each for each in HEARD if each.endswith("teardown")] == ["D teardown", "a teardown", "M teardown"]


def test_a_strategy_whose_set_up_fails_is_torn_down_too() -> None:
    strategy = place()
    strategy.fails_in = "setup"
    with pytest.raises(ZeroDivisionError, match="S failed"):
        quiet(hooks=[Witness("a")], strategy=strategy).fit(Module(), Data())
    assert [each for each in HEARD if each.endswith("teardown")] == [
        "S teardown",
        "D teardown",
        "a teardown",
        "M teardown",
    ]


def test_a_failing_teardown_of_a_good_run_is_raised_after_everyone_was_torn_down() -> None:
    with pytest.raises(ZeroDivisionError, match="a failed"):
        quiet(hooks=[Witness("a", "teardown"), Witness("b")]).fit(Module(), batches())
    assert HEARD[-3:] == ["a teardown", "b teardown", "M teardown"]


def test_a_failing_on_fit_end_tears_the_strategy_down_once() -> None:
    with pytest.raises(ZeroDivisionError, match="a failed"):
        quiet(hooks=[Witness("a", "on_fit_end")], strategy=place()).fit(Module(), Data())
    assert HEARD.count("S teardown") == HEARD.count("a teardown") == 1


def test_a_misspelt_event_of_the_module_fails_before_anything_is_set_up() -> None:
    class Misspelt(Net):
        def on_train_batch_ends(self) -> None: ...

    with pytest.raises(
        HookError, match="Misspelt.on_train_batch_ends is not an event. Did you mean 'on_train_batch_end'"
    ):
        quiet(hooks=[Witness("a")]).fit(Misspelt(), batches())
    assert "a setup" not in HEARD
    assert "a teardown" not in HEARD


def test_hooks_of_the_module_leave_after_a_failure_too() -> None:
    class WithHooks(Net):
        def configure_hooks(self) -> Any:
            return [Witness("mine", "on_train_batch_end")]

    trainer = quiet()
    with pytest.raises(ZeroDivisionError):
        trainer.fit(WithHooks(), batches())
    assert trainer.hooks.list_hooks() == []


# ---- determinism -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
def test_deterministic_kernels_are_asked_for_during_the_run_only(fails: bool) -> None:
    seen: list[bool] = []
    trainer = quiet(deterministic=True, hooks=[Witness("a", "on_train_batch_end" if fails else "")])
    trainer.on("train_start")(lambda: seen.append(torch.are_deterministic_algorithms_enabled()))
    if fails:
        with pytest.raises(ZeroDivisionError):
            trainer.fit(Net(), batches())
    else:
        trainer.fit(Net(), batches())
    assert seen == [True]
    assert not torch.are_deterministic_algorithms_enabled()


# ---- the log of a run that may be refused ------------------------------------------------------------------------


class LogsAtOnce(Hook):
    def setup(self, logger: Any) -> None:
        logger.log_hyperparams({"width": 64})
        logger.add_text("note", "at once", 0)


def test_a_refused_resume_writes_nothing_and_an_accepted_one_all_that_hooks_log_before_it() -> None:
    def trainer(*hooks: Hook, **options: Any) -> Any:
        return quiet(run_dir="run", logger=[JSONLines(), CSV()], checkpoint=True, hooks=hooks, **options)

    trainer(max_epochs=1).fit(Net(), batches())
    files = [Path("run") / name for name in ("log.jsonl", "hparams.csv", "metrics.csv")]
    before = [path.read_bytes() for path in files]
    other = Net()
    other.layer = torch.nn.Linear(4, 3)
    with pytest.raises(CheckpointError, match="do not fit"):
        trainer(LogsAtOnce(), max_epochs=2).fit(other, batches(), resume="auto")
    assert [path.read_bytes() for path in files] == before
    trainer(LogsAtOnce(), max_epochs=2).fit(Net(), batches(), resume="auto")
    added = [each["type"] for each in read_log(files[0], superseded=True)][len(before[0].splitlines()) :]
    assert added[:4] == ["hyperparams", "hyperparams", "text", "resume"]


def test_a_hook_that_logs_at_once_leaves_the_log_of_an_earlier_run_alone_until_the_first_update() -> None:
    class Fails(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise NameError("typo")

    quiet(run_dir="run", logger=True).fit(Net(), batches())
    before = Path("run/log.jsonl").read_bytes()
    with pytest.raises(NameError):
        quiet(run_dir="run", logger=True, hooks=[LogsAtOnce()]).fit(Fails(), batches())
    assert Path("run/log.jsonl").read_bytes() == before
    quiet(run_dir="run", logger=True, hooks=[LogsAtOnce()]).fit(Net(), batches())
    assert [each["type"] for each in read_log("run/log.jsonl")][:3] == ["hyperparams", "hyperparams", "text"]
