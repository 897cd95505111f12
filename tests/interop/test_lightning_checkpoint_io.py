"""A CheckpointIO of the user, what a resume warns of, and files that a resume reads, as in Lightning."""

from __future__ import annotations

import functools
import http.server
import logging
import threading
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.callbacks import StochasticWeightAveraging as Averaging
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import hookline
from hookline.interop.lightning import Trainer

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
BOTH = pytest.mark.parametrize("kind", [Trainer, pl.Trainer], ids=["hookline", "lightning"])


@pytest.fixture(autouse=True)
def _no_advice() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def make(kind: Any, *callbacks: Any, **options: Any) -> Any:
    return kind(
        **{
            "max_epochs": 2,
            "limit_train_batches": 2,
            "limit_val_batches": 0,
            "limit_test_batches": 1,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": bool(callbacks),
            "accelerator": "cpu",
            "callbacks": list(callbacks),
            "default_root_dir": "root",
            **options,
        }
    )


def warned(act: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [str(each.message) for each in caught if issubclass(each.category, UserWarning)]


# ---- plugins -----------------------------------------------------------------------------------------------------


class Memory(CheckpointIO):
    """Keeps checkpoints in a dictionary."""

    def __init__(self) -> None:
        self.files: dict[str, Any] = {}
        self.calls: list[tuple[Any, ...]] = []

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.calls.append(("save", Path(path).name, storage_options))
        torch.save(checkpoint, "copy.pt")
        self.files[str(path)] = torch.load("copy.pt", weights_only=True)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: Any = None) -> Any:
        self.calls.append(("load", Path(path).name, weights_only))
        return self.files[str(path)]

    def remove_checkpoint(self, path: Any) -> None:
        self.calls.append(("remove", Path(path).name))
        del self.files[str(path)]

    def teardown(self) -> None:
        self.calls.append(("teardown",))


@BOTH
@pytest.mark.parametrize("place", ["plugins", "strategy"])
def test_a_plugin_writes_reads_and_removes_all_checkpoints(kind: Any, place: str) -> None:
    memory = Memory()
    options: dict[str, Any] = (
        {"plugins": [memory]}
        if place == "plugins"
        else {"strategy": SingleDeviceStrategy("cpu", checkpoint_io=memory)}
    )
    keep = ModelCheckpoint(dirpath="kept", save_last=True)
    trainer, model = make(kind, keep, **options), BoringModel()
    trainer.fit(model)
    trainer.test(model, ckpt_path=keep.last_model_path, weights_only=True)
    assert memory.calls == [
        ("save", "epoch=0-step=2.ckpt", None),
        ("save", "last.ckpt", None),
        ("save", "epoch=1-step=4.ckpt", None),
        ("remove", "epoch=0-step=2.ckpt"),
        ("save", "last.ckpt", None),
        ("teardown",),
        ("load", "last.ckpt", True),
        ("teardown",),
    ]
    assert trainer.strategy.checkpoint_io is memory
    assert not list(Path().rglob("*.ckpt"))


@BOTH
def test_a_run_resumes_from_what_a_plugin_has_and_gets_the_options_of_a_save(kind: Any) -> None:
    memory = Memory()
    trainer = make(kind, plugins=[memory], max_epochs=1)
    trainer.fit(BoringModel())
    trainer.save_checkpoint("end.ckpt", storage_options={"bucket": 1})
    assert memory.calls[-1] == ("save", "end.ckpt", {"bucket": 1})
    again = make(kind, plugins=[memory], max_epochs=2)
    again.fit(BoringModel(), ckpt_path="end.ckpt")
    assert again.global_step == 4


@BOTH
def test_asynchronous_saves_are_complete_when_the_stage_is_over(kind: Any) -> None:
    plugin = AsyncCheckpointIO()
    keep = ModelCheckpoint(dirpath="kept", save_top_k=-1)
    trainer = make(kind, keep, plugins=[plugin], max_epochs=3)
    trainer.fit(BoringModel())
    assert isinstance(plugin.checkpoint_io, TorchCheckpointIO)
    assert [
        torch.load(each, weights_only=True)["global_step"] for each in sorted(Path("kept").iterdir())
    ] == [2, 4, 6]


@BOTH
def test_options_of_a_save_without_a_plugin_and_two_plugins_are_refused(kind: Any) -> None:
    trainer = make(kind, max_epochs=1)
    trainer.fit(BoringModel())
    with pytest.raises(TypeError, match="storage_options"):
        trainer.save_checkpoint("end.ckpt", storage_options={})
    strategy = SingleDeviceStrategy("cpu", checkpoint_io=Memory())
    with pytest.raises(MisconfigurationException, match="checkpoint_io.* set through both strategy"):
        make(kind, strategy=strategy, plugins=[Memory()])
    trainer.strategy.checkpoint_io = memory = Memory()
    trainer.save_checkpoint("end.ckpt", storage_options={})
    assert memory.calls == [("save", "end.ckpt", {})]


