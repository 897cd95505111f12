"""What Lightning refuses, warns about and logs: the same errors and warnings come from the dialect's trainer."""

from __future__ import annotations

import http.server
import logging
import signal
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    EarlyStopping,
    ModelCheckpoint,
    OnExceptionCheckpoint,
)
from lightning.pytorch.demos.boring_classes import BoringModel, RandomIterableDataset
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.trainer.states import TrainerFn, TrainerState, TrainerStatus
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from torch.utils.data import DataLoader

from hookline.interop import lightning as dialect

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}
ADVICE = (
    "lightning.pytorch.utilities.warnings.PossibleUserWarning",
    "FutureWarning",  # of torch's own pytree, which Lightning uses
    ".*IterableDataset",
    ".*not empty",
    ".*batch indices",
    ".*dirpath has changed",
    ".*of the previous `fit` call",
    ".*requested to overfit",
)
pytestmark = [
    pytest.mark.filterwarnings(f"ignore{'::' if each.endswith('Warning') else ':'}{each}") for each in ADVICE
]


@pytest.fixture(params=[pl.Trainer, dialect.Trainer], ids=["theirs", "ours"])
def kind(request: Any, tmp_path: Path, monkeypatch: Any) -> Any:
    monkeypatch.chdir(tmp_path)
    return request.param


@pytest.fixture
def said(caplog: Any) -> Any:
    """What is logged; other tests may have silenced Lightning."""
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.INFO, logger="lightning.pytorch")
    return caplog


def short(kind: Any, **options: Any) -> Any:
    given = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1, **QUIET}
    return kind(**{**given, **options})


def without(name: str) -> BoringModel:
    model = BoringModel()
    setattr(model, name, None)
    return model


