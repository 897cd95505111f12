"""The document of `trainers`' hooks: each of its code blocks runs with another import line, and does what the text says of it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_budgets import per_step
from tiny import Net, batches
from torch import nn
from torch.nn.functional import cross_entropy, l1_loss, mse_loss

import hookline.interop.trainers
from hookline import Hook, HookError, OptionError, Recorder, every
from hookline.interop.kempnerforge import TrainingHook as ForgeHook
from hookline.interop.trainers import (
    BaseTrainer,
    CheckpointHook,
    ConsoleLogHook,
    HookManager,
    JSONLogHook,
    SimpleTrainer,
    TrainingHook,
    get_trainer,
    register_trainer,
)

QUICK_START = """\
from trainers import get_trainer

# Create trainer
trainer = get_trainer("simple", model, dataloader, optimizer, device)

# Add built-in hooks
trainer.add_console_logging(log_every_n_batches=10)
trainer.add_json_logging(log_every_n_batches=100)  
trainer.add_checkpointing(save_every_n_epochs=1)

# Train with hooks
trainer.train()
"""  # noqa: W291

ARCHITECTURE = """\
TrainingHook (base class)
    ↓
HookManager (manages multiple hooks)
    ↓  
BaseTrainer (hook integration)
    ↓
SimpleTrainer / AccelerateTrainer (concrete implementations)
"""  # noqa: W291

LIFECYCLE = """\
trainer.train()
# ↓ calls hooks at these points:

hooks.on_train_begin(state)              # Training starts
    hooks.on_epoch_begin(epoch, state)      # Each epoch starts
        hooks.on_batch_end(batch, loss, state)  # After each batch
    hooks.on_epoch_end(epoch, state)        # Each epoch ends
hooks.on_train_end(state)                # Training complete
"""

CUSTOM_HOOK = """\
from trainers.hooks import TrainingHook

class CustomHook(TrainingHook):
    def __init__(self):
        super().__init__("my_custom_hook")
        self.losses = []
    
    def on_batch_end(self, batch_idx, loss, state):
        self.losses.append(loss)
        if batch_idx % 100 == 0:
            print(f"Average loss: {sum(self.losses)/len(self.losses):.4f}")

# Use it
trainer.add_hook(CustomHook())
"""  # noqa: W293

MANAGEMENT = """\
# Add hooks
trainer.add_hook(my_hook)
trainer.add_console_logging()

# Manage hooks
trainer.remove_hook("console_log")
trainer.disable_hook("json_log")
trainer.enable_hook("json_log")

# List active hooks
print(trainer.hooks.list_hooks())
"""

STATE = """\
state = {
    'model': model,
    'optimizer': optimizer,
    'device': device,
    'current_epoch': 3,
    'current_batch_idx': 150,
    'latest_loss': 0.245,
    'avg_loss': 0.312,
    'model_params': 125_000_000,
    'status': 'training'  # or 'completed', 'error'
}
"""


def run_block(block: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run a block of the document with its import line changed and nothing else."""
    exec(re.sub(r"^from trainers", "from hookline.interop.trainers", block, flags=re.M), names)
    return names


def parts(n: int = 4) -> dict[str, Any]:
    """What the document's blocks take for granted."""
    model = nn.Linear(4, 2)
    return {
        "model": model,
        "dataloader": batches(n),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "device": torch.device("cpu"),
    }


def simple(n: int = 4, **options: Any) -> BaseTrainer:
    trainer: BaseTrainer = get_trainer("simple", **parts(n), **{"num_epochs": 1, **options})
    return trainer


class Heard(TrainingHook):
    """The document's methods, writing down what they are called with."""

    def __init__(self, name: str = "heard") -> None:
        super().__init__(name)
        self.heard: list[tuple[Any, ...]] = []

    def on_train_begin(self, state: Any) -> None:
        self.heard.append(("train begin",))

    def on_epoch_begin(self, epoch: int, state: Any) -> None:
        self.heard.append(("epoch begin", epoch))

    def on_batch_end(self, batch: Any, loss: float, state: Any) -> None:
        self.heard.append(("batch end", batch, loss))

    def on_epoch_end(self, epoch: int, state: Any) -> None:
        self.heard.append(("epoch end", epoch))

    def on_train_end(self, state: Any) -> None:
        self.heard.append(("train end",))