# ---- which file --------------------------------------------------------------------------------------------------


@BOTH
def test_the_choice_of_a_file_is_a_warning_that_programs_can_filter(kind: Any) -> None:
    trainer, model = (
        make(kind, ModelCheckpoint(dirpath="a"), ModelCheckpoint(dirpath="b", mode="max")),
        BoringModel(),
    )
    assert any(
        "no last checkpoint available" in each
        for each in warned(lambda: trainer.fit(model, ckpt_path="last"))
    )
    said = warned(lambda: trainer.test())
    assert any("best model of the previous `fit` call will be used" in each for each in said)
    assert any("multiple `ModelCheckpoint` callbacks" in each for each in said)
    trainer.ckpt_path = chosen = Path(trainer.checkpoint_callback.best_model_path)
    assert not any("ckpt_path" in each for each in warned(lambda: trainer.test(model)))
    assert trainer.ckpt_path == chosen
    said = warned(lambda: trainer.test(model, ckpt_path="best"))
    assert any("but then you passed" in each for each in said)
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found: nowhere.ckpt"):
        trainer.test(model, ckpt_path="nowhere.ckpt")


@BOTH
def test_a_job_of_slurm_continues_from_the_newest_file_of_its_directory(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, model = make(kind, max_epochs=1), BoringModel()
    trainer.fit(model)
    trainer.save_checkpoint("root/hpc_ckpt_2.ckpt")
    monkeypatch.setattr(SLURMEnvironment, "detect", staticmethod(lambda: True))
    again = make(kind, max_epochs=2, plugins=[LightningEnvironment()])
    again.fit(BoringModel())
    assert again.global_step == 4 and str(again.ckpt_path).endswith("hpc_ckpt_2.ckpt")


@BOTH
def test_a_fit_continues_from_what_was_saved_at_an_exception(kind: Any) -> None:
    class Fails(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_step == 3:
                raise RuntimeError("lost")
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="lost"):
        make(kind, OnExceptionCheckpoint("kept")).fit(Fails())
    again = make(kind, OnExceptionCheckpoint("kept"))
    again.fit(BoringModel())
    assert again.global_step == 4 and str(again.ckpt_path).endswith("on_exception.ckpt")


def test_a_file_behind_a_url_is_read() -> None:
    trainer = make(Trainer, max_epochs=1)
    trainer.fit(BoringModel())
    trainer.save_checkpoint("end.ckpt")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=".")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        again = make(Trainer, max_epochs=2)
        again.fit(BoringModel(), ckpt_path=f"http://127.0.0.1:{server.server_address[1]}/end.ckpt")
        server.shutdown()
    assert again.global_step == 4


# ---- what is restored --------------------------------------------------------------------------------------------


