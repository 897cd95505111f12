"""Hooks of the framework: every block of its page on hooks runs, with only its import line changed."""

from __future__ import annotations

import inspect
import pdb
import random
import re
import sys
import time
import types
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from dialects.model_training_framework.documented import (
    BLOCKS,
    Coder,
    Rows,
    as_here,
    make,
    names,
    run,
    scores,
    silent,
    training_step,
)
from test_budgets import per_step
from tiny import Net, batches, quiet
from torch import Tensor

import hookline
from hookline import Hook, HookError, NonFiniteLoss, OptionError
from hookline.interop.model_training_framework import (
    EarlyStoppingHook,
    GenericTrainer,
    GenericTrainerConfig,
    HooksConfig,
    ModelCheckpointHook,
    PerformanceConfig,
    TrainerHooks,
)


@pytest.fixture
def mypackage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The user's package, laid out as the document says, with its first hook in it."""
    folder = tmp_path / "mypackage" / "hooks"
    files = re.findall(r"── (\w+\.py)", BLOCKS["1. Hook Organization"])
    assert files[0] == "__init__.py" and len(files) == 6
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").write_text("")
    for file in files:
        (folder / file).write_text(
            "import time\n" + as_here(BLOCKS["Basic Custom Hook"]) if file == "monitoring.py" else ""
        )
    (folder / "__init__.py").write_text("from mypackage.hooks.monitoring import MyCustomHook\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [each for each in sys.modules if each.partition(".")[0] == "mypackage"]:
        del sys.modules[name]


def test_the_custom_hook_counts_high_losses_lowers_the_rate_and_compares_accuracies(
    capsys: pytest.CaptureFixture[str],
) -> None:
    hook = run("Basic Custom Hook")["MyCustomHook"](threshold=-1.0)
    trainer = make(None, hook, losses=(5.0, 2.0))
    trainer.fit([batches(6)], [batches(1)], max_epochs=2)
    out = capsys.readouterr().out
    assert out.startswith("Training started!\nStarting epoch 0\nHigh loss detected: ")
    assert hook.high_loss_count == 12 and out.count("Too many high loss batches") == 2
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 / 4)
    assert (
        "Accuracy improvement: 0.5000" in out
        and "Accuracy improvement: 0.3000" in out
        and trainer.best_accuracy == pytest.approx(0.8)
    )
    assert "'val/loss': 5.0" in out
    assert re.search(r"Training completed in \d+\.\d\d seconds\n$", out)


def test_hooks_are_registered_by_class_path_as_an_instance_and_as_a_class(
    mypackage: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Coder()
    made = run(
        "Registering Custom Hooks",
        model=model,
        optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)],
        MyCustomHook=run("Basic Custom Hook")["MyCustomHook"],
    )
    trainer = made["trainer"]
    trainer.hook_manager.register_hook(made["AutoRegisteredHook"])  # "register a class explicitly"
    by_path, by_hand = [each for each in trainer.hook_manager.hooks if type(each).__name__ == "MyCustomHook"]
    assert (
        by_path.threshold == by_hand.threshold == 5.0
    )  # 10.0 if the arguments under the dotted path were lost
    assert type(by_path).__module__ == "mypackage.hooks.monitoring"
    trainer.set_training_step(training_step)
    trainer.fit([batches(1)], max_epochs=1)
    out = capsys.readouterr().out
    assert out.count("Training started!") == 2 and out.count("Epoch 0 completed\n") == 2


class Recording(TrainerHooks):
    """Filled with the methods of the documented interface: each notes what it was called with."""


def recorder(theirs: type) -> Any:
    calls: list[tuple[str, dict[str, Any]]] = []

    def noting(name: str, parameters: list[str]) -> Any:
        source = f"lambda note: lambda {', '.join(parameters)}: note({name!r}, dict({', '.join(f'{p}={p}' for p in parameters[1:])}))"
        return eval(source)(lambda name, arguments: calls.append((name, arguments)))

    methods = {
        name: noting(name, list(inspect.signature(method).parameters))
        for name, method in vars(theirs).items()
        if name.startswith("on_")
    }
    return type("Recorder", (Recording,), methods)(), calls


