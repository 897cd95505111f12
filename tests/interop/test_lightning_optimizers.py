"""Optimizers and schedulers of Lightning's modules: every test runs with Lightning's own trainer and with
Hookline's in its place.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel, ManualOptimBoringModel
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR

from hookline.interop import lightning as dialect

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Lightning's own advice
    pytest.mark.parametrize("kind", [pl.Trainer, dialect.Trainer], ids=["theirs", "ours"]),
]
OPTIONS: dict[str, Any] = {
    "max_epochs": 1,
    "limit_train_batches": 2,
    "limit_val_batches": 0,
    "logger": False,
    "enable_progress_bar": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
}


def fit(kind: Any, module: Any, **options: Any) -> Any:
    trainer = kind(**{**OPTIONS, **options})
    trainer.fit(module)
    return trainer


class Configured(BoringModel):
    """A module whose optimizers a function makes."""

    def __init__(self, configure: Callable[[Any], Any], automatic: bool = True) -> None:
        super().__init__()
        self.configure = configure
        self.automatic_optimization = automatic

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("loss", 1.0)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return self.configure(SGD(self.parameters(), lr=0.1))


class Custom:
    """A scheduler that is not torch's."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.seen: list[Any] = []

    def step(self, metric: Any) -> None:
        self.seen.append(float(metric))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


class Stateless:
    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        raise AssertionError


# ---- what configure_optimizers returns -----------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "number": (lambda o: 1, MisconfigurationException, "Unknown configuration for model optimizers"),
    "mixed": (lambda o: [{"optimizer": o}, o], MisconfigurationException, "Unknown configuration"),
    "two": (lambda o: (o, SGD([torch.zeros(1)], lr=0.1)), RuntimeError, "only supported with manual"),
    "plateau": (lambda o: ([o], [ReduceLROnPlateau(o)]), MisconfigurationException, "include a monitor"),
    "interval": (
        lambda o: ([o], [{"scheduler": StepLR(o, 1), "interval": "batch"}]),
        MisconfigurationException,
        '"interval" key',
    ),
    "empty": (lambda o: {"optimizer": o, "lr_scheduler": {}}, MisconfigurationException, 'key "scheduler"'),
    "other": (
        lambda o: ([o], [StepLR(SGD([torch.zeros(1)], lr=0.1), 1)]),
        MisconfigurationException,
        "wasn't returned",
    ),
    "stateless": (lambda o: ([o], [Stateless(o)]), TypeError, "`Stateless` is invalid"),
    "custom": (lambda o: ([o], [Custom(o)]), MisconfigurationException, "`Custom` doesn't follow"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_result_of_configure_optimizers_raises_lightnings_error(kind: Any, name: str) -> None:
    configure, error, text = WRONG[name]
    with pytest.raises(error, match=text):
        fit(kind, Configured(configure))


SUSPICIOUS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "key": (lambda o: {"optimizer": o, "foo": 1}, "unsupported keys in the optimizer"),
    "scheduler": (lambda o: ([o], [{"scheduler": StepLR(o, 1), "foo": 1}]), "unsupported keys in the lr"),
    "cycle": (lambda o: ([o], [{"scheduler": OneCycleLR(o, 0.1, total_steps=9)}]), "'interval': 'step'"),
    "strict": (
        lambda o: ([o], [{"scheduler": ReduceLROnPlateau(o), "monitor": "x", "strict": False}]),
        "conditioned on metric x which is not available but strict",
    ),
}


@pytest.mark.parametrize("name", SUSPICIOUS)
def test_a_suspicious_result_of_configure_optimizers_warns(kind: Any, name: str) -> None:
    configure, text = SUSPICIOUS[name]
    with pytest.warns(RuntimeWarning, match=text):
        assert fit(kind, Configured(configure)).global_step == 2


def test_a_strict_plateau_scheduler_without_its_metric_raises(kind: Any) -> None:
    module = Configured(
        lambda o: {"optimizer": o, "lr_scheduler": ReduceLROnPlateau(o), "monitor": "giraffe"}
    )
    with pytest.raises(
        MisconfigurationException, match=r"metric giraffe which is not available\. Avail.*loss"
    ):
        fit(kind, module)