class Counted(Callback):
    """Has a state, under a key that is not text."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    @property
    def state_key(self) -> Any:
        return type(self)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


@BOTH
@pytest.mark.parametrize("every", [None, 4], ids=["epoch", "batch"])
def test_a_resumed_manual_optimization_continues_the_step_number_of_its_rows(kind: Any, every: Any) -> None:
    class Manual(BoringModel):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.step(batch))
                optimizer.step()
            self.log("x", 1.0)

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.parameters(), lr=0.01) for _ in range(2)]

    class Rows(CSVLogger):
        steps: list[int]

        def log_metrics(self, metrics: Any, step: Any = None) -> None:
            self.steps.append(step)

    steps: list[int] = []
    for epochs in (1, 2):
        logger = Rows("rows")
        logger.steps = steps
        keep = ModelCheckpoint(dirpath="a", save_last=True, every_n_train_steps=every)
        trainer = make(kind, keep, max_epochs=epochs, logger=logger, log_every_n_steps=1)
        trainer.fit(Manual(), ckpt_path="a/last.ckpt" if epochs == 2 else None)
    assert steps == [0, 1, 2, 3] and trainer.global_step == 8


@BOTH
def test_callbacks_that_are_missing_are_named(kind: Any) -> None:
    one, other = ModelCheckpoint(dirpath="a", save_last=True), ModelCheckpoint(dirpath="b", monitor="epoch")
    make(kind, one, other).fit(BoringModel())
    again = make(kind, ModelCheckpoint(dirpath="a", save_last=True))
    said = warned(lambda: again.fit(BoringModel(), ckpt_path=one.last_model_path))
    [line] = [each for each in said if "following callbacks" in each]
    assert f"Please add the following callbacks: [{other.state_key!r}]" in line
    again = make(
        kind, ModelCheckpoint(dirpath="b", monitor="epoch"), ModelCheckpoint(dirpath="a", save_last=True)
    )
    said = warned(lambda: again.fit(BoringModel(), ckpt_path=one.last_model_path))
    assert not any("following callbacks" in each for each in said)


@BOTH
def test_a_callback_whose_key_is_not_text_gets_its_state(kind: Any) -> None:
    trainer = make(kind, Counted(7))
    trainer.fit(BoringModel())
    trainer.save_checkpoint("end.ckpt")
    counted = Counted()
    make(kind, counted, max_epochs=3).fit(BoringModel(), ckpt_path="end.ckpt", weights_only=False)
    assert counted.count == 7


class Stepped(BoringModel):
    """Has a schedule, and may fail."""

    fails_in = 99

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.current_epoch == self.fails_in:
            raise RuntimeError("lost")
        return super().training_step(batch, batch_idx)


@BOTH
def test_a_run_whose_schedule_a_callback_has_replaced_is_resumed(kind: Any) -> None:
    def callbacks() -> list[Any]:
        return [Averaging(0.05, 2), ModelCheckpoint(dirpath="kept", save_last=True)]

    failing = Stepped()
    failing.fails_in = 3
    with pytest.raises(RuntimeError, match="lost"):
        make(kind, *callbacks(), max_epochs=5).fit(failing)
    again = make(kind, *callbacks(), max_epochs=5)
    again.fit(Stepped(), ckpt_path="kept/last.ckpt", weights_only=False)
    seen = [type(each.scheduler).__name__ for each in again.lr_scheduler_configs]
    assert seen == ["SWALR"] and again.current_epoch == 5


@BOTH
def test_optimizers_without_a_state_in_the_file_keep_their_own(kind: Any) -> None:
    model = BoringModel()
    file = {"state_dict": model.state_dict(), "optimizer_states": [], "lr_schedulers": []}
    torch.save({**file, "pytorch-lightning_version": pl.__version__}, "bare.ckpt")
    trainer = make(kind)
    trainer.fit(BoringModel(), ckpt_path="bare.ckpt")
    assert trainer.global_step == 4


class Numbers:
    """A loader that knows where it is."""

    def __init__(self) -> None:
        self.index = 0

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Any:
        for self.index in range(self.index, 10):
            yield torch.full((1, 32), float(self.index))

    def state_dict(self) -> dict[str, int]:
        return {"index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.index = state["index"] + 1


class Seeing(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(int(batch[0, 0]))
        return super().training_step(batch, batch_idx)


@BOTH
def test_the_file_has_the_state_of_loaders_that_know_their_position(kind: Any) -> None:
    trainer = make(kind, max_steps=2, max_epochs=-1, limit_train_batches=None)
    trainer.fit(Seeing(), Numbers())
    trainer.save_checkpoint("end.ckpt")
    loop = torch.load("end.ckpt", weights_only=True)["loops"]["fit_loop"]
    assert loop["state_dict"]["combined_loader"] == [{"index": 1}]
    model = Seeing()
    make(kind, max_steps=4, max_epochs=-1, limit_train_batches=None).fit(
        model, Numbers(), ckpt_path="end.ckpt"
    )
    assert model.seen == [2, 3]


def test_a_file_of_the_last_epoch_is_the_state_that_is_saved(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make(Trainer, ModelCheckpoint(dirpath="kept"), enable_progress_bar=True, logger=None)
    trainer.fit(BoringModel())
    said = capsys.readouterr().err
    assert "Model: " in said and "NOT saved" not in said
    assert trainer._own._last.saves.on_disk == trainer._own._last.stamp


# ---- losses that are not finite ----------------------------------------------------------------------------------


class Infinite(BoringModel):
    """Has one loss that is not a number."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)["loss"] * (torch.nan if batch_idx == 1 else 1)


@BOTH
def test_a_loss_that_is_not_finite_does_not_end_a_run_and_its_weights_are_saved(kind: Any) -> None:
    keep = ModelCheckpoint(dirpath="kept")
    trainer = make(kind, keep, limit_train_batches=4)
    trainer.fit(Infinite())
    assert trainer.global_step == 8
    assert torch.load(keep.best_model_path, weights_only=True)["state_dict"]["layer.weight"].isnan().all()


def test_a_loss_that_is_not_finite_is_logged_once_or_ends_the_run_if_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    make(Trainer, limit_train_batches=4).fit(Infinite())
    assert len([each for each in caplog.messages if "The loss became nan" in each]) == 1
    with pytest.raises(hookline.NonFiniteLoss):
        make(Trainer, limit_train_batches=4, nonfinite="stop").fit(Infinite())