def test_the_base_has_every_method_of_the_documented_interface_with_its_parameters() -> None:
    theirs = run("Complete Hook Interface")["TrainerHooks"]
    documented = {
        name: inspect.signature(method) for name, method in vars(theirs).items() if name.startswith("on_")
    }
    assert len(documented) == 18
    assert {name: inspect.signature(getattr(TrainerHooks, name)) for name in documented} == documented
    assert all(inspect.getdoc(getattr(TrainerHooks, name)) for name in documented)


def test_every_method_of_the_documented_interface_is_called_with_what_it_names() -> None:
    hook, calls = recorder(run("Complete Hook Interface")["TrainerHooks"])
    model = Coder()
    config = GenericTrainerConfig(log_loss_every_n_steps=None)
    config.val_loader_config.dataloader_names = ["held_out"]
    config.train_loader_config.dataloader_names = ["web", "code"]
    halves = [
        torch.optim.SGD(model.encoder.parameters(), lr=0.1),
        torch.optim.SGD(model.decoder.parameters(), lr=0.1),
    ]
    trainer = GenericTrainer(config, model, halves, logger=False)
    trainer.hook_manager.register_hook(hook)
    trainer.set_training_step(training_step)
    trainer.set_validation_step(scores(1.0))
    data = batches(1)
    trainer.fit([data, data], [data], max_epochs=1)

    assert [name for name, _ in calls] == [
        "on_train_start",
        "on_epoch_start",
        *[
            "on_train_batch_start",
            "on_before_backward",
            "on_after_backward",
            *["on_before_optimizer_step", "on_gradient_clip", "on_after_optimizer_step"] * 2,
            "on_train_batch_end",
        ]
        * 2,
        "on_validation_start",
        "on_validation_batch_start",
        "on_validation_batch_end",
        "on_validation_end",
        "on_epoch_end",
        "on_checkpoint_save",
        "on_train_end",
    ]
    assert all(arguments["trainer"] is trainer for _, arguments in calls)
    heard: dict[str, list[dict[str, Any]]] = {}
    for name, arguments in calls:
        heard.setdefault(name, []).append(arguments)
    for when in ("on_train_batch_start", "on_train_batch_end"):
        facts = [(each["batch_idx"], each["dataloader_idx"], each["dataloader_name"]) for each in heard[when]]
        assert facts == [(0, 0, "web"), (1, 1, "code")] and heard[when][0]["batch"] is data[0]
    assert isinstance(heard["on_train_batch_end"][0]["metrics"]["loss"], float)
    assert [each["optimizer_idx"] for each in heard["on_before_optimizer_step"]] == [0, 1, 0, 1]
    assert (
        isinstance(heard["on_before_backward"][0]["loss"], Tensor)
        and heard["on_gradient_clip"][0]["grad_norm"] > 0
    )
    assert heard["on_validation_batch_end"][0]["dataloader_name"] == "held_out"
    assert heard["on_validation_end"][0]["metrics"]["val/loss"] == 1.0
    assert (
        heard["on_checkpoint_save"][0]["checkpoint_path"]
        == "checkpoints/experiment/checkpoints/epoch_000_step_000002.ckpt"
    )