def test_a_module_without_an_optimizer_trains_nothing(kind: Any) -> None:
    module = Configured(lambda optimizer: None)
    before = module.layer.weight.clone()
    with pytest.warns(UserWarning, match="will run with no optimizer"):
        trainer = fit(kind, module)
    assert trainer.global_step == 2
    assert torch.equal(before, module.layer.weight)
    assert module.layer.weight.grad is not None
    assert trainer.lr_scheduler_configs == []


def test_a_scheduler_is_shown_with_all_its_settings(kind: Any) -> None:
    module = Configured(lambda o: {"optimizer": o, "lr_scheduler": ReduceLROnPlateau(o), "monitor": "loss"})
    config = fit(kind, module).lr_scheduler_configs[0]
    assert config == LRSchedulerConfig(config.scheduler, monitor="loss", reduce_on_plateau=True)
    assert config != LRSchedulerConfig(config.scheduler, monitor="other", reduce_on_plateau=True)


def test_a_scheduler_of_the_user_gets_its_metric(kind: Any) -> None:
    class Module(Configured):
        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            scheduler.step(metric)

    module = Module(lambda o: ([o], [{"scheduler": Custom(o), "reduce_on_plateau": True, "monitor": "loss"}]))
    assert fit(kind, module).lr_scheduler_configs[0].scheduler.seen == [1.0]


@pytest.mark.parametrize("is_named", [True, False])
def test_in_manual_optimization_the_user_advances_any_scheduler(kind: Any, is_named: bool) -> None:
    def configure(optimizer: Any) -> Any:
        plateau = ReduceLROnPlateau(optimizer)
        return [optimizer], [{"scheduler": plateau, "monitor": "loss"} if is_named else plateau]

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer = fit(kind, Configured(configure, automatic=False))
    assert any("keys will be ignored" in str(each.message) for each in found) == is_named
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 0
    assert fit(kind, Configured(lambda o: ([o], [Custom(o)]), automatic=False)).global_step == 0


# ---- closures --------------------------------------------------------------------------------------------------


class Recording(SGD):
    calls: list[str]

    def step(self, closure: Any = None, **options: Any) -> Any:
        self.calls.append(f"step {sorted(options)}")
        result = super().step(closure)
        self.calls.append("end")
        return result


