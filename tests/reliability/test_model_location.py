"""Where a run's model is: the last line of its output, and the best weights back in the module."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import preloaded
import pytest
import torch
from tiny import Net, batches, quiet
from torch import nn

from hookline import CheckpointError, Hook, HooklineError, OptionError, Trainer, load_weights
from hookline.checkpoint.files import read_manifest
from hookline.hooks.hparams import HParams
from hookline.hooks.model_checkpoint import ModelCheckpoint
from hookline.hooks.weight_averaging import WeightAveraging
from hookline.reliability.model_location import best_checkpoint_of, import_of


class Sized(Net):
    """Can be made only with its arguments."""

    def __init__(self, size: int, names: tuple[str, ...] = ("a",), *, backbone: Any = None) -> None:
        super().__init__()
        self.body = nn.Linear(size, 2)
        self.names = names
        self.backbone = backbone


class Scripted(Net):
    """Whose validations have these scores, one after the other."""

    def __init__(self, *scores: float) -> None:
        super().__init__()
        self.scores = list(scores)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val/score", self.scores[self.current_epoch])


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.splitlines()[-1]


def shown(module: nn.Module, capsys: pytest.CaptureFixture[str], **options: Any) -> str:
    fit = (
        {}
        if isinstance(module, Net)
        else {"loss": nn.functional.mse_loss, "optimizer": torch.optim.SGD(module.parameters(), 0.1)}
    )
    Trainer(max_epochs=1, run_dir="runs/x", logger=False, **options).fit(module, batches(2), **fit)
    return last_line(capsys)


def weights(module: nn.Module) -> dict[str, Any]:
    return {name: each.clone() for name, each in module.state_dict().items()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


NETS = """
import torch
from torch import nn
from hookline import Module

class Sized(Module):
    def __init__(self, size, names=("a",)):
        super().__init__()
        self.layer, self.names = nn.Linear(size, 2), names
    def training_step(self, batch): return self.layer(batch).square().mean()
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.1)
"""
TRAIN = """
import os, signal, sys, torch
from hookline import Trainer
{imports}

def act(step):
    if step == 2 and "term" in sys.argv: os.kill(os.getpid(), signal.SIGTERM)
    if step == 2 and "int" in sys.argv: os.kill(os.getpid(), signal.SIGINT)
    if step == 2 and "fail" in sys.argv: raise ValueError("on purpose")

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    trainer, module = Trainer(max_epochs=1, run_dir="runs/x", logger=False), Sized(3, names=("b", "c"))
    trainer.on("train_batch_start" if "fail" in sys.argv else "step_end")(act)
    try:
        trainer.fit(module, [torch.ones(2, 3)] * 4)
    finally:
        torch.save(module.state_dict(), "weights.pt")
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return preloaded.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"},
    )


def script(name: str = "train.py", classes: str = "nets.py") -> str:
    """Write a program that trains, and the file of its class; without one the program has it itself."""
    for each in (name, *([classes] if classes else [])):
        Path(each).parent.mkdir(parents=True, exist_ok=True)
    if classes:
        Path(classes).write_text(NETS)
    module = classes.removesuffix(".py").removeprefix("code/").replace("/", ".")
    Path(name).write_text(TRAIN.format(imports=f"from {module} import Sized" if classes else NETS))
    return name