def test_a_failure_and_the_load_that_follows_are_heard_and_everything_is_in_place_by_then() -> None:
    theirs = run("Complete Hook Interface")["TrainerHooks"]
    config = GenericTrainerConfig(log_loss_every_n_steps=None)

    def failing(trainer: Any, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_name: str) -> Any:
        if trainer.current_epoch == 1:
            raise ValueError("lost the GPU")
        return training_step(trainer, batch, batch_idx, dataloader_idx, dataloader_name)

    hook, calls = recorder(theirs)
    trainer = make(config, hook)
    trainer.best_accuracy = 0.75
    trainer.set_training_step(failing)
    with pytest.raises(ValueError, match="lost the GPU") as failure:
        trainer.fit([batches(2)], max_epochs=3)
    assert calls[-1] == ("on_exception", {"trainer": trainer, "exception": failure.value})

    class Position(TrainerHooks):
        def on_checkpoint_load(self, trainer: Any, checkpoint_path: str) -> None:
            self.seen = (checkpoint_path, trainer.global_step, trainer.best_accuracy)

    position = Position()
    again = make(config, position)
    again.fit([batches(2)], max_epochs=3, resume_from_checkpoint="latest")
    assert position.seen == ("checkpoints/experiment/checkpoints/epoch_000_step_000002.ckpt", 2, 0.75)
    assert again.global_step == 6  # the first epoch was not trained again


def test_custom_hooks_run_in_the_order_of_registration_and_before_built_in_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Says(TrainerHooks):
        def on_epoch_end(self, trainer: Any, epoch: int) -> None:
            print(type(self).__name__)

    trainer = make(HooksConfig(enable_logging_hook=True))
    given = {name: type(name, (Says,), {}) for name in ("CustomHook1", "CustomHook2")}
    run("Execution Order", trainer=trainer, **given)
    trainer.fit([batches(1)], max_epochs=1)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" in ")[0] for line in lines if "Custom" in line or "epoch 0 completed" in line] == [
        "CustomHook1",
        "CustomHook2",
        "epoch 0 completed",
    ]


def test_a_stateful_hook_finds_a_plateau(capsys: pytest.CaptureFixture[str]) -> None:
    hook = run("Stateful Hooks")["StatefulHook"]()
    trainer = make(None, hook)
    trainer.optimizers[0].param_groups[0]["lr"] = 0.0
    trainer.fit([batches(3)], max_epochs=6)
    assert len(hook.epoch_losses) == 6 and hook.batch_losses == []
    assert all(type(each) is float for each in hook.epoch_losses)  # no tensor that holds a graph
    assert capsys.readouterr().out == "Training plateau detected!\n"


def test_one_hook_hands_data_to_the_next_in_the_same_event(capsys: pytest.CaptureFixture[str]) -> None:
    block = run("Hook Communication")
    make(None, block["ConsumerHook"](), block["ProducerHook"]()).fit([batches(1)], max_epochs=1)
    assert capsys.readouterr().out == ""  # the consumer came first: there was nothing yet
    make(None, block["ProducerHook"](), block["ConsumerHook"]()).fit([batches(1)], max_epochs=1)
    assert capsys.readouterr().out == "Received metric: 0.95\n"


def test_a_conditional_hook_begins_after_its_epoch() -> None:
    analysed: list[int] = []

    class Analyses(run("Conditional Hooks")["ConditionalHook"]):  # type: ignore[misc]
        def on_epoch_start(self, trainer: Any, epoch: int) -> None:
            super().on_epoch_start(trainer, epoch)
            self.epoch = epoch

        def _analyze_metrics(self, metrics: Any) -> None:
            analysed.append(self.epoch)

    make(None, Analyses(enable_after_epoch=2)).fit([batches(2)], max_epochs=4)
    assert analysed == [2, 2, 3, 3]