class Steps(BoringModel):
    """Records the calls around an update."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def configure_optimizers(self) -> Any:
        optimizer = Recording(self.parameters(), lr=0.1)
        optimizer.calls = self.calls
        return optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls.append("training_step")
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.calls.append(f"before {type(optimizer).__name__}")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.calls.append("zero_grad")


UPDATE = ["step []", "training_step", "zero_grad", "before Recording", "end"]


def test_the_optimizer_calls_training_step(kind: Any) -> None:
    module = Steps()
    fit(kind, module)
    assert module.calls == UPDATE * 2


def test_the_optimizer_of_an_accumulation_window_calls_its_last_training_step(kind: Any) -> None:
    module = Steps()
    fit(kind, module, accumulate_grad_batches=2)
    assert module.calls == [
        "training_step",
        "zero_grad",
        "step []",
        "training_step",
        "before Recording",
        "end",
    ]


@pytest.mark.parametrize("way", ["passed", "called", "skipped"])
def test_optimizer_step_gets_lightnings_optimizer(kind: Any, way: str) -> None:
    class Module(Steps):
        def optimizer_step(
            self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
        ) -> None:
            assert isinstance(optimizer, LightningOptimizer)
            if way == "passed":
                assert float(optimizer.step(closure=optimizer_closure)) > 0
                return
            optimizer_closure()
            if way == "called":
                optimizer.step()

    module = Module()
    fit(kind, module, limit_train_batches=1)
    closure = ["training_step", "zero_grad"]
    assert (
        module.calls
        == {"passed": UPDATE, "called": [*closure, "step []", "before Recording", "end"], "skipped": closure}[
            way
        ]
    )


def test_optimizer_step_updates_where_no_closure_is_possible(kind: Any) -> None:
    class Module(Steps):
        def optimizer_step(
            self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
        ) -> None:
            assert float(optimizer.step(closure=optimizer_closure)) > 0

    module, options = Module(), {"nonfinite": "skip"} if kind is dialect.Trainer else {}
    before = module.layer.weight.clone()
    assert fit(kind, module, limit_train_batches=1, **options).global_step == 1
    assert not torch.equal(before, module.layer.weight)


def test_an_optimizer_step_that_calls_no_closure_is_an_error(kind: Any) -> None:
    class Module(Steps):
        def optimizer_step(
            self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
        ) -> None:
            pass

    with pytest.raises(MisconfigurationException, match="The closure hasn't been executed"):
        fit(kind, Module())


def test_an_optimizer_that_recomputes_the_loss_accumulates(kind: Any) -> None:
    class Module(Configured):
        count = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.count += 1
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=1e-3, max_iter=3)

    module = Module(lambda optimizer: optimizer)
    trainer = fit(kind, module, limit_train_batches=4, accumulate_grad_batches=2)
    assert (trainer.global_step, module.count) == (2, 8)


def test_a_manual_step_takes_options_and_calls_its_closure_first(kind: Any) -> None:
    class Module(Steps):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer: Any = self.optimizers()

            def closure() -> Any:
                loss = self.step(batch)
                self.manual_backward(loss)
                self.calls.append("closure")
                return loss

            assert float(optimizer.step(closure=closure, extra=1)) > 0
            optimizer.zero_grad()

    module = Module()
    assert fit(kind, module, limit_train_batches=1).global_step == 1
    assert module.calls == ["step ['extra']", "closure", "before Recording", "end"]


# ---- around the update -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [None, "value"])
def test_the_users_clipping_gets_the_trainers_settings_by_name(kind: Any, algorithm: str | None) -> None:
    got = []

    class Module(BoringModel):
        def configure_gradient_clipping(  # type: ignore[override]
            self, optimizer: Any, *, gradient_clip_val: Any, gradient_clip_algorithm: Any
        ) -> None:
            got.append((gradient_clip_val, gradient_clip_algorithm, self.trainer.gradient_clip_algorithm))

    fit(kind, Module(), limit_train_batches=1, gradient_clip_val=0.5, gradient_clip_algorithm=algorithm)
    assert got == [(0.5, algorithm, algorithm)]


def test_another_algorithm_than_the_trainers_is_refused(kind: Any) -> None:
    class Module(BoringModel):
        def configure_gradient_clipping(self, optimizer: Any, *given: Any, **named: Any) -> None:
            self.clip_gradients(optimizer, gradient_clip_algorithm="value")

    with pytest.raises(MisconfigurationException, match="gradient_clip_algorithm='norm'"):
        fit(kind, Module(), gradient_clip_algorithm="norm")


def test_a_stage_begins_without_gradients(kind: Any) -> None:
    module = BoringModel()
    module(torch.ones(1, 32)).sum().backward()
    kind(**{**OPTIONS, "limit_test_batches": 1}).test(module, verbose=False)
    assert module.layer.weight.grad is None


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_a_module_that_is_not_lightnings_is_a_type_error(kind: Any, stage: str) -> None:
    with pytest.raises(TypeError, match="LightningModule"):
        getattr(kind(**OPTIONS), stage)(torch.nn.Linear(2, 2))


def test_an_argument_of_lightning_1_is_a_runtime_error(kind: Any) -> None:
    class Module(BoringModel):
        def training_step(self, batch: Any, batch_idx: int, optimizer_idx: int) -> Any:
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="Remove the `optimizer_idx` argument from `training_step`"):
        fit(kind, Module())


# ---- around the loop -------------------------------------------------------------------------------------------


def test_a_stage_forgets_the_metrics_of_the_last_one(kind: Any) -> None:
    class Module(BoringModel):
        def setup(self, stage: str) -> None:
            self.metric = torchmetrics.MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.metric(1.0)
            self.log("train", self.metric)
            return super().training_step(batch, batch_idx)

        def test_step(self, batch: Any, batch_idx: int) -> Any:
            self.metric(2.0)
            self.log("test", self.metric)

    module = Module()
    trainer = fit(kind, module, limit_test_batches=1)
    assert trainer.test(module, verbose=False) == [{"test": 2.0}]


def test_a_step_that_shortens_its_arguments_gets_the_loaders_index(kind: Any) -> None:
    class Module(BoringModel):
        def val_dataloader(self) -> Any:
            return [BoringModel.val_dataloader(self), BoringModel.val_dataloader(self)]

        def validation_step(self, *given: Any, **named: Any) -> Any:
            self.log(f"at_{given[-1]}", 1.0, add_dataloader_idx=False)
            return super().validation_step(*given[:-1], **named)

    trainer = fit(kind, Module(), limit_val_batches=1)
    assert {"at_0", "at_1"} <= set(trainer.callback_metrics)


def test_clearing_gradients_before_a_validation_cannot_log(kind: Any) -> None:
    class Module(BoringModel):
        def on_validation_model_zero_grad(self) -> None:
            super().on_validation_model_zero_grad()
            with pytest.raises(MisconfigurationException, match="You can't"):
                self.log("anything", 1)

    assert fit(kind, Module(), limit_val_batches=1).global_step == 2


def test_a_wrapper_around_lightnings_own_method_is_not_an_override(kind: Any) -> None:
    calls: list[str] = []

    def wrapped(owner: Any, name: str) -> None:
        method = getattr(owner, name)

        @functools.wraps(method)
        def call(*given: Any, **named: Any) -> Any:
            calls.append(name)
            return method(*given, **named)

        setattr(owner, name, call)

    module, data = BoringModel(), BoringDataModule()
    for name in ("prepare_data", "on_validation_model_train", "on_fit_start"):
        wrapped(module, name)
    for name in ("prepare_data", "on_before_batch_transfer", "setup"):
        wrapped(data, name)
    kind(**{**OPTIONS, "limit_val_batches": 1}).fit(module, datamodule=data)
    assert calls == ["setup", "on_fit_start"]


def test_a_fit_that_resumes_inside_an_epoch_does_not_start_it_again(kind: Any, tmp_path: Path) -> None:
    class Module(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[Any] = []

        def on_train_epoch_start(self) -> None:
            self.calls.append(self.current_epoch)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.calls.append((batch_idx, self.trainer.fit_loop.restarting))
            return super().training_step(batch, batch_idx)

    saving = {"enable_checkpointing": True, "default_root_dir": tmp_path, "limit_train_batches": 9}
    first = fit(kind, BoringModel(), max_epochs=-1, max_steps=1, **saving)
    module = Module()
    second = kind(**{**OPTIONS, "limit_train_batches": 9, "max_epochs": -1, "max_steps": 3})
    second.fit(module, ckpt_path=first.checkpoint_callback.best_model_path)
    assert module.calls == [(1, True), (2, True)]


def test_a_fit_that_resumes_after_a_whole_epoch_does_not_restart_one(kind: Any, tmp_path: Path) -> None:
    class Module(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[Any] = []

        def on_train_epoch_start(self) -> None:
            self.calls.append((self.current_epoch, self.trainer.fit_loop.restarting))

    saving = {"enable_checkpointing": True, "default_root_dir": tmp_path, "limit_train_batches": 2}
    first = fit(kind, BoringModel(), max_epochs=1, **saving)
    module = Module()
    second = kind(**{**OPTIONS, "limit_train_batches": 2, "max_epochs": 3})
    second.fit(module, ckpt_path=first.checkpoint_callback.best_model_path)
    assert module.calls == [(1, False), (2, False)]


class KeepsStill(SGD):
    """Does not call its closure."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


