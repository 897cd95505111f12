"""What the documents of other hook systems promise of their built-in hooks and configurations, in real runs.

`checklist.toml` says which promise each test is for.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet
from torch import Tensor, nn
from torch.nn import functional as F

from hookline import Hook, Logger, Module, Trainer
from hookline.config import HooksConfig, load_config
from hookline.hooks.early_stopping import EarlyStopping
from hookline.hooks.model_checkpoint import ModelCheckpoint
from hookline.run.options import Options

OWN_HOOKS = {
    "__init__": "",
    "monitoring": "class Losses(Hook):\n    def on_train_start(self, trainer): trainer.heard = ['losses']\n",
    "debugging": "class Check(Hook):\n    def __init__(self, threshold: float = 10.0): self.threshold = threshold\n"
    "    def on_train_start(self, trainer): trainer.heard.append(f'check {self.threshold}')\n",
    "failing": "class Broken(Hook):\n    calls = 0\n"
    "    def on_train_batch_end(self):\n        self.calls += 1\n        raise ValueError('broken on purpose')\n",
}


@pytest.fixture
def own_hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package with hooks in files by purpose, which can be imported."""
    folder = tmp_path / "own_hooks"
    folder.mkdir()
    for name, text in OWN_HOOKS.items():
        (folder / f"{name}.py").write_text(f"from hookline import Hook\n{text}")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    for name in [each for each in sys.modules if each.startswith("own_hooks")]:
        del sys.modules[name]


