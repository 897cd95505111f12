"""Programs as people have them for Lightning: what their callbacks see, log, keep and bring is what Lightning shows them."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, ModelSummary
from tiny import quiet
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

import hookline
from hookline import load_module
from hookline.cli import main
from hookline.hooks import HParams

pytestmark = [pytest.mark.filterwarnings("ignore")]  # Lightning's own advice
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def loader(samples: int, size: int, seed: int) -> Any:
    draw = torch.Generator().manual_seed(seed)
    data = TensorDataset(torch.randn(samples, 4, generator=draw), torch.randn(samples, 2, generator=draw))
    return DataLoader(data, batch_size=size)


class Model(pl.LightningModule):
    """A regression with hyper-parameters and metric objects."""

    def __init__(self, lr: float = 0.1, width: int = 2, shape: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(4, width)
        self.size = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.mse_loss(self.layer(batch[0]), batch[1])
        self.size(loss.detach())
        self.log("size", self.size, on_step=True, on_epoch=True)
        self.log("size_again", self.size, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self.layer(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])


class Looks(pl.Callback):
    """Writes down what it sees of the trainer."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def look(self, where: str, trainer: Any) -> None:
        sizes = {
            name: round(float(value), 5) for name, value in trainer.callback_metrics.items() if "size" in name
        }
        self.seen.append(
            (
                where,
                trainer.current_epoch,
                trainer.is_last_batch,
                trainer.validating,
                trainer.evaluating,
                sizes,
            )
        )

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.look("validation batch", trainer)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.look("batch", trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.look("epoch", trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.look("end", trainer)


def both(
    make: Callable[[], pl.Callback], model: Callable[[], Any] = Model, **options: Any
) -> tuple[Any, Any]:
    """A callback of each, after the same training by Lightning's trainer and by ours."""
    first, second = make(), make()
    theirs, ours = model(), model()
    ours.load_state_dict(theirs.state_dict())
    pl.Trainer(
        callbacks=[first],
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        **options,
    ).fit(theirs, loader(12, 5, 1), loader(7, 3, 2))
    quiet(hooks=[second], max_epochs=3, num_sanity_val_steps=2, **options).fit(
        ours, loader(12, 5, 1), loader(7, 3, 2)
    )
    return first, second


@pytest.mark.parametrize(
    "options", [{}, {"val_check_interval": 2}, {"max_steps": 4}, {"accumulate_grad_batches": 3}], ids=str
)
def test_what_a_callback_sees_of_the_run_is_what_lightning_shows(options: dict[str, Any]) -> None:
    theirs, ours = both(Looks, **options)
    assert ours.seen == theirs.seen and {each[0] for each in ours.seen} == {
        "validation batch",
        "batch",
        "epoch",
        "end",
    }


def test_a_metric_object_logged_under_two_names_is_the_same_under_both() -> None:
    _, ours = both(Looks)
    sizes = ours.seen[-1][-1]
    assert sizes["size"] == sizes["size_epoch"] == sizes["size_again"] != 0


def test_a_metric_object_that_was_only_updated_has_an_epochs_value() -> None:
    class Updates(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.size.update(float(batch_idx))
            self.log("size", self.size, on_step=True, on_epoch=True)
            return F.mse_loss(self.layer(batch[0]), batch[1])

    trainer = quiet(max_epochs=1)
    trainer.fit(Updates(), loader(9, 3, 1))
    assert trainer.metrics["size_epoch"] == 1.0


def test_hyper_parameters_of_module_and_data_reach_the_loggers() -> None:
    class Data(pl.LightningDataModule):
        def __init__(self, size: int = 5) -> None:
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            return loader(12, self.hparams["size"], 1)

    trainer = hookline.Trainer(max_epochs=1, enable_progress_bar=False, run_dir="run", device="cpu")
    trainer.fit(Model(lr=0.3, shape=nn.ReLU()), datamodule=Data())
    records = [json.loads(line) for line in Path("run/log.jsonl").read_text().splitlines()]
    assert {"lr": 0.3, "width": 2, "shape": "ReLU()", "size": 5} in [
        each["params"] for each in records if each["type"] == "hyperparams"
    ]


def test_hyper_parameters_that_are_not_to_be_logged_are_not() -> None:
    class Silent(Model):
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__()
            self.save_hyperparameters(logger=False)

    trainer = hookline.Trainer(max_epochs=1, enable_progress_bar=False, run_dir="run", device="cpu")
    trainer.fit(Silent(), loader(12, 5, 1))
    assert Path("run/log.jsonl").read_text().count('"hyperparams"') == 1  # the trainer's own options


def test_a_module_is_made_again_from_what_model_checkpoint_has_written() -> None:
    class Told(Model):
        def on_load_checkpoint(self, saved: Any) -> None:
            self.told = sorted(saved["state_dict"])

    best = ModelCheckpoint(monitor="val_loss")
    module = Told(lr=0.3, width=2)
    quiet(hooks=[best], max_epochs=1).fit(module, loader(12, 5, 1), loader(7, 3, 2))
    again = load_module(Told, best.best_model_path)
    assert dict(again.hparams) == {"lr": 0.3, "width": 2, "shape": None} and again.told == [
        "layer.bias",
        "layer.weight",
    ]
    assert torch.equal(again.layer.weight, module.layer.weight)


def test_callbacks_that_the_module_brings_take_the_place_of_the_trainers_own() -> None:
    class Patient(Model):
        def configure_callbacks(self) -> Any:
            return [EarlyStopping("val_loss", patience=10)]

    impatient = EarlyStopping("val_loss", patience=0, min_delta=100.0)
    other = Looks()
    trainer = quiet(hooks=[impatient, other], max_epochs=3)
    trainer.fit(Patient(), loader(12, 5, 1), loader(7, 3, 2))
    assert trainer.status == "completed" and trainer.state.epochs_seen == 3
    assert other.seen[-1][0] == "end"
    trainer.fit(Model(), loader(12, 5, 1), loader(7, 3, 2))  # which brings none
    assert trainer.status == "stopped" and list(trainer.hooks) == [impatient, other]


@pytest.mark.parametrize("verb", ["validate", "fit"])
def test_a_checkpoint_callback_makes_a_directory_only_where_it_writes(verb: str) -> None:
    trainer = quiet(hooks=[ModelCheckpoint(monitor="val_loss")], max_epochs=1, default_root_dir="root")
    trainer.validate(Model(), loader(7, 3, 2))
    assert not Path("root").exists()
    if verb == "fit":  # what the callback was told before is where the run is
        trainer.fit(Model(), loader(12, 5, 1), loader(7, 3, 2))
        assert [each.parent.parent for each in Path("root").rglob("*.ckpt")] == [trainer.run_dir]


def test_hooks_around_an_evaluation_make_no_graph() -> None:
    heard: list[bool] = []

    class Tries(Model):
        def on_validation_start(self) -> None:
            heard.append(torch.is_grad_enabled())

        def on_validation_epoch_end(self) -> None:
            heard.append(self.layer(torch.zeros(1, 4)).requires_grad)

        def on_predict_end(self) -> None:
            heard.append(torch.is_grad_enabled())

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch[0])

    trainer = quiet(max_epochs=1)
    trainer.fit(Tries(), loader(12, 5, 1), loader(7, 3, 2))
    trainer.predict(Tries(), loader(7, 3, 2))
    assert heard == [False, False, False]


def test_the_summary_of_a_module_with_an_example_input_is_written(caplog: pytest.LogCaptureFixture) -> None:
    class Example(Model):
        def __init__(self) -> None:
            super().__init__()
            self.example_input_array = torch.zeros(3, 4)

        def forward(self, x: Any) -> Any:
            return self.layer(x)

    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        quiet(hooks=[ModelSummary()], max_epochs=1).fit(Example(), loader(12, 5, 1))
    assert "[3, 4]" in caplog.text and "[3, 2]" in caplog.text


def test_how_a_run_is_has_lightnings_words_and_a_missing_part_of_it_is_named() -> None:
    class Asks(pl.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.heard = [str(trainer.state.status.value), trainer.state.finished, trainer.state.stopped]

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self.heard = [str(trainer.state.status.value), trainer.state.finished, trainer.state.stopped]

    class Fails(Model):
        def on_train_epoch_end(self) -> None:
            raise ValueError("mine")

    for model, heard in ((Model, ["running", False, False]), (Fails, ["interrupted", False, True])):
        asks = Asks()
        with contextlib.suppress(ValueError):
            quiet(hooks=[asks], max_epochs=1).fit(model(), loader(12, 5, 1))
        assert asks.heard == heard

    class Wrong(pl.Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            print(trainer.state.stagee)

    with pytest.raises(
        hookline.HookError, match=r"trainer\.state\.stagee.*Did you mean 'stage'\? There are: finished, fn"
    ):
        hookline.Trainer(hooks=[Wrong()])


class Client(hookline.Logger):
    """A logger with a client, as that of W&B has."""

    def __init__(self) -> None:
        self.logged: list[Any] = []

    def log_metrics(self, metrics: Any, step: int, epoch: int) -> None:
        self.logged.append(dict(metrics))

    @property
    def client(self) -> Any:
        return self

    def log(self, what: Any) -> None:
        self.logged.append(what)


def test_the_logger_takes_what_lightnings_take_and_its_experiment_is_the_client() -> None:
    class Logs(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.logger.log_metrics({"a": torch.tensor(1.0)})
            trainer.logger.log_graph(pl_module)
            trainer.logger.save()
            trainer.logger.finalize("success")
            trainer.logger.experiment.log({"b": 2})
            with pytest.raises(AttributeError, match=r"trainer\.logger\.log_image.*There are: .*log_metrics"):
                trainer.logger.log_image(key="x", images=[])
            with pytest.raises(AttributeError, match=r"trainer\.logger\.experiment\.watch"):
                trainer.logger.experiment.watch(pl_module)

    client = Client()
    trainer = hookline.Trainer(
        hooks=[Logs()], logger=client, max_epochs=1, enable_progress_bar=False, device="cpu"
    )
    trainer.fit(Model(), loader(12, 5, 1))
    assert client.logged[:2] == [{"a": 1.0}, {"b": 2}]


def test_options_that_people_read_are_there() -> None:
    class Reads(pl.Callback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            self.read = (
                trainer.min_epochs,
                trainer.min_steps,
                trainer.limit_test_batches,
                trainer.overfit_batches,
                trainer.num_nodes,
                trainer.node_rank,
                trainer.device_ids,
                trainer.test_dataloaders,
            )
            with trainer.profiler.profile("mine"):
                pass

    reads = Reads()
    quiet(hooks=[reads], max_epochs=1, limit_test_batches=3).fit(Model(), loader(12, 5, 1))
    assert reads.read == (0, 0, 3, 0.0, 1, 0, [0], None)


def test_a_file_that_lightning_did_not_write_is_refused_with_what_can_be_done() -> None:
    Path("their.ckpt").write_bytes(b"")
    with pytest.raises(hookline.CheckpointError, match=r"their\.ckpt cannot be imported: .*incomplete"):
        quiet(max_epochs=1).fit(Model(), loader(12, 5, 1), resume="their.ckpt")
    torch.save({"weights": {"a": torch.zeros(1)}}, "weights.pt")
    with pytest.raises(hookline.CheckpointError, match=r"it has no state_dict.*import_checkpoint"):
        quiet(max_epochs=1).fit(Model(), loader(12, 5, 1), resume="weights.pt")


PARTS = """
import sys
import torch
import lightning.pytorch as pl
from test_lightning_users import Model, loader


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return loader(12, 5, 1)

    val_dataloader = train_dataloader


class Tells(pl.Callback):
    def __init__(self, word: str = "") -> None:
        self.word = word

    def on_train_end(self, trainer, pl_module):
        print(self.word, trainer.current_epoch, sorted(trainer.callback_metrics)[-1], file=sys.stderr)
"""
CONFIG = """
allow = ["test_lightning_users"]
module = "test_lightning_users.Model"
datamodule = "parts.Data"
trainer = {max_epochs = 2, enable_progress_bar = false, device = "cpu", run_dir = "run"}
[hooks.tells]
class_path = "parts.Tells"
word = "trained"
order = 7
[hooks.stop]
class_path = "lightning.pytorch.callbacks.EarlyStopping"
monitor = "val_loss"
"""


def test_modules_data_and_callbacks_of_lightning_come_from_a_configuration(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    Path("parts.py").write_text(PARTS)
    Path("run.toml").write_text(CONFIG)
    assert main(["fit", "run.toml", "--allow", "lightning"]) == 0
    assert "trained 2 val_loss" in capfd.readouterr().err


def test_a_callback_that_cannot_run_here_is_an_error_of_the_configuration(
    capfd: pytest.CaptureFixture[str],
) -> None:
    refused = '[hooks.finder]\nclass_path = "lightning.pytorch.callbacks.LearningRateFinder"\n'
    Path("run.toml").write_text('module = "torch.nn.Linear"\n' + refused)
    assert (
        main(["fit", "run.toml", "--allow", "lightning", "--module.in_features=4", "--module.out_features=2"])
        != 0
    )
    told = capfd.readouterr().err
    assert "hooks.finder" in told and "LearningRateFinder cannot run in Hookline" in told


def test_hyper_parameters_that_lightning_has_kept_are_those_of_the_hook(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Wide(pl.LightningModule):
        def __init__(self, width: int, note: str = "x") -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = nn.Linear(4, width)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    hook = HParams()
    quiet(hooks=[hook]).fit(Wide(3), [torch.ones(2, 4)])
    assert hook.params == {"width": 3, "note": "x"}
    assert "HParams" not in caplog.text