@pytest.mark.parametrize(
    ("name", "classes", "before"),
    [
        ("train.py", "nets.py", "from nets import Sized; model = Sized.load_from_checkpoint("),
        (
            "train.py",
            "my_project/models/nets.py",
            "from my_project.models.nets import Sized; model = Sized.load_from_checkpoint(",
        ),
        (
            "code/train.py",
            "code/nets.py",
            'import sys; sys.path.insert(0, "code"); from nets import Sized; model = Sized.load_from_checkpoint(',
        ),
        ("train.py", "", "import hookline; hookline.load_weights(model, "),
    ],
    ids=["beside the script", "package", "script elsewhere", "in the script"],
)
def test_the_last_line_is_code_that_loads_the_model_in_a_new_process(
    name: str, classes: str, before: str
) -> None:
    trained = python(script(name, classes))
    assert trained.returncode == 0, trained.stderr
    line = trained.stderr.splitlines()[-1]
    assert line.startswith(
        f'Model: runs/x/checkpoints/last (step 4). Load it: {before}"runs/x/checkpoints/last")'
    )
    made = "" if classes else "from train import Sized\nmodel = Sized(3)\n"
    check = "\nimport torch\nfor name, each in torch.load('weights.pt').items(): assert torch.equal(each, model.state_dict()[name])\nprint(model.names)"
    loaded = python("-c", made + line.partition("Load it: ")[2] + check)
    assert loaded.returncode == 0, loaded.stderr
    assert classes == "" or loaded.stdout.split() == ["('b',", "'c')"]


@pytest.mark.parametrize(
    ("how", "first", "code"),
    [
        ("term", "Unfinished: SIGTERM ended the run at step 2, 2 batches of the first epoch.", 143),
        ("int", "Interrupted at step 2, 2 batches of the first epoch.", 130),
        ("fail", "Failed: ValueError: on purpose, in ", 1),
    ],
)
def test_a_run_that_does_not_reach_its_end_says_how_to_resume_and_where_the_model_is(
    how: str, first: str, code: int
) -> None:
    done = python(script(), how)
    assert done.returncode in (code, -2 if how == "int" else code), done.stderr
    words, saved, resume, model = done.stderr.splitlines()[-4:]
    assert words.startswith(first), done.stderr
    assert saved == "Saved: runs/x/checkpoints/last, at step 2."
    assert resume == "To resume: trainer.fit(module, ..., resume='runs/x/checkpoints/last')"
    assert model.startswith("Model: runs/x/checkpoints/last (step 2). Load it: from nets import Sized; ")


@pytest.mark.parametrize(
    "cls",
    [type("Here", (Net,), {}), type("Main", (Net,), {"__module__": "__main__"})],
    ids=["made in a test", "main"],
)
def test_a_class_that_no_module_has_is_not_imported(cls: type) -> None:
    assert import_of(cls) == ""


def test_an_installed_class_is_imported_as_it_is() -> None:
    assert import_of(nn.Linear) == "from torch.nn.modules.linear import Linear"
    assert import_of(Trainer) == "from hookline.training.trainer import Trainer"