@pytest.mark.parametrize("fails", [False, True])
def test_a_hook_notifies_a_service_of_better_models_and_the_end(
    fails: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent: list[Any] = []
    service = types.ModuleType("requests")
    service.exceptions = types.SimpleNamespace(  # type: ignore[attr-defined]
        Timeout=type("Timeout", (TimeoutError,), {}), RequestException=OSError
    )

    def post(url: str, json: dict[str, str], timeout: int) -> None:
        if fails:
            raise service.exceptions.Timeout
        sent.append((url, json["text"], timeout))

    service.post = post  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "requests", service)
    hook = run("External Integration Hooks")["SlackNotificationHook"]("https://example.test/hook")
    trainer = make(None, hook, losses=(3.0, 4.0, 2.0))
    trainer.fit([batches(1)], [batches(1)], max_epochs=3)
    texts = [
        "New best model! Epoch 0, Loss: 3.0000",
        "New best model! Epoch 2, Loss: 2.0000",
        "Training completed! Best loss: 2.0000",
    ]
    assert sent == ([] if fails else [("https://example.test/hook", text, 10) for text in texts])
    assert capsys.readouterr().out == ("Warning: Webhook notification timed out\n" * 3 if fails else "")
    assert trainer.status == "completed"


def test_a_debugging_hook_breaks_on_the_first_nan_and_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    breaks: list[str] = []
    monkeypatch.setattr(pdb, "set_trace", lambda: breaks.append("here"))
    data = batches(2)
    data[1][0].fill_(float("nan"))
    hook = run("Debugging Hooks")["DebugHook"](break_on_nan=True, log_shapes=True)
    config = silent(performance=PerformanceConfig(clip_grad_norm=None))
    with pytest.raises(NonFiniteLoss):
        make(config, hook).fit([data], max_epochs=1)
    lines = capsys.readouterr().out.splitlines()
    shapes = ["Batch item 0 shape: torch.Size([3, 4])", "Batch item 1 shape: torch.Size([3, 2])"]
    parameters = [f"NaN gradient detected in {name}" for name, _ in Coder().named_parameters()]
    assert lines == [*shapes, *shapes, *parameters, "NaN loss at batch 1"]
    assert len(breaks) == len(parameters) + 1


def test_a_configurable_hook_runs_every_so_many_steps() -> None:
    cls = run("2. Hook Configuration")["ConfigurableHook"]
    assert [step for step in range(7) if cls({"frequency": 3}).should_run(step)] == [0, 3, 6]

    class Runs(cls):  # type: ignore[misc, valid-type]
        def on_after_optimizer_step(self, trainer: Any, optimizer_idx: int) -> None:
            if self.should_run(trainer.global_step):
                ran.append(trainer.global_step)

    ran: list[int] = []
    make(None, Runs({"frequency": 2})).fit([batches(5)], max_epochs=1)
    make(None, Runs({"enabled": False})).fit([batches(5)], max_epochs=1)
    assert ran == [2, 4]