# ---- the blocks --------------------------------------------------------------------------------------------------


def test_the_quick_start_trains_prints_logs_and_saves_without_being_told_where(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = parts(100)
    before = names["model"].weight.detach().clone()
    run_block(QUICK_START, names)
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if re.match(r"epoch \d, batch \d+/100, loss", line)]) == 5 * 10
    (run,) = Path("runs").iterdir()
    (log,) = (run / "logs").iterdir()
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [each["type"] for each in records] == ["train_begin", *["batch", "epoch_end"] * 5, "train_end"]
    assert len(list((run / "checkpoints").iterdir())) == 5
    assert not torch.equal(names["model"].weight, before)


def test_the_architecture_is_there_by_its_names() -> None:
    hook, manager, base, concrete = (line for line in ARCHITECTURE.splitlines() if "↓" not in line)
    names = [line.partition(" (")[0] for line in (hook, manager, base)] + concrete.partition(" (")[0].split(
        " / "
    )
    assert set(names) <= set(hookline.interop.trainers.__all__)
    trainer = simple()
    assert (
        isinstance(trainer, SimpleTrainer)
        and isinstance(trainer, BaseTrainer)
        and isinstance(trainer.hooks, HookManager)
    )


def test_the_lifecycle_is_what_train_does_and_what_a_loop_of_ones_own_can_do_with_a_manager() -> None:
    trainer, by_hand, hook = simple(2, num_epochs=2), HookManager(), Heard()
    trainer.add_hook(hook)
    by_hand.add_hook(own := Heard())
    names = {"trainer": trainer, "hooks": by_hand, "state": {}, "epoch": 1, "batch": "the batch", "loss": 0.5}
    run_block(
        "\n".join(line.strip() for line in LIFECYCLE.splitlines()), names
    )  # its indentation shows what is inside what
    assert own.heard == [
        ("train begin",),
        ("epoch begin", 1),
        ("batch end", "the batch", 0.5),
        ("epoch end", 1),
        ("train end",),
    ]
    ends = ["batch end", "batch end"]
    assert [each[0] for each in hook.heard] == [
        "train begin",
        *["epoch begin", *ends, "epoch end"] * 2,
        "train end",
    ]
    assert [each[1] for each in hook.heard if each[0].startswith("epoch")] == [1, 1, 2, 2]
    assert all(
        batch is given
        for (_, batch, _), given in zip(
            [each for each in hook.heard if each[0] == "batch end"], trainer.dataloader * 2, strict=True
        )
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


# ---- the state ---------------------------------------------------------------------------------------------------


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


# ---- training and evaluating -------------------------------------------------------------------------------------


def test_train_returns_the_losses_of_the_epochs_and_what_was_done() -> None:
    result = simple(3, num_epochs=2).train()
    assert sorted(result) == ["epoch_losses", "final_loss", "total_batches", "total_samples", "training_time"]
    assert (result["total_batches"], result["total_samples"]) == (6, 18)
    assert (
        len(result["epoch_losses"]) == 2
        and result["final_loss"] == result["epoch_losses"][-1] < result["epoch_losses"][0]
    )


def test_evaluate_measures_on_any_loader_tells_the_hooks_and_leaves_the_model_as_it_was() -> None:
    heard: list[str] = []

    class Evaluations(TrainingHook):
        def on_evaluate_begin(self, state: Any) -> None:
            heard.append("begin")

        def on_evaluate_end(self, state: Any) -> None:
            heard.append("end")

    trainer = simple(num_sanity_val_steps=1, val_dataloader=batches(2))
    trainer.add_hook(Evaluations())
    before = trainer.model.weight.detach().clone()  # type: ignore[operator]
    result = trainer.evaluate(batches(1))
    assert heard == ["begin", "end"]
    with torch.no_grad():
        expected = float(mse_loss(trainer.model(batches(1)[0][0]), batches(1)[0][1]))
    assert result == {"loss": pytest.approx(expected), "perplexity": pytest.approx(math.exp(expected))}
    assert trainer.model.training and torch.equal(trainer.model.weight, before)  # type: ignore[arg-type]
    trainer.train()
    assert heard == ["begin", "end"] * 2  # the sanity check is no evaluation
    assert trainer.evaluate()["loss"] == trainer.evaluate(batches(2))["loss"]


def test_a_hook_may_evaluate_at_the_end_of_an_epoch_on_the_validation_data() -> None:
    measured: list[float] = []

    class Validates(TrainingHook):
        def on_epoch_end(self, epoch: int, state: Any) -> None:
            if epoch % 2 == 0:
                measured.append(trainer.evaluate()["loss"])

    trainer = simple(num_epochs=4, val_dataloader=batches(2), validate_every_n_epochs=4)
    trainer.add_hook(Validates("validates"))
    trainer.train()
    first, last = measured
    assert trainer.evaluate()["loss"] == last < first


def test_it_trains_like_a_loop_written_by_hand_and_clips_as_told() -> None:
    torch.manual_seed(3)
    trainer = simple(num_epochs=2, clip_grad_norm=0.01)
    torch.manual_seed(3)
    own = parts()
    for _ in range(2):
        for inputs, targets in own["dataloader"]:
            own["optimizer"].zero_grad()
            mse_loss(own["model"](inputs), targets).backward()
            nn.utils.clip_grad_norm_(own["model"].parameters(), 0.01)
            own["optimizer"].step()
    trainer.train()
    assert torch.equal(trainer.model.weight, own["model"].weight)  # type: ignore[arg-type]


class ReturnsLoss(nn.Module):
    """A model that computes its own loss, from arguments by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Any, labels: Any) -> dict[str, Any]:
        return {"logits": (logits := self.layer(x)), "loss": cross_entropy(logits, labels)}


IDS = torch.tensor([[1, 2, 3], [0, 1, 2]])
MODELS: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "a dictionary of arguments": (
        ReturnsLoss,
        {"x": torch.ones(3, 4), "labels": torch.tensor([0, 1, 1])},
        None,
    ),
    "classes": (lambda: nn.Linear(4, 2), (torch.ones(3, 4), torch.tensor([0, 1, 1])), None),
    "tokens": (lambda: nn.Embedding(5, 5), (IDS, IDS), None),
    "numbers": (lambda: nn.Linear(4, 2), (torch.ones(3, 4), torch.ones(3, 2)), None),
    "a loss function": (lambda: nn.Linear(4, 2), (torch.ones(3, 4), torch.ones(3, 2)), l1_loss),
}


@pytest.mark.parametrize("kind", MODELS)
def test_plain_models_train_whether_they_return_a_loss_or_not(kind: str) -> None:
    make, batch, loss = MODELS[kind]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = get_trainer("simple", model, [batch], optimizer, "cpu", loss=loss).train()["epoch_losses"]
    assert len(losses) == 5 and losses == sorted(losses, reverse=True) and losses[0] > losses[-1]


def test_a_model_without_a_loss_and_targets_that_do_not_fit_is_an_error_that_says_what_to_do() -> None:
    model = nn.Linear(4, 2)
    trainer = get_trainer(
        "simple", model, [torch.ones(3, 4)], torch.optim.SGD(model.parameters(), lr=0.1), "cpu"
    )
    with pytest.raises(
        OptionError,
        match=r"returns a tensor of shape \(3, 2\) and no loss, and the targets are NoneType.* pass loss=",
    ):
        trainer.train()


# ---- hooks -------------------------------------------------------------------------------------------------------


def test_hooks_of_all_kinds_are_in_one_run_side_by_side() -> None:
    heard: list[str] = []

    class Here(TrainingHook):
        def on_epoch_end(self, epoch: int, state: Any) -> None:
            heard.append(f"here {epoch}")

    class Forge(ForgeHook):
        def on_step_end(self, ctx: Any) -> None:
            heard.append(f"forge {ctx.step}")

    class Native(Hook):
        def on_train_epoch_end(self, epoch: int) -> None:
            heard.append(f"native {epoch}")

    trainer = hookline.Trainer(
        hooks=[Here("here"), Forge(), Native()], max_epochs=1, logger=False, enable_progress_bar=False
    )
    trainer.fit(Net(), batches(1))
    mine = simple(1, hooks=[Here("here"), Forge(), Native()])
    mine.train()
    assert heard == ["forge 1", "here 1", "native 0"] * 2


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


def test_everything_is_written_below_the_output_directory() -> None:
    trainer = simple(2, output_dir="out", num_epochs=4)
    trainer.add_json_logging(log_every_n_batches=1)
    trainer.add_checkpointing(save_every_n_epochs=2)
    trainer.train()
    assert [each.name for each in Path().iterdir()] == ["out"]
    assert sorted(each.name for each in Path("out/checkpoints").iterdir()) == [
        "epoch=1-step=4",
        "epoch=3-step=8",
    ]


def test_a_second_trainer_in_the_same_directory_trains_a_model_of_its_own() -> None:
    for _ in range(2):
        trainer = simple(2, output_dir="out", num_epochs=2)
        trainer.add_checkpointing()
        before = trainer.model.weight.detach().clone()
        assert trainer.train()["total_batches"] == 4 and not torch.equal(trainer.model.weight, before)
        assert not trainer.trainer.state.resumed


# ---- trainers by name --------------------------------------------------------------------------------------------


def test_a_trainer_of_ones_own_is_made_by_its_name() -> None:
    class Backwards(BaseTrainer):
        """Has a loop of its own, and calls the hooks as the document's lifecycle says."""

        def train(self) -> dict[str, Any]:
            state: dict[str, Any] = {"model": self.model}
            self.hooks.on_train_begin(state)
            for batch_idx, (inputs, targets) in reversed(list(enumerate(self.dataloader))):
                self.hooks.on_batch_end(batch_idx, mse_loss(self.model(inputs), targets).item(), state)
            self.hooks.on_train_end(state)
            return state

    register_trainer("backwards", Backwards)
    trainer = get_trainer("backwards", **parts(3))
    trainer.add_hook(hook := Heard())
    trainer.train()
    assert [each[:2] for each in hook.heard] == [
        ("train begin",),
        *[("batch end", n) for n in (2, 1, 0)],
        ("train end",),
    ]
    with pytest.raises(
        OptionError, match=r"no trainer called 'backward'. Did you mean 'backwards'\? There are: "
    ):
        get_trainer("backward", **parts())


def test_wrong_names_options_and_models_are_errors_with_the_nearest_right_one() -> None:
    with pytest.raises(OptionError, match=r"no trainer called 'simpel'. Did you mean 'simple'"):
        get_trainer("simpel", **parts())
    with pytest.raises(
        OptionError, match=r"SimpleTrainer has no option 'num_epoch'. Did you mean 'num_epochs'"
    ):
        get_trainer("simple", **parts(), num_epoch=3)
    with pytest.raises(OptionError, match="'simple' is Hookline's own"):
        register_trainer("simple", SimpleTrainer)
    with pytest.raises(OptionError, match="takes a class"):
        register_trainer("mine", "SimpleTrainer")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="name=3 must be text"):
        register_trainer(3, SimpleTrainer)  # type: ignore[arg-type]
    net = Net()
    with pytest.raises(OptionError, match=r"Net is a hookline.Module with its own steps and optimizers"):
        get_trainer("simple", net, batches(1), net.configure_optimizers(), "cpu")
    with pytest.raises(HookError, match=r"no hook named 'json_lok'"):
        simple().disable_hook("json_lok")