class Coder(Module):
    """An encoder and a decoder, and validation losses 3, 1, 2, 2, ..."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.between, self.decoder = nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.losses = [2.0] * 20 + [1.0, 3.0]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.decoder(self.between(self.encoder(batch[0]))), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.tensor(self.losses.pop())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def lines_of(trainer: Trainer) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (trainer.run_dir / "log.jsonl").read_text().splitlines()]


def names(folder: str = "run/checkpoints") -> list[str]:
    return sorted(each.name for each in Path(folder).iterdir())


# ---- hooks by switches -------------------------------------------------------------------------------------------


@pytest.fixture
def switched(own_hooks: Path) -> Trainer:
    """A run with everything that the documented configuration switches on."""
    config = HooksConfig(
        enable_logging_hook=True,
        enable_gradient_monitor=True,
        gradient_monitor_config={
            "log_frequency": 2,
            "log_histogram": True,
            "log_norm": True,
            "param_filter": ["encoder", "decoder"],
            "percentiles": [10, 50, 90],
        },
        enable_model_checkpoint_hook=True,
        model_checkpoint_config={
            "save_top_k": 3,
            "monitor": "val/loss",
            "mode": "min",
            "save_last": True,
            "save_on_train_epoch_end": False,
            "filename": "epoch_{epoch}_loss_{val/loss:.2f}",
            "auto_insert_metric_name": False,
        },
        enable_early_stopping_hook=True,
        early_stopping_config={
            "monitor": "val/loss",
            "patience": 3,
            "mode": "min",
            "min_delta": 0.0001,
            "check_on_train_epoch_end": False,
            "strict": True,
            "verbose": True,
        },
        enable_lr_monitor=True,
        lr_monitor_config={"log_momentum": True, "log_weight_decay": True, "frequency": "epoch"},
        hook_classes=["own_hooks.monitoring.Losses", "own_hooks.debugging.Check"],
        hook_configs={"own_hooks.debugging.Check": {"threshold": 5.0}},
    )
    trainer = quiet(max_epochs=20, logger=True, run_dir="run", hooks=config.build())
    trainer.fit(Coder(), batches(3), batches(1))
    return trainer


def test_the_progress_lines_and_early_stopping_of_the_documented_configuration_say_what_they_do(
    capsys: pytest.CaptureFixture[str], switched: Trainer
) -> None:
    out = capsys.readouterr().out
    assert "training started" in out and "epoch 0 started" in out and "epoch 0 completed" in out
    assert "val/loss improved to 1" in out and "(3 of 3)" in out
    assert switched.status == "stopped"
    assert switched.state.epochs_seen == 5  # losses 3, 1, 2, 2, 2


def test_the_gradient_monitor_of_the_documented_configuration_logs_norms_percentiles_and_histograms_of_its_layers(
    switched: Trainer,
) -> None:
    lines = lines_of(switched)
    rows = {
        line["step"]: line["metrics"]
        for line in lines
        if line["type"] == "metrics" and "grad_norm" in line["metrics"]
    }
    assert sorted(rows) == [2, 4, 6, 8, 10, 12, 14]
    assert {name for name in rows[2] if name.startswith(("grad_norm/", "gradients/p"))} == {
        f"{kind}/{layer}"
        for layer in ("encoder", "decoder")
        for kind in ("grad_norm", "gradients/p10", "gradients/p50", "gradients/p90")
    }
    assert {line["tag"] for line in lines if line["type"] == "histogram"} == {
        "gradients/encoder",
        "gradients/decoder",
    }


def test_the_checkpoints_of_the_documented_configuration_are_the_three_best_and_the_last(
    switched: Trainer,
) -> None:
    assert names() == ["epoch_1_loss_1.00", "epoch_2_loss_2.00", "epoch_3_loss_2.00", "last"]
    assert switched.hooks["model_checkpoint"].best_model_path.endswith("epoch_1_loss_1.00")


def test_the_rate_monitor_of_the_documented_configuration_logs_rate_momentum_and_decay_once_an_epoch(
    switched: Trainer,
) -> None:
    rows = [line for line in lines_of(switched) if line["type"] == "metrics" and "lr-SGD" in line["metrics"]]
    assert [row["step"] for row in rows] == [3, 6, 9, 12, 15]
    assert [rows[0]["metrics"][name] for name in ("lr-SGD", "lr-SGD-momentum", "lr-SGD-weight_decay")] == [
        0.1,
        0.9,
        0.01,
    ]


def test_hook_classes_are_heard_in_their_order_with_the_arguments_under_their_path(switched: Trainer) -> None:
    assert switched.heard == ["losses", "check 5.0"]


def test_hooks_may_live_in_files_by_purpose(own_hooks: Path) -> None:
    given = {
        "module": {"class_path": "torch.nn.Linear", "in_features": 4, "out_features": 2},
        "hooks": {
            "watch": "own_hooks.monitoring.Losses",
            "check": {"class_path": "own_hooks.debugging.Check", "threshold": 2.5},
        },
    }
    hooks = load_config(given, allow=["own_hooks"]).build().hooks
    trainer = quiet(hooks=list(hooks.values()))
    trainer.fit(Net(), batches(1))
    assert trainer.heard == ["losses", "check 2.5"]


# ---- a hook that fails -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{}, {"continue_on_hook_error": False}])
def test_a_failing_hook_ends_the_run_unless_the_switches_say_otherwise(
    own_hooks: Path, given: dict[str, bool]
) -> None:
    trainer = quiet(hooks=HooksConfig(hook_classes=["own_hooks.failing.Broken"], **given).build())
    with pytest.raises(ValueError, match="broken on purpose"):
        trainer.fit(Net(), batches(3))
    assert trainer.status == "error"
    assert trainer.global_step == 1


@pytest.mark.parametrize(("log", "calls"), [(None, 3), (True, 3), (False, 1)])
def test_a_failing_hook_is_reported_each_time_or_once_as_the_switches_say(
    own_hooks: Path, log: bool | None, calls: int, caplog: pytest.LogCaptureFixture
) -> None:
    (hook,) = HooksConfig(
        hook_classes=["own_hooks.failing.Broken"], continue_on_hook_error=True, log_hook_errors=log
    ).build()
    trainer = quiet(hooks=[hook])
    with caplog.at_level(logging.WARNING, "hookline"):
        trainer.fit(Net(), batches(3))
    assert (trainer.status, trainer.global_step) == ("completed", 3)
    assert hook.calls == calls
    assert (
        sum("broken on purpose" in record.getMessage() + str(record.exc_info) for record in caplog.records)
        == calls
    )


# ---- every key counts --------------------------------------------------------------------------------------------


def test_every_option_of_the_trainer_is_read_by_its_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What checks the options does not count: an option that only is checked does nothing."""
    read: set[str] = set()

    def watched(self: Any, name: str) -> Any:
        file = sys._getframe(1).f_code.co_filename
        if not file.endswith(("run/options.py", "dataclasses.py", "<string>")):
            read.add(name)
        return object.__getattribute__(self, name)

    monkeypatch.setattr(Options, "__getattribute__", watched, raising=False)
    trainer = Trainer(max_epochs=2, gradient_clip_val=1.0, enable_progress_bar=False, on_save_error="warn")
    Path("file").touch()
    trainer.on("train_end", once=True)(lambda trainer: trainer.save_checkpoint("file/cannot be"))
    trainer.fit(Net(), batches(2), {"a": batches(1), "b": batches(1)})
    trainer.on("step_end", once=True)(
        lambda trainer: trainer.stop("a stop asks for the least number of epochs")
    )
    trainer.fit(Net(), batches(2), batches(1))
    trainer.test(Net(), batches(1))
    trainer.predict(Net(), batches(1))
    parsed = {
        "grace_period": "grace_seconds",
        "hang_after": "hangs",
        "checkpoint": "saving",
        "evaluation": "evaluating",
    }
    assert {parsed.get(each.name, each.name) for each in fields(Options)} - read == set()