def test_a_manual_optimizer_that_does_not_call_its_closure_is_counted(kind: Any) -> None:
    class Module(ManualOptimBoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.optimizers().step(closure=lambda: None)  # type: ignore[union-attr]

        def configure_optimizers(self) -> Any:
            return KeepsStill(self.parameters(), lr=0.1)

    assert fit(kind, Module()).global_step == OPTIONS["limit_train_batches"]


def test_an_evaluation_of_a_checkpoint_shows_the_counts_of_the_last_fit(kind: Any, tmp_path: Path) -> None:
    seen = []

    class Module(BoringModel):
        def on_test_start(self) -> None:
            seen.append((self.trainer.current_epoch, self.trainer.global_step, bool(self.layer.bias[0] == 7)))

    class Saved(BoringModel):
        def on_train_end(self) -> None:
            self.layer.bias.data.fill_(7)

    path = tmp_path / "a.ckpt"
    fit(kind, Saved(), max_epochs=3).save_checkpoint(path)
    options = {**OPTIONS, "limit_test_batches": 1}
    kind(**options).test(Module(), ckpt_path=path, verbose=False)
    fitted = fit(kind, Module(), limit_test_batches=1)
    fitted.test(Module(), ckpt_path=path, verbose=False)
    assert seen == [(0, 0, True), (1, 2, True)]
    assert (fitted.current_epoch, fitted.global_step) == (1, 2)
