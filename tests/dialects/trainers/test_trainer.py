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
from dialects.trainers.documented import ARCHITECTURE, LIFECYCLE, QUICK_START, Heard, parts, run_block, simple
from tiny import Net, batches
from torch import nn
from torch.nn.functional import cross_entropy, l1_loss, mse_loss

import hookline.interop.trainers
from hookline import Hook, HookError, OptionError
from hookline.interop.kempnerforge import TrainingHook as ForgeHook
from hookline.interop.trainers import (
    BaseTrainer,
    HookManager,
    SimpleTrainer,
    TrainingHook,
    get_trainer,
    register_trainer,
)

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