def test_a_method_with_a_parameter_too_many_is_refused_when_it_is_added() -> None:
    class Greedy(TrainingHook):
        def on_epoch_end(self, epoch: int, state: Any, extra: int) -> None: ...

    with pytest.raises(HookError, match=r"Greedy.on_epoch_end: \w+ has no argument 'extra'"):
        simple().add_hook(Greedy())


def test_a_trainer_on_accelerate_trains_the_same_with_what_it_has_prepared() -> None:
    torch.manual_seed(0)
    plain = parts()
    torch.manual_seed(0)
    prepared = parts()
    seen: dict[str, Any] = {}

    class Looks(TrainingHook):
        def on_train_begin(self, state: Any) -> None:
            seen.update(optimizer=state["optimizer"], model=state["model"])

    expected = get_trainer("simple", **plain).train()
    trainer = get_trainer("accelerate", **prepared, hooks=[Looks("looks")])
    assert trainer.train()["epoch_losses"] == pytest.approx(expected["epoch_losses"])
    assert type(seen["optimizer"]).__name__ == "AcceleratedOptimizer"
    assert seen["model"] is prepared["model"]


# ---- cost --------------------------------------------------------------------------------------------------------


def test_an_adapted_hook_costs_two_small_calls_over_a_native_one_and_a_silent_one_nothing() -> None:
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

    assert cost(Adapted("a")) == cost(Native()) + 2
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
    assert "test_trainers.py" in shown