@pytest.mark.parametrize("debug", [False, True])
def test_a_hook_that_handles_its_own_errors_asks_the_configuration_for_details(
    debug: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    class Fails(run("3. Error Handling")["RobustHook"]):  # type: ignore[misc]
        def _process_metrics(self, metrics: Any) -> None:
            raise ValueError(f"cannot read {sorted(metrics)}")

    trainer = make(silent(debug_mode=debug), Fails())
    trainer.fit([batches(2)], max_epochs=1)
    shown = capsys.readouterr()
    assert shown.out == "Hook error (non-fatal): cannot read ['loss']\n" * 2
    assert shown.err.count("Traceback") == (2 if debug else 0)
    assert trainer.status == "completed"


def test_expensive_work_is_done_for_a_sample_of_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    analysed: list[float] = []

    class Looks(run("4. Performance Considerations")["EfficientHook"]):  # type: ignore[misc]
        def _expensive_analysis(self, metrics: Any) -> None:
            analysed.append(metrics["loss"])

    drawn = iter([0.05, 0.5, 0.9, 0.01])
    monkeypatch.setattr(random, "random", lambda: next(drawn))
    make(None, Looks()).fit([batches(4)], max_epochs=1)
    assert len(analysed) == 2


def test_the_documents_own_test_passes() -> None:
    custom = run("Basic Custom Hook")["MyCustomHook"]
    run("5. Testing Hooks", MyCustomHook=custom, create_test_model=Coder)["test_custom_hook"]()
    assert (
        len(inspect.signature(inspect.unwrap(custom.on_train_batch_end)).parameters) == 6
    )  # self and five, called with six


def test_every_block_of_the_document_is_run_by_a_test() -> None:
    files = sorted(Path(__file__).parent.glob("test_*.py"))
    source = "".join(file.read_text(encoding="utf-8") for file in files)
    titles = [
        title
        for title in BLOCKS
        if re.search(rf'run\(\s*"{re.escape(title)}"|BLOCKS\["{re.escape(title)}"\]', source)
    ]
    assert titles == list(BLOCKS) and len(titles) == 19


class AnyNames(TrainerHooks):
    """Parameters under names of the user's own, which the framework has always allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: dict[str, tuple[Any, ...]] = {}

    def on_epoch_start(self, t: Any, e: int) -> None:
        self.heard["epoch_start"] = (t, e)

    def on_epoch_end(self, tr: Any, ep: int, results: Any) -> None:
        self.heard["epoch_end"] = (tr, ep, results["train/loss"])

    def on_train_batch_start(self, t: Any, b: Any, loader: int, name: str) -> None:
        self.heard["batch_start"] = (t, b, loader, name)

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        self.heard["batch_end"] = (trainer, *rest)

    def on_validation_end(self, trainer: Any, metrics: Any, threshold: float = 0.5) -> None:
        self.heard["validation_end"] = (trainer, metrics["val/loss"], threshold)


def test_parameters_may_have_any_name_in_the_documented_places_or_any_place_under_their_names() -> None:
    hook = AnyNames()
    trainer = make(None, hook)
    data = batches(1)
    trainer.fit([data], [data], max_epochs=1)
    heard = hook.heard
    assert heard["epoch_start"] == (trainer, 0) and heard["epoch_end"][:2] == (trainer, 0)
    assert heard["batch_start"] == (trainer, data[0], 0, "dl0")
    assert heard["batch_end"][:5] == (trainer, data[0], 0, 0, "dl0") and set(heard["batch_end"][5]) == {
        "loss"
    }
    assert heard["validation_end"] == (trainer, 1.0, 0.5)


def test_a_method_in_its_short_form_can_be_called_with_all_documented_arguments_or_its_own() -> None:
    class Short(TrainerHooks):
        calls: ClassVar[list[Any]] = []

        def on_train_batch_end(
            self, trainer: Any, batch: Any, loader_idx: int, loader_name: str, metrics: Any
        ) -> None:
            super().on_train_batch_end(trainer, batch, loader_idx, loader_name, metrics)
            self.calls.append((trainer, batch, loader_idx, loader_name, metrics))

        def on_epoch_end(self, trainer: Any, epoch: int) -> None:
            self.calls.append((trainer, epoch))

    hook: Any = Short()
    hook.on_train_batch_end("t", "b", 7, 1, "code", {})
    hook.on_train_batch_end("t", "b", 1, "code", {})
    hook.on_train_batch_end("t", "b", loader_idx=1, loader_name="code", metrics={})
    hook.on_epoch_end("t", 3, {"train/loss": 1.0})
    assert Short.calls == [("t", "b", 1, "code", {})] * 3 + [("t", 3)]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'metrics'"):
        hook.on_train_batch_end("t", "b", 1, "code")


def test_a_hook_of_the_framework_runs_in_hooklines_own_trainer_and_takes_no_sanity_check_for_a_result() -> (
    None
):
    seen: list[Any] = []

    class Hears(TrainerHooks):
        def on_validation_end(self, trainer: Any, epoch: int, metrics: Any) -> None:
            seen.append(("validated", epoch))

        @hookline.every("2 steps")
        def on_step_end(self, step: int) -> None:
            seen.append(("step", step))

    quiet(hooks=[Hears()], num_sanity_val_steps=1).fit(Net(), batches(3), batches(1))
    assert seen == [("step", 2), ("validated", 0)]


def test_before_and_after_forward_are_heard_around_every_step_function_with_its_duration() -> None:
    heard: list[Any] = []

    class Times(TrainerHooks):
        def on_before_forward(self, trainer: Any) -> None:
            heard.append("before")

        def on_after_forward(self, trainer: Any, duration_ms: float) -> None:
            heard.append(duration_ms)

    trainer = make(None, Times())
    trainer.set_training_step(lambda *arguments: time.sleep(0.005) or training_step(*arguments))
    trainer.fit([batches(1)], [batches(1)], max_epochs=1)
    assert heard[::2] == ["before", "before"]
    assert heard[1] >= 5 > 0 < heard[3]


def test_fewer_parameters_than_documented_get_the_first_ones_and_names_of_facts_go_by_their_names() -> None:
    class Few(TrainerHooks):
        heard: ClassVar[list[Any]] = []

        def on_epoch_end(self, t: Any) -> None:
            self.heard.append(t)

        def on_validation_end(self, trainer: Any, metrics: Any, e: int) -> None:
            self.heard.append((metrics["val/loss"], e))

    trainer = make(None, Few())
    trainer.fit([batches(1)], [batches(1)], max_epochs=1)
    assert Few.heard == [(1.0, 0), trainer]


def test_more_parameters_than_documented_are_refused_with_what_can_be_asked_for() -> None:
    class Many(TrainerHooks):
        def on_epoch_end(self, a: Any, b: Any, c: Any, d: Any) -> None: ...

    with pytest.raises(HookError, match=r"Many\.on_epoch_end: on_train_epoch_end has no argument 'c'"):
        make(None, Many())


def test_a_misspelt_method_is_refused_when_it_is_registered() -> None:
    class Wrong(TrainerHooks):
        def on_epoch_finish(self, trainer: Any, epoch: int) -> None: ...

    with pytest.raises(HookError, match="Did you mean 'on_epoch_"):
        make(None, Wrong())


def test_an_adapted_hook_costs_at_most_one_call_more_than_a_native_one() -> None:
    class Native(Hook):
        def on_train_batch_end(
            self,
            trainer: Any,
            batch: Any,
            batch_idx: int,
            dataloader_idx: int,
            dataloader_name: str,
            metrics: Any,
        ) -> None: ...

    class Whole(TrainerHooks):
        def on_train_batch_end(
            self,
            trainer: Any,
            batch: Any,
            batch_idx: int,
            dataloader_idx: int,
            dataloader_name: str,
            metrics: Any,
        ) -> None: ...

    class OwnNames(TrainerHooks):
        def on_train_batch_end(self, t: Any, b: Any, i: int, j: int, n: str, m: Any) -> None: ...

    class Short(TrainerHooks):
        def on_train_batch_end(
            self, trainer: Any, batch: Any, loader_idx: int, loader_name: str, metrics: Any
        ) -> None: ...

    cost = {
        cls: per_step(lambda data, cls=cls: quiet(hooks=[cls()]).fit(Net(), data))
        for cls in (Native, Whole, OwnNames, Short)
    }
    assert cost[Whole] == cost[OwnNames] == cost[Native]
    assert cost[Short] == cost[Native] + 1


def test_a_hook_is_unregistered_by_itself_or_by_its_name_and_others_stay() -> None:
    first, second = AnyNames(), AnyNames()
    trainer = make(None, first, second)
    trainer.hook_manager.unregister_hook(first)
    assert first not in trainer.hook_manager.hooks and second in trainer.hook_manager.hooks
    trainer.hook_manager.unregister_hook("any_names_2")
    assert second not in trainer.hook_manager.hooks
    with pytest.raises(HookError, match="not registered"):
        trainer.hook_manager.unregister_hook(first)
    trainer.hook_manager.clear_hooks()
    assert trainer.hook_manager.hooks == []


# ---- built-in hooks, switched on by the configuration ------------------------------------------------------------


def test_the_logging_hook_says_when_training_and_epochs_begin_and_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    make(run("Logging Hook")["config"]).fit([batches()], max_epochs=2)
    lines = capsys.readouterr().out.splitlines()
    assert [
        line.split(":")[0].split(" in ")[0]
        for line in lines
        if "epoch" in line or line.startswith("training")
    ] == [
        "training started",
        "epoch 0 started",
        "epoch 0 completed",
        "epoch 1 started",
        "epoch 1 completed",
        "training completed",
    ]


def test_the_gradient_monitor_logs_norms_percentiles_and_histograms_of_the_layers_named_every_100_steps() -> (
    None
):
    rows = Rows()
    make(run("Gradient Monitor Hook")["config"], logger=rows).fit([batches(200)], max_epochs=1)
    found = {step: row for step, row in rows.rows if "grad_norm" in row}
    assert sorted(found) == [100, 200]
    kinds = ("grad_norm", "gradients/p10", "gradients/p50", "gradients/p90")
    assert {name for name in found[100] if name.startswith(kinds) and "/" in name} == {
        f"{kind}/{layer}" for kind in kinds for layer in ("encoder", "decoder")
    }
    assert {tag.rpartition("/")[2] for tag in rows.histograms} == {"encoder", "decoder"}


def test_the_checkpoint_hook_keeps_the_three_best_and_the_last_under_the_documented_names() -> None:
    losses = (3.0, 1.0, 2.0, 2.5, 5.0)
    make(run("Model Checkpoint Hook")["config"], losses=losses).fit([batches(2)], [batches(1)], max_epochs=5)
    assert names("checkpoints/experiment/best") == [
        "epoch_1_loss_1.00",
        "epoch_2_loss_2.00",
        "epoch_3_loss_2.50",
        "last",
    ]


def test_the_early_stopping_hook_waits_ten_epochs_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make(run("Early Stopping Hook")["config"], losses=(2.0, 1.0, 0.99995))
    trainer.fit([batches(1)], [batches(1)], max_epochs=50)
    assert (
        trainer.status == "stopped" and trainer.state.epochs_seen == 12
    )  # the last gain was below min_delta
    assert "(10 of 10)" in capsys.readouterr().out


def test_the_early_stopping_hook_crashes_if_its_metric_is_not_found() -> None:
    trainer = make(run("Early Stopping Hook")["config"])
    trainer.set_validation_step(lambda trainer, batch, i, j, name: {"accuracy": 0.5})
    with pytest.raises(OptionError, match="val/loss"):
        trainer.fit([batches(1)], [batches(1)], max_epochs=3)


def test_the_rate_monitor_logs_rate_momentum_and_weight_decay_once_an_epoch() -> None:
    rows = Rows()
    make(run("Learning Rate Monitor Hook")["config"], logger=rows).fit([batches(3)], max_epochs=2)
    found = [{name: value for name, value in row.items() if name.startswith("lr-")} for _, row in rows.rows]
    expected = {"lr-SGD": 0.1, "lr-SGD-momentum": 0.9, "lr-SGD-weight_decay": 0.01}
    assert [row for row in found if row] == [expected, expected]


def test_switches_alone_have_the_defaults_of_the_framework() -> None:
    stopping, saving = HooksConfig(
        enable_early_stopping_hook=True, enable_model_checkpoint_hook=True
    ).build()[::-1]
    assert isinstance(stopping, EarlyStoppingHook | ModelCheckpointHook)
    by_class = {type(each): each for each in (stopping, saving)}
    assert (
        by_class[EarlyStoppingHook].patience == 10 and by_class[EarlyStoppingHook].watch.min_delta == 0.0001
    )
    assert (
        by_class[ModelCheckpointHook].save_top_k == 3 and by_class[ModelCheckpointHook].monitor == "val/loss"
    )