# ---- arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"max_epochs": -2}, MisconfigurationException, "`max_epochs` must be a non-negative integer or -1"),
        ({"max_steps": -2}, MisconfigurationException, "`max_steps` must be a non-negative integer or -1"),
        ({"gradient_clip_val": (1, 2)}, TypeError, "`gradient_clip_val` should be an int or a float"),
        (
            {"gradient_clip_algorithm": "norm2"},
            MisconfigurationException,
            "`gradient_clip_algorithm` norm2 is invalid",
        ),
        ({"check_val_every_n_epoch": 1.2}, MisconfigurationException, "should be an integer"),
        (
            {"check_val_every_n_epoch": None, "val_check_interval": 0.5},
            MisconfigurationException,
            "`val_check_interval` should be an integer or a time-based duration",
        ),
        ({"accelerator": "abacus"}, ValueError, "invalid accelerator name: `accelerator='abacus'`"),
        ({"accelerator": "cuda"}, MisconfigurationException, "`CUDAAccelerator` can not run on your system"),
        ({"accelerator": "gpu"}, MisconfigurationException, "No supported gpu backend found"),
        ({"strategy": "dp"}, ValueError, "You selected an invalid strategy name: `strategy='dp'`"),
        ({"barebones": True, "profiler": "simple"}, ValueError, r"profiler='simple'\)` was passed"),
        (
            {"plugins": [LightningEnvironment(), TorchElasticEnvironment()]},
            MisconfigurationException,
            "Received multiple values for ClusterEnvironment",
        ),
        ({"bananas": 3}, TypeError, r"__init__\(\) got an unexpected keyword argument 'bananas'"),
        (
            {"callbacks": [EarlyStopping("a"), EarlyStopping("a")]},
            RuntimeError,
            "Found more than one stateful callback of type `EarlyStopping`",
        ),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else None,
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is refused where there is none")
def test_wrong_arguments(kind: Any, given: dict[str, Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        kind(**given)


@pytest.mark.parametrize("value", [1, 1.0])
@pytest.mark.parametrize("name", ["limit_train_batches", "overfit_batches", "val_check_interval"])
def test_one_and_all_are_explained(kind: Any, name: str, value: Any, said: Any) -> None:
    kind(**QUIET)
    assert "was configured" not in said.text
    kind(**QUIET, **{name: value})
    assert f"`Trainer({name}={value})` was configured so" in said.text


def test_barebones_says_what_it_switches_off(kind: Any, said: Any) -> None:
    kind(barebones=True)
    assert "running in `Trainer(barebones=True)` mode" in said.text


def test_a_new_trainer_is_in_the_first_state(kind: Any) -> None:
    trainer = short(kind)
    first = TrainerState(status=TrainerStatus.INITIALIZING, fn=None, stage=None)
    assert trainer.state == first
    trainer.state.fn = TrainerFn.TESTING
    assert trainer.state.fn == "test"
    assert trainer.state != first


# ---- modules -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_any_other_module_is_a_type_error(kind: Any, stage: str) -> None:
    with pytest.raises(TypeError, match="must be a `LightningModule`.*got `Linear"):
        getattr(short(kind), stage)(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_no_module_at_all(kind: Any, stage: str) -> None:
    with pytest.raises(TypeError, match=rf"{stage}\(\)` requires a `LightningModule"):
        getattr(short(kind), stage)()


@pytest.mark.parametrize(
    ("stage", "method", "words"),
    [
        ("fit", "training_step", r"No `training_step\(\)` method defined"),
        ("fit", "configure_optimizers", r"No `configure_optimizers\(\)` method defined"),
        ("validate", "validation_step", r"No `validation_step\(\)` method defined"),
        ("test", "test_step", r"No `test_step\(\)` method defined"),
        ("predict", "predict_step", "`predict_step` cannot be None"),
        ("predict", "forward", "requires `forward` method to run"),
    ],
)
def test_a_module_without_a_method(kind: Any, stage: str, method: str, words: str) -> None:
    with pytest.raises(MisconfigurationException, match=words):
        getattr(short(kind), stage)(without(method))


def test_validation_without_data_or_step_is_a_warning(kind: Any) -> None:
    with pytest.warns(UserWarning, match="`val_dataloader` but have no `validation_step`"):
        short(kind).fit(without("validation_step"))
    with pytest.warns(PossibleUserWarning, match="`validation_step` but have no `val_dataloader`"):
        short(kind).fit(without("val_dataloader"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gradient_clip_val": 1.0}, "Automatic gradient clipping is not supported"),
        ({"accumulate_grad_batches": 2}, "Automatic gradient accumulation is not supported"),
    ],
)
def test_options_of_the_automatic_update(kind: Any, given: dict[str, Any], words: str) -> None:
    model = BoringModel()
    model.automatic_optimization = False
    with pytest.raises(MisconfigurationException, match=words):
        short(kind, **given).fit(model)


def test_hooks_of_lightning_1_are_refused(kind: Any) -> None:
    class Old(BoringModel):
        def training_epoch_end(self, outputs: Any) -> None:
            pass

    with pytest.raises(NotImplementedError, match="training_epoch_end` has been removed in v2.0"):
        short(kind).fit(Old())


def test_no_optimizer_is_a_warning(kind: Any) -> None:
    class Untrained(BoringModel):
        def configure_optimizers(self) -> None:
            return None

    model = Untrained()
    before = model.layer.weight.clone()
    trainer = short(kind, enable_checkpointing=False)
    with pytest.warns(UserWarning, match="configure_optimizers` returned `None`"):
        trainer.fit(model)
    assert torch.equal(before, model.layer.weight)
    assert trainer.global_step == 2


def test_the_step_of_an_optimizer_encloses_training_step(kind: Any) -> None:
    calls: list[str] = []

    class Recorded(torch.optim.SGD):
        def step(self, *args: Any, **kwargs: Any) -> Any:
            calls.append("step")
            return super().step(*args, **kwargs)

        def zero_grad(self, *args: Any, **kwargs: Any) -> None:
            calls.append("zero_grad")
            super().zero_grad(*args, **kwargs)

    class Model(BoringModel):
        def configure_optimizers(self) -> Any:
            return Recorded(self.parameters(), lr=0.1)

        def training_step(self, *args: Any) -> Any:
            calls.append("training_step")
            return super().training_step(*args)

    short(kind, limit_train_batches=3, limit_val_batches=0, accumulate_grad_batches=2).fit(Model())
    last = ["step", "training_step"]
    assert calls == ["training_step", "zero_grad", *last, "step", "training_step", "zero_grad"]


# ---- runs --------------------------------------------------------------------------------------------------


def test_no_limit_is_a_warning(kind: Any) -> None:
    class Stop(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.should_stop = True

    trainer = short(kind, max_epochs=None, callbacks=Stop())
    with pytest.warns(PossibleUserWarning, match="`max_epochs` was not set. Setting it to 1000 epochs"):
        trainer.fit(BoringModel())
    assert trainer.max_epochs == 1000


def test_an_early_stop_that_has_to_wait(kind: Any, said: Any) -> None:
    class Stop(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.should_stop = True

    trainer = short(kind, max_epochs=5, min_epochs=3, callbacks=Stop())
    trainer.fit(BoringModel())
    assert trainer.current_epoch == 3
    assert said.text.count("min_epochs=3` or `min_steps=None` has not been met. Training will continue") == 1


def test_shuffled_data_is_read_in_order_to_overfit(kind: Any) -> None:
    model = BoringModel()
    data = DataLoader(torch.arange(4.0)[:, None].expand(4, 32), shuffle=True)
    with pytest.warns(
        UserWarning, match="requested to overfit but enabled train dataloader shuffling"
    ) as found:
        trainer = short(kind, overfit_batches=2)
        trainer.fit(model, data, data)
    assert {each.category for each in found if "to overfit" in str(each.message)} == {UserWarning}
    assert [batch[0, 0].item() for batch in trainer.train_dataloader] == [0, 1, 2, 3]
    assert [batch[0, 0].item() for batch in trainer.val_dataloaders] == [0, 1, 2, 3]


def test_an_interval_that_is_never_reached(kind: Any) -> None:
    with pytest.raises(ValueError, match="must be less than or equal to the number of the training batches"):
        short(kind, val_check_interval=3).fit(BoringModel())


def test_a_prediction_without_a_result(kind: Any) -> None:
    class Forgetful(BoringModel):
        def predict_step(self, *args: Any) -> None:
            return None

    with pytest.warns(UserWarning, match="predict returned None"):
        short(kind).predict(Forgetful(), DataLoader(torch.ones(2, 32)))


def test_a_prediction_writer_gets_no_indices_of_a_stream(kind: Any) -> None:
    got: list[Any] = []

    class Writer(BasePredictionWriter):
        def write_on_batch_end(
            self, trainer: Any, pl_module: Any, prediction: Any, indices: Any, *_: Any
        ) -> None:
            got.append(indices)

    short(kind, callbacks=Writer("batch")).predict(BoringModel(), DataLoader(RandomIterableDataset(32, 2)))
    assert not any(got)
    assert len(got) == 2


def test_an_error_counts_as_interrupted(kind: Any) -> None:
    class Failing(BoringModel):
        def on_test_start(self) -> None:
            raise ArithmeticError

    trainer = short(kind)
    with pytest.raises(ArithmeticError):
        trainer.test(Failing())
    assert trainer.interrupted


def test_a_termination_signal(kind: Any) -> None:
    class Terminated(BoringModel):
        def training_step(self, *args: Any) -> Any:
            signal.raise_signal(signal.SIGTERM)
            return super().training_step(*args)

    trainer = short(kind, enable_checkpointing=False)
    with pytest.raises(SIGTERMException) as caught:
        trainer.fit(Terminated())
    assert trainer.received_sigterm
    if kind is dialect.Trainer:
        assert caught.value.code == 143  # also if Lightning's own exception ends with 0


# ---- checkpoints -------------------------------------------------------------------------------------------


def test_nothing_to_save_yet(kind: Any) -> None:
    with pytest.raises(AttributeError, match="Saving a checkpoint is only possible if a model is attached"):
        short(kind).save_checkpoint("x.ckpt")


def test_paths_that_are_chosen_are_warnings(kind: Any) -> None:
    saving = ModelCheckpoint()
    trainer = short(kind, callbacks=saving)
    trainer.fit(BoringModel())
    with pytest.warns(UserWarning, match="The best model of the previous `fit` call will be used"):
        trainer.validate()
    assert trainer.ckpt_path == saving.best_model_path
    with pytest.warns(UserWarning, match="No checkpoint will be loaded"):
        trainer.validate(ckpt_path="last")
    assert trainer.ckpt_path is None


def test_paths_that_do_not_exist(kind: Any) -> None:
    trainer = short(kind, enable_checkpointing=False)
    with pytest.raises(ValueError, match="`ModelCheckpoint` is not configured"):
        trainer.test(BoringModel(), ckpt_path="best")
    trainer = short(kind, callbacks=ModelCheckpoint(save_top_k=0))
    with pytest.raises(ValueError, match="is not configured to save the best"):
        trainer.test(BoringModel(), ckpt_path="best")
    with pytest.raises(ValueError, match=r"with `fast_dev_run=True`. .* pass an exact checkpoint path"):
        short(kind, fast_dev_run=True).test(BoringModel(), ckpt_path="best")


def test_only_weights_cannot_be_resumed(kind: Any) -> None:
    trainer = short(kind)
    trainer.fit(BoringModel())
    trainer.save_checkpoint("weights.ckpt", weights_only=True)
    with pytest.raises(KeyError, match="checkpoint contains only the model"):
        short(kind, max_epochs=2).fit(BoringModel(), ckpt_path="weights.ckpt")


def test_callbacks_that_are_missing(kind: Any) -> None:
    class Counting(pl.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"count": 1}

    saving = ModelCheckpoint()
    short(kind, callbacks=[saving, Counting()]).fit(BoringModel())
    with pytest.warns(UserWarning, match="Counting"):
        short(kind, max_epochs=2).fit(BoringModel(), ckpt_path=saving.best_model_path)


def test_a_failed_fit_is_resumed_by_default(kind: Any, tmp_path: Path) -> None:
    class Failing(BoringModel):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                raise ArithmeticError

    def trainer() -> Any:
        return short(kind, max_epochs=2, callbacks=OnExceptionCheckpoint(tmp_path))

    with pytest.warns(UserWarning, match="No checkpoint will be loaded"), pytest.raises(ArithmeticError):
        trainer().fit(Failing())
    second = trainer()
    with pytest.warns(UserWarning, match="The last model of the previous `fit`"):
        second.fit(BoringModel())
    assert second.ckpt_path == str(tmp_path / "on_exception.ckpt")


def test_callbacks_of_the_module_replace_those_of_the_trainer(kind: Any, said: Any) -> None:
    class Model(BoringModel):
        def configure_callbacks(self) -> Any:
            return [ModelCheckpoint(every_n_epochs=2)]

    short(kind, callbacks=[ModelCheckpoint()]).fit(Model())
    assert "existing callbacks passed to Trainer: ModelCheckpoint" in said.text


class Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *given: Any) -> None:
        """Nothing on the terminal."""


def test_a_fit_resumes_from_a_file_behind_a_url(kind: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    first = short(kind, callbacks=ModelCheckpoint(tmp_path, "first"))
    first.fit(BoringModel())
    second = short(kind, max_epochs=2, callbacks=ModelCheckpoint(tmp_path / "second"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Silent) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/first.ckpt"
        second.fit(BoringModel(), ckpt_path=url)
        server.shutdown()
    assert second.global_step == 4
    assert second.ckpt_path == url
