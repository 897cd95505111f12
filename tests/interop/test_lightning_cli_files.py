"""`hookline convert`: a file of LightningCLI becomes one of Hookline, with Lightning's real classes, and runs."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import preloaded
import pytest
import torch
import yaml
from interop.processes import environment
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping

from hookline import Trainer as HooklineTrainer
from hookline.cli import main

PARTS = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

class Regression(LightningModule):
    def __init__(self, width: int = 4, lr: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        return mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.hparams.lr)

class Sums(LightningDataModule):
    def __init__(self, size: int = 64):
        super().__init__()
        self.size = size

    def train_dataloader(self):
        inputs = torch.randn(self.size, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), 8)

    val_dataloader = train_dataloader
"""
DEFAULTS = {
    name: each.default
    for name, each in inspect.signature(Trainer.__init__).parameters.items()
    if name != "self" and each.kind is each.KEYWORD_ONLY
}
"""Every option of Lightning's trainer: LightningCLI saves all of them."""


def lightning_file(**sections: Any) -> dict[str, Any]:
    """A file as LightningCLI saves it, with these values in place of its defaults."""
    trainer = {
        **DEFAULTS,
        "accelerator": "cpu",
        "max_epochs": 3,
        "logger": False,
        **sections.pop("trainer", {}),
    }
    return {
        "seed_everything": 7,
        "trainer": trainer,
        "model": {"class_path": "cli_file_parts.Regression", "init_args": {"width": 8, "lr": 0.1}},
        "data": {"class_path": "cli_file_parts.Sums", "init_args": {"size": 32}},
        "ckpt_path": None,
        **sections,
    }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "cli_file_parts.py").write_text(PARTS)
    sys.modules.pop("cli_file_parts", None)
    yield tmp_path
    sys.modules.pop("cli_file_parts", None)


def convert(values: dict[str, Any], *words: str) -> Any:
    """Convert a file; return the result, or None if it is refused."""
    Path("lightning.yaml").write_text(yaml.safe_dump(values))
    code = main(["convert", "lightning.yaml", "--force", *words])
    assert code in (0, 2)
    return yaml.safe_load(Path("lightning.hookline.yaml").read_text()) if code == 0 else None


def test_options_at_lightnings_defaults_request_nothing(folder: Path) -> None:
    assert convert(lightning_file(trainer={"logger": None})) == {
        "module": {"class_path": "cli_file_parts.Regression", "init_args": {"width": 8, "lr": 0.1}},
        "datamodule": {"class_path": "cli_file_parts.Sums", "init_args": {"size": 32}},
        "trainer": {
            "device": "cpu",
            "max_epochs": 3,
            "fast_dev_run": False,
            "max_steps": -1,
            "overfit_batches": 0.0,
            "check_val_every_n_epoch": 1,
            "accumulate_grad_batches": 1,
            "seed": 7,
        },
    }