@pytest.mark.parametrize(
    "made",
    [lambda: nn.Linear(4, 2), lambda: Sized(3, backbone=nn.Linear(1, 1))],
    ids=["plain", "an argument that no checkpoint can hold"],
)
def test_a_module_that_cannot_be_made_again_is_loaded_into_one_that_was(
    made: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    module = made()
    line = shown(module, capsys)
    call = line.partition("Load it: ")[2]
    assert call.startswith(
        'import hookline; hookline.load_weights(model, "runs/x/checkpoints/last")  # model: '
    )
    model = made()
    exec(call, {"model": model})
    assert same(weights(model), weights(module))


def test_arguments_that_a_hook_leaves_out_are_not_counted_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert "load_weights(model," in shown(Sized(3), capsys, hooks=[HParams(ignore=("size",))])


def test_ten_lines_of_torch_and_safetensors_load_it(capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file

    module = Net()
    shown(module, capsys)
    found = load_file("runs/x/checkpoints/last/model.safetensors")
    assert same(found, weights(module))


def test_the_best_one_is_named_too(capsys: pytest.CaptureFixture[str]) -> None:
    keep = ModelCheckpoint("val/score", mode="max", filename="best")
    Trainer(max_epochs=3, run_dir="run", logger=False, hooks=[keep]).fit(
        Scripted(1, 3, 2), batches(2), batches(1)
    )
    line = last_line(capsys)
    assert line.startswith(
        "Model: run/checkpoints/last (step 6). Best: run/checkpoints/best (val/score 3, step 4). Load the best: "
    )
    assert line.endswith('load_from_checkpoint("run/checkpoints/best")')


def test_after_a_failure_the_code_loads_the_newest() -> None:
    class Fails(Hook):
        def on_train_batch_start(self, step: int) -> None:
            if step == 5:
                raise ValueError("wrong")

    hooks = [ModelCheckpoint("val/score", filename="best"), Fails()]
    trainer = quiet(max_epochs=3, run_dir="run", checkpoint=True, hooks=hooks)
    with pytest.raises(ValueError, match="wrong") as caught:
        trainer.fit(Scripted(1, 2, 3), batches(2), batches(1))
    line = caught.value.__notes__[-1].splitlines()[-1]
    assert "Best: run/checkpoints/best (val/score 1, step 2). Load it: " in line
    assert line.endswith('load_from_checkpoint("run/checkpoints/last")')


def test_a_run_that_keeps_nothing_says_so_and_a_trial_says_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert shown(Net(), capsys, checkpoint=False) == "Model: not saved, because of checkpoint=False."
    assert "Model:" not in shown(Net(), capsys, fast_dev_run=True)
    assert not Path("runs/x/checkpoints").exists()


def test_what_a_hook_has_saved_is_named_without_a_last_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    line = shown(Net(), capsys, checkpoint=False, hooks=[ModelCheckpoint(filename="mine")])
    assert line.startswith("Model: runs/x/checkpoints/mine (step 2). Load it: ")


def test_a_save_before_the_end_of_the_last_epoch_has_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    saved = ModelCheckpoint("val/loss", filename="mine", mode="min", save_on_train_epoch_end=False)
    Trainer(max_epochs=1, run_dir="runs/x", logger=False, checkpoint=False, hooks=[saved]).fit(
        Net(), batches(2), batches(1)
    )
    assert last_line(capsys).startswith(
        "Model: runs/x/checkpoints/mine (the weights of step 2; what followed "
    )


def test_a_resumed_run_that_keeps_nothing_does_not_call_the_old_checkpoint_its_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown(Net(), capsys)
    Trainer(max_epochs=2, run_dir="runs/x", logger=False, checkpoint=False).fit(
        Net(), batches(2), resume="auto"
    )
    assert last_line(capsys).startswith(
        "Model: the last state, of step 4, is NOT saved. The newest checkpoint is runs/x/checkpoints/last (step 2). "
    )


def test_after_restore_best_the_code_loads_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    keep = ModelCheckpoint("val/score", filename="best", restore_best=True)
    Trainer(max_epochs=3, run_dir="run", logger=False, hooks=[keep]).fit(
        Scripted(3, 1, 2), batches(2), batches(1)
    )
    line = last_line(capsys)
    assert line.startswith(
        "Model: run/checkpoints/last (step 6). Best: run/checkpoints/best (val/score 1, step 4). Load the best: "
    )
    code = line.partition("Load the best: ")[2]
    assert '"run/checkpoints/best"' in code and "checkpoints/last" not in code


def test_without_a_progress_bar_it_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hookline"):
        quiet(run_dir="run", checkpoint=True).fit(Net(), batches(1))
    assert caplog.messages[-1].startswith("Model: run/checkpoints/last (step 1). Load it: ")


def test_a_finished_run_that_is_started_again_says_where_it_is_and_how_to_start_over(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    shown(Net(), capsys)
    Trainer(max_epochs=1, run_dir="runs/x", logger=False).fit(Net(), batches(2), resume="auto")
    assert last_line(capsys).startswith("Model: runs/x/checkpoints/last (step 2). Load it: ")
    assert (
        "Nothing to train: this run was completed at step 2. To train longer, raise its limits (max_epochs, max_steps, max_time)."
        in caplog.text
    )
    assert "To start over, pass resume=None (on the command line: hookline fit --fresh)" in caplog.text
    caplog.clear()
    Trainer(max_epochs=1, run_dir="y", logger=False).fit(Net(), batches(2), resume="runs/x/checkpoints/last")
    assert "Nothing to train: max_epochs=1 is reached. To train longer, raise its limits" in caplog.text


def test_a_run_that_was_stopped_continues_as_the_message_says(caplog: pytest.LogCaptureFixture) -> None:
    class Stops(Hook):
        def on_step_end(self, trainer: Any, step: int) -> None:
            if step == 2:
                trainer.stop("requested by hookline control")

    quiet(max_epochs=1, run_dir="x", checkpoint=True, hooks=[Stops()]).fit(Net(), batches(4))
    again = quiet(max_epochs=1, run_dir="x", checkpoint=True)
    again.fit(Net(), batches(4), resume="auto")
    assert (again.global_step, again.status) == (2, "stopped")
    assert "up to the same limits, pass its checkpoint: resume='x/checkpoints/last' (on" in caplog.text
    again.fit(Net(), batches(4), resume="x/checkpoints/last")
    assert (again.global_step, again.status) == (4, "completed")


# ---- the best ----------------------------------------------------------------------------------------------------


class Remembers(Hook):
    """Keeps the weights of every epoch's validation."""

    tier = "monitor"

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_validation_epoch_end(self, module: Any) -> None:
        self.seen.append(weights(module))


def train(
    *hooks: Any,
    averaged: bool = False,
    scores: tuple[float, ...] = (2, 1, 3),
    resume: Any = None,
    **options: Any,
) -> tuple[Trainer, Net, Remembers]:
    torch.manual_seed(1)
    remembers = Remembers()
    averaging = [WeightAveraging(decay=0.5)] if averaged else []
    options = {"run_dir": "run", "max_epochs": 3, "checkpoint": True, **options}
    trainer = quiet(hooks=[*averaging, remembers, *hooks], **options)
    module = Scripted(*scores)
    trainer.fit(module, batches(2), batches(1), resume=resume)
    return trainer, module, remembers


@pytest.mark.parametrize("averaged", [False, True], ids=["trained", "averaged"])
def test_load_best_puts_the_weights_that_were_scored_into_the_module(averaged: bool) -> None:
    trainer, module, remembers = train(ModelCheckpoint("val/score"), averaged=averaged)
    last = weights(module)
    report = trainer.load_best()
    assert (report.source, report.step, report.weights) == (
        "run/checkpoints/epoch=1-step=4",
        4,
        "averaged" if averaged else "raw",
    )
    assert same(weights(module), remembers.seen[1]) and not same(weights(module), last)
    module.scores = [0.0] * 9
    trainer.validate(loaders=batches(1))  # measures them, not the average of the end
    assert same(remembers.seen[-1], remembers.seen[1]) and same(weights(module), remembers.seen[1])


def test_load_best_into_another_module_in_another_process() -> None:
    _, _, remembers = train(ModelCheckpoint("val/score"))
    Trainer(run_dir="run", logger=False).load_best(other := Net())
    assert same(weights(other), remembers.seen[1])


def test_load_best_of_one_of_two_monitors() -> None:
    worst = ModelCheckpoint("val/score", mode="max", dirpath="worst")
    trainer, module, remembers = train(ModelCheckpoint("val/score"), worst)
    trainer.load_best(path=worst.best_model_path)
    assert same(weights(module), remembers.seen[2])


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({"monitor": "val/score", "mode": "max"}, "for val/score with mode='max' below run"),
        ({"monitor": "train/loss"}, "for train/loss with mode='min' below run"),
    ],
)
def test_load_best_does_not_follow_a_metric_or_mode_that_no_hook_has_any_more(
    now: dict[str, Any], said: str
) -> None:
    train(ModelCheckpoint("val/score", mode="min"))
    keep = ModelCheckpoint(**now)
    trainer, module, _ = train(keep, resume="auto")  # there is nothing left to train
    assert keep.best_model_path == ""
    with pytest.raises(CheckpointError, match=f"no monitor has kept a checkpoint {said}.*load_best\\(path="):
        trainer.load_best()
    with pytest.raises(
        CheckpointError, match=r"it was kept for val/score with mode='min', and the hooks monitor"
    ):
        trainer.validate(module, batches(1), checkpoint="best")
    assert trainer._fitted is not None and best_checkpoint_of(trainer._fitted) is None


def test_load_best_follows_a_hook_that_has_ranked_its_checkpoints_anew() -> None:
    train(ModelCheckpoint("val/score", mode="min", save_top_k=-1))
    keep = ModelCheckpoint("val/score", mode="max", save_top_k=-1)
    trainer, _, _ = train(keep, resume="auto")
    assert trainer.load_best().source == keep.best_model_path == "run/checkpoints/epoch=2-step=6"
    more, _, _ = train(
        again := ModelCheckpoint("val/score", mode="max"), resume="auto", max_epochs=4, scores=(2, 1, 3, 2.5)
    )
    assert more.load_best().source == again.best_model_path == "run/checkpoints/epoch=2-step=6"


def test_load_best_says_what_is_missing() -> None:
    trainer, _, _ = train(ModelCheckpoint())
    with pytest.raises(
        CheckpointError, match=r"no monitor has kept a checkpoint below run.*ModelCheckpoint\(monitor="
    ):
        trainer.load_best()
    with pytest.raises(OptionError, match="needs a module"):
        Trainer(logger=False).load_best()
    with pytest.raises(CheckpointError, match="no run has begun"):
        Trainer(logger=False).load_best(Net())
    with pytest.raises(CheckpointError, match="because run_dir='runs/none' does not exist"):
        Trainer(run_dir="runs/none", logger=False).load_best(Net())
    assert not Path("runs/none").exists()
    with pytest.raises(OptionError, match="any nn.Module, not str"):
        trainer.load_best("run")  # type: ignore[arg-type]

    class Asks(Hook):
        def on_train_epoch_end(self, trainer: Any) -> None:
            trainer.load_best()

    with pytest.raises(HooklineError, match="replaces the weights that are being trained"):
        train(Asks())


def test_a_best_one_of_an_earlier_run_in_the_same_directory_is_not_taken() -> None:
    train(ModelCheckpoint("val/score"))
    trainer, _, _ = train(max_epochs=1)
    with pytest.raises(CheckpointError, match="no monitor has kept"):
        trainer.load_best()


@pytest.mark.parametrize("averaged", [False, True], ids=["trained", "averaged"])
def test_restore_best_leaves_the_best_weights_in_the_module_and_the_last_ones_on_disk(averaged: bool) -> None:
    _, module, _ = train(ModelCheckpoint("val/score"), averaged=averaged, run_dir="plain")
    last = weights(module)
    _, module, remembers = train(ModelCheckpoint("val/score", restore_best=True), averaged=averaged)
    assert same(weights(module), remembers.seen[1])
    load_weights(other := Net(), "run/checkpoints/last", weights="raw")
    assert same(weights(other), last) and read_manifest("run/checkpoints/last")["step"] == 6
    again, module, _ = train(
        ModelCheckpoint("val/score", restore_best=True), averaged=averaged, resume="auto"
    )
    assert again.global_step == 6 and same(weights(module), remembers.seen[1])
    longer = {"max_epochs": 4, "scores": (2, 1, 3, 4)}
    _, resumed, _ = train(ModelCheckpoint("val/score"), averaged=averaged, resume="auto", **longer)
    _, whole, _ = train(ModelCheckpoint("val/score"), averaged=averaged, run_dir="whole", **longer)
    assert same(weights(resumed), weights(whole))  # it continues from the last weights


def test_restore_best_without_a_best_one_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    trainer, _, _ = train(ModelCheckpoint("val/score", restore_best=True), scores=(float("nan"),) * 3)
    assert trainer.status == "completed" and "restore_best=True, but no checkpoint was kept" in caplog.text


def test_restore_best_needs_a_monitor_that_keeps_one() -> None:
    with pytest.raises(OptionError, match="without monitor none is the best"):
        ModelCheckpoint(restore_best=True)
    with pytest.raises(OptionError, match="save_top_k=0 keeps none"):
        ModelCheckpoint("val/score", save_top_k=0, restore_best=True)
    with pytest.raises(OptionError, match="restore_best"):
        ModelCheckpoint("val/score", restore_best="yes")  # type: ignore[arg-type]