# ---- named built-ins ---------------------------------------------------------------------------------------------


def test_the_three_named_built_ins_are_added_listed_and_taken_out_by_their_names() -> None:
    trainer = quiet(run_dir="run")
    trainer.add_console_logging(log_every_n_batches=10)
    trainer.add_json_logging(log_every_n_batches=100)
    trainer.add_checkpointing(save_every_n_epochs=1)
    assert trainer.hooks.list_hooks() == ["console_log", "json_log", "checkpoint"]
    trainer.disable_hook("console_log")
    assert trainer.hooks.list_hooks() == ["json_log", "checkpoint"]
    trainer.remove_hook("json_log")
    trainer.fit(Net(), batches(1))
    assert names("run") == ["checkpoints", "run.json"]


def test_checkpointing_saves_every_so_many_epochs() -> None:
    trainer = quiet(max_epochs=5, run_dir="run", checkpoint=True)
    trainer.add_checkpointing(save_every_n_epochs=2, save_top_k=-1)
    trainer.fit(Net(), batches(2))
    assert names() == ["epoch=1-step=4", "epoch=3-step=8", "last"]


# ---- early stops and checkpoints ---------------------------------------------------------------------------------


class Closed(Logger):
    """Remembers whether it was closed."""

    closed = False

    def close(self) -> None:
        self.closed = True


def test_an_early_stop_is_an_ordinary_end_with_its_last_checkpoint_and_its_loggers_closed() -> None:
    ends: list[str] = []
    log, keep = Closed(), ModelCheckpoint("val/loss", save_last=True)
    trainer = quiet(
        max_epochs=20, run_dir="run", logger=log, hooks=[EarlyStopping("val/loss", patience=1), keep]
    )
    trainer.on("train_end")(lambda status: ends.append(status))
    trainer.fit(Coder(), batches(2), batches(1))
    assert trainer.status == "stopped"
    assert len(ends) == 1
    assert log.closed
    counters = json.loads(Path(keep.last_model_path, "state.json").read_text())["counters"]
    assert counters["step"] == trainer.global_step == 6  # losses 3, 1, 2


class Noisy(Net):
    """Its training depends on random numbers and on a schedule."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(F.dropout(self.layer(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        }


class Scores(Hook):
    """Measures something of its own at each validation, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def on_validation_end(self, module: Module) -> None:
        self.count += 1
        module.log("own/score", float([3.0, 1.0, 2.0, 0.5][self.count - 1]))

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


@pytest.mark.parametrize("checkpoint_first", [True, False])
def test_a_kept_checkpoint_holds_everything_whatever_the_order_of_the_hooks(checkpoint_first: bool) -> None:
    def run(folder: str, epochs: int, resume: str | None = None) -> tuple[Noisy, ModelCheckpoint, Scores]:
        torch.manual_seed(1)
        module, keep, scores = (
            Noisy(),
            ModelCheckpoint("own/score", filename="s{step}", auto_insert_metric_name=False),
            Scores(),
        )
        hooks = [keep, scores] if checkpoint_first else [scores, keep]
        quiet(max_epochs=epochs, run_dir=folder, hooks=hooks, checkpoint=True).fit(
            module, batches(2), batches(1), resume=resume
        )
        return module, keep, scores

    whole, _, _ = run("whole", 4)
    _, first, _ = run("first", 2)
    assert names("first/checkpoints") == ["last", "s4"]
    assert (first.best_model_score, first.best_model_path) == (1.0, "first/checkpoints/s4")
    torch.rand(100)  # the random stream is somewhere else by now
    module, keep, scores = run("second", 4, first.best_model_path)
    assert torch.equal(module.layer.weight, whole.layer.weight)
    assert scores.count == 4
    assert (keep.best_model_score, names("second/checkpoints")) == (0.5, ["last", "s8"])