@pytest.mark.filterwarnings("ignore")
def test_a_converted_file_trains_as_lightning_does(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callbacks = [
        {"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {"monitor": "val_loss"}},
        {"class_path": "LambdaCallback"},
        {"class_path": "lightning.pytorch.callbacks.TQDMProgressBar", "init_args": {"refresh_rate": 5}},
    ]
    given = lightning_file(
        trainer={"callbacks": callbacks, "max_time": {"minutes": 9}, "gradient_clip_val": 1.0},
        optimizer={"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.02}},
        lr_scheduler={
            "class_path": "lightning.pytorch.cli.ReduceLROnPlateau",
            "init_args": {"monitor": "val_loss", "patience": 0, "threshold": 0.9},
        },
    )
    made = convert(given, "--allow", "lightning")
    assert list(made["hooks"]) == ["early_stopping", "lambda_callback", "progress_bar"]
    assert made["trainer"]["max_time"] == 540
    assert "Next: hookline fit lightning.hookline.yaml --allow lightning" in capsys.readouterr().out
    assert (
        main(
            ["fit", "lightning.hookline.yaml", "--allow", "lightning", "--json", "--hooks.progress_bar=false"]
        )
        == 0
    )
    ours = json.loads(capsys.readouterr().out.splitlines()[-1])

    parts = importlib.import_module("cli_file_parts")
    seed_everything(7)
    module, data = parts.Regression(width=8), parts.Sums(32)

    def configure_optimizers() -> Any:
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}

    module.configure_optimizers = configure_optimizers
    theirs = Trainer(
        accelerator="cpu",
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        gradient_clip_val=1.0,
        callbacks=[EarlyStopping("val_loss")],
    )
    theirs.fit(module, datamodule=data)
    assert ours["metrics"]["val_loss"] == pytest.approx(float(theirs.callback_metrics["val_loss"]), rel=1e-6)
    assert ours["step"] == theirs.global_step == 12


@pytest.mark.filterwarnings("ignore")
def test_a_program_that_passes_its_classes_names_them_on_the_command_line(folder: Path) -> None:
    given = lightning_file(model={"width": 6}, data={"size": 16}, seed_everything=True)
    words = ["--module", "cli_file_parts.Regression", "--datamodule", "cli_file_parts.Sums"]
    made = convert(given, *words)
    assert made["module"] == {"class_path": "cli_file_parts.Regression", "init_args": {"width": 6}}
    assert made["trainer"]["seed"] == 0
    assert main(["fit", "lightning.hookline.yaml"]) == 0


def test_sections_below_the_name_of_a_command_are_read(folder: Path) -> None:
    assert convert({"fit": lightning_file(), "seed_everything": 7}) == convert(lightning_file())


def test_all_problems_are_in_one_message_and_nothing_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = {
        "max_epocs": 3,
        "max_steps": "many",
        "accelerator": "tpu",
        "precision": "transformer-engine",
        "plugins": ["x"],
        "check_val_every_n_epoch": None,
        "logger": {"class_path": "lightning.pytorch.loggers.NeptuneLogger"},
        "callbacks": [
            {"class_path": "lightning.pytorch.callbacks.EarlyStopping", "init_args": {"monitr": "val_loss"}},
            {"class_path": "subprocess.Popen", "init_args": {"args": ["touch", "made"]}},
            {"class_path": "torch.nn.Linear"},
            3,
        ],
    }
    given = lightning_file(
        trainer=trainer,
        seed_everything="x",
        model={"class_path": "cli_file_parts.Regression", "init_args": {"widht": 8}},
        data={"class_path": "cli_file_parts.Regression"},
        optimizer={"class_path": "torch.optim.Adan"},
        lr_scheduler={"gamma": 0.1},
        ckpt_path="registry:old",
        purpose="docs",
    )
    assert convert(given, "--allow", "lightning") is None
    said = capsys.readouterr().err
    keys = [
        *(
            "trainer.max_epocs",
            "trainer.max_steps",
            "trainer.accelerator",
            "trainer.precision",
            "trainer.plugins",
        ),
        *("trainer.check_val_every_n_epoch", "trainer.logger", "trainer.callbacks[0].init_args.monitr"),
        *("trainer.callbacks[1].class_path", "trainer.callbacks[2].class_path", "trainer.callbacks[3]"),
        *(
            "seed_everything",
            "model.init_args.widht",
            "data.class_path",
            "optimizer.class_path",
            "lr_scheduler",
        ),
        *("ckpt_path", "purpose"),
    ]
    assert f"{len(keys)} problems, and nothing was written" in said
    assert [key for key in keys if f"\n  {key} = " not in said] == []
    assert "Did you mean 'max_epochs'?" in said and "Did you mean 'width'?" in said
    assert not Path("lightning.hookline.yaml").exists() and not Path("made").exists()


def test_several_devices_are_several_processes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(lightning_file(trainer={"devices": [0, 1], "strategy": "ddp", "num_nodes": 3}))
    assert (
        "Next: torchrun --nproc-per-node=2 --nnodes=3 -m hookline fit lightning.hookline.yaml\n"
        in capsys.readouterr().out
    )


def test_loggers_are_hooklines_with_the_arguments_that_both_have(folder: Path) -> None:
    loggers = [
        {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "logs"}},
        {
            "class_path": "lightning.pytorch.loggers.WandbLogger",
            "init_args": {"project": "sums", "save_dir": "."},
        },
    ]
    assert convert(lightning_file(trainer={"logger": loggers}))["loggers"] == {
        "csv": {"class_path": "hookline.loggers.CSV"},
        "wand_b": {"class_path": "hookline.loggers.WandB", "init_args": {"project": "sums"}},
    }


def test_a_checkpoint_is_named_as_hookline_names_it(folder: Path) -> None:
    assert convert(lightning_file(ckpt_path="last"))["checkpoint"] == "auto"
    for path in ("runs/a/checkpoints/last", "old.ckpt"):
        assert convert(lightning_file(ckpt_path=path))["checkpoint"] == path


def test_a_file_that_exists_is_replaced_on_request_only(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(lightning_file())
    assert main(["convert", "lightning.yaml"]) == 2
    assert "lightning.hookline.yaml: this file exists" in capsys.readouterr().err
    assert main(["convert", "lightning.yaml", "other.toml"]) == 2
    assert "name a .yaml file" in capsys.readouterr().err


def test_fit_with_the_unconverted_file_says_what_to_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert(lightning_file())
    assert main(["fit", "lightning.yaml"]) == 2
    assert "`hookline convert lightning.yaml` writes one of Hookline" in capsys.readouterr().err


CLI = """
from lightning.pytorch.cli import LightningCLI
cli = LightningCLI()
print(type(cli.trainer).__module__.partition(".")[0], float(cli.trainer.callback_metrics["val_loss"]))
"""


def test_a_program_with_lightnings_cli_gives_the_same_result_with_hooklines_trainer(folder: Path) -> None:
    for needed in ("docstring_parser", "typeshed_client"):
        pytest.importorskip(needed, reason="LightningCLI needs jsonargparse[signatures]")
    callbacks = [{"class_path": "EarlyStopping", "init_args": {"monitor": "val_loss"}}]
    given = lightning_file(
        trainer={
            "callbacks": callbacks,
            "logger": {"class_path": "CSVLogger", "init_args": {"save_dir": "."}},
        },
        optimizer={"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.02}},
        lr_scheduler={"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 1}},
    )
    Path("lightning.yaml").write_text(yaml.safe_dump(given))
    Path("program.py").write_text(CLI)
    words = ["program.py", "fit", "--config", "lightning.yaml"]
    said = []
    for start in ([], ["-m", "hookline", "run", "--as", "lightning"]):
        done = preloaded.run(
            [sys.executable, *start, *words], env=environment(), capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.splitlines()[-1].split())
    assert [who for who, _ in said] == ["lightning", "hookline"]
    assert said[0][1] == said[1][1]


def test_optimizers_that_are_put_on_the_module_as_lightnings_cli_does(folder: Path) -> None:
    module = importlib.import_module("cli_file_parts").Regression()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.3)

    def configure(lightning_module: Any, optimizer: Any) -> Any:
        return optimizer

    configured = functools.update_wrapper(functools.partial(configure, optimizer=optimizer), configure)
    module.configure_optimizers = types.MethodType(configured, module)
    trainer = HooklineTrainer(max_epochs=1, logger=False, enable_progress_bar=False, checkpoint=False)
    trainer.fit(module, datamodule=importlib.import_module("cli_file_parts").Sums(8))
    assert trainer.optimizers == [optimizer]
