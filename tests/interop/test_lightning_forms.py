"""Forms in which Lightning users write their modules and callbacks, compared with Lightning's own trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tiny import quiet
from torch.utils.data import DataLoader

from hookline import OptionError
from hookline.interop import lightning as dialect

pytestmark = [pytest.mark.filterwarnings("ignore")]  # Lightning's own advice
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

OPTIONS: dict[str, Any] = {
    "max_epochs": 1,
    "logger": False,
    "enable_progress_bar": False,
    "num_sanity_val_steps": 0,
}


def theirs(**options: Any) -> pl.Trainer:
    """Lightning's own trainer."""
    return pl.Trainer(
        **{**OPTIONS, "enable_checkpointing": False, "enable_model_summary": False, "accelerator": "cpu"},
        **options,
    )


def ours(**options: Any) -> Any:
    """The trainer of the dialect."""
    return dialect.Trainer(**{**OPTIONS, "enable_checkpointing": False, "accelerator": "cpu"}, **options)


def loader(batches: int = 1) -> Any:
    return DataLoader(torch.ones(batches, 32))


def loaders(number: int) -> Any:
    return loader() if number == 1 else [loader() for _ in range(number)]


Got = list[tuple[Any, ...]]


def recording(got: Got) -> Callable[..., Any]:
    """A decorator without functools.wraps."""

    def decorate(function: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            got.append((function.__name__, len(args) - 1, *kwargs))
            return function(*args, **kwargs)

        return wrapper

    return decorate


def decorated(base: Any, got: Got) -> Any:
    class Decorated(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(32, 2)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        @recording(got)
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch).sum()

        @recording(got)
        def validation_step(self, *args: Any) -> None: ...

        @recording(got)
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None: ...

        @recording(got)
        def on_validation_batch_end(self, *args: Any) -> None: ...

        def predict_step(self, *args: Any) -> Any:
            got.append(("predict_step", *args[1:]))

    return Decorated()


def watching(base: Any, got: Got) -> Any:
    class Watching(base):  # type: ignore[misc]
        @recording(got)
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None: ...

        def on_validation_batch_start(self, *args: Any) -> None:
            got.append(("on_validation_batch_start", *args[3:]))

        @recording(got)
        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None: ...

    return Watching()


@pytest.mark.parametrize("number", [1, 2], ids=["one loader", "two loaders"])
def test_star_args_and_decorators_without_wraps_get_lightnings_arguments(number: int) -> None:
    def calls(trainer: Callable[..., Any], module: Any, callback: Any) -> Got:
        got: Got = []
        made = trainer(callbacks=[watching(callback, got)])
        made.fit(decorated(module, got), loader(), loaders(number))
        made.predict(decorated(module, got), loaders(number))
        return [each if each[0] != "setup" else each[:1] for each in got]  # `stage` comes by keyword

    expected = calls(theirs, pl.LightningModule, pl.Callback)
    assert calls(ours, pl.LightningModule, pl.Callback) == expected
    assert calls(quiet, pl.LightningModule, pl.Callback) == expected
    assert calls(ours, dialect.LightningModule, dialect.Callback) == expected
    assert ("predict_step", 0, 0)[: number + 1] in expected


@pytest.mark.parametrize("trainer", [theirs, ours, quiet])
def test_a_default_of_the_loaders_index_stays_with_one_loader(trainer: Any) -> None:
    class Watching(pl.Callback):
        def on_validation_batch_end(
            self,
            trainer: Any,
            pl_module: Any,
            outputs: Any,
            batch: Any,
            batch_idx: int,
            dataloader_idx: Any = "one",
        ) -> None:
            got.append(dataloader_idx)

    got: list[Any] = []
    trainer(callbacks=[Watching()]).validate(BoringModel(), loader())
    assert got == ["one"]


@pytest.mark.parametrize("trainer", [theirs, ours, quiet])
@pytest.mark.parametrize("where", ["instance", "class"])
def test_a_step_that_is_none_is_switched_off(trainer: Any, where: str) -> None:
    class Off(BoringModel):
        def on_validation_start(self) -> None:
            got.append("validation")

    got: list[str] = []
    module = Off()
    for step in ("validation_step", "test_step", "on_train_start", "train_dataloader"):
        setattr(module if where == "instance" else Off, step, None)
    made = trainer()
    made.fit(module, loader(), loader())
    assert made.global_step == 1
    assert got == []
    with pytest.raises(Exception, match="test_step"):
        made.test(module, loader())
    module.training_step = None  # type: ignore[assignment,method-assign]
    with pytest.raises(Exception, match="training_step"):
        trainer().fit(module, loader())


def test_the_dialects_module_without_a_validation_step_ignores_validation_data() -> None:
    class Trains(dialect.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(32, 2)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    made = ours()
    made.fit(Trains(), loader(), loader())
    assert made.global_step == 1
    with pytest.raises(OptionError, match="has no validation_step"):
        made.validate(Trains(), loader())


@pytest.mark.parametrize("trainer", [theirs, ours, quiet])
def test_steps_may_take_an_iterator(trainer: Any) -> None:
    class Draws(BoringModel):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            batch, *where = next(dataloader_iter)
            got.append(("train", *where))
            return super().training_step(batch, 0)

        def validation_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            batch, *where = next(dataloader_iter)
            got.append(("val", *where))
            return super().validation_step(batch, 0)

    got: Got = []
    trainer().fit(Draws(), loader(2), loaders(2))
    assert got == [("train", 0, 0), ("train", 1, 0), ("val", 0, 0), ("val", 0, 1)]


@pytest.mark.parametrize("trainer", [theirs, ours])
@pytest.mark.parametrize("limit", [None, 2, 5])
def test_a_step_may_take_several_batches_from_its_iterator(trainer: Any, limit: int | None) -> None:
    class Draws(BoringModel):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            return super().training_step(self.two("train", dataloader_iter), 0)

        def validation_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            self.two("val", dataloader_iter)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            raise AssertionError("batches of an iterator are not moved")

        def two(self, stage: str, batches: Any) -> Any:
            first, second = next(batches), next(batches, (None, -1, -1))
            got.append((stage, first[1], second[1]))
            return first[0]

    got: Got = []
    made = trainer(limit_train_batches=limit, limit_val_batches=limit)
    made.fit(Draws(), loader(5), loader(4))
    steps = [("train", 0, 1)] if limit == 2 else [("train", 0, 1), ("train", 2, 3), ("train", 4, -1)]
    checks = [("val", 0, 1)] if limit == 2 else [("val", 0, 1), ("val", 2, 3)]
    assert got == [*steps, *checks]
    assert made.global_step == len(steps)


@pytest.mark.parametrize("trainer", [theirs, ours])
def test_a_step_may_end_the_epoch_through_its_iterator(trainer: Any) -> None:
    class Draws(BoringModel):
        automatic_optimization = False

        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            got.extend(each[1:] for each in dataloader_iter)
            next(dataloader_iter)

        def train_dataloader(self) -> Any:
            return iter(torch.ones(3, 1, 32))

    got: Got = []
    trainer(limit_val_batches=0).fit(Draws())
    assert got == [(0, 0), (1, 0), (2, 0)]


@pytest.mark.parametrize("trainer", [theirs, ours, quiet])
def test_a_module_may_clear_its_gradients_before_validation(trainer: Any) -> None:
    class Clears(BoringModel):
        def on_validation_model_zero_grad(self) -> None:
            got.append("clear")
            super().on_validation_model_zero_grad()

        def on_validation_model_eval(self) -> None:
            got.append("eval")
            super().on_validation_model_eval()

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            assert self.training
            got.append("batch")

    got: list[str] = []
    trainer(accumulate_grad_batches=2, val_check_interval=1).fit(Clears(), loader(2), loader())
    assert got == ["batch", "eval", "batch", "clear", "eval"]


# ---- steps, batches and schedulers of the loop -------------------------------------------------------------


both = pytest.mark.parametrize("trainer", [theirs, ours], ids=["lightning", "hookline"])


@both
def test_a_list_of_lists_of_numbers_is_one_loader_each(trainer: Any) -> None:
    class Echoes(BoringModel):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return batch, dataloader_idx

    assert trainer().predict(Echoes(), [[0, 1], [2, 3]]) == [[(0, 0), (1, 0)], [(2, 1), (3, 1)]]
    assert trainer().predict(Echoes(), [0, 1]) == [(0, 0), (1, 0)]


@both
def test_a_scheduler_of_an_optimizer_that_was_not_returned_is_an_error(trainer: Any) -> None:
    class Mixed(BoringModel):
        def configure_optimizers(self) -> Any:
            first, second = (torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2))
            return [first], [torch.optim.lr_scheduler.StepLR(second, 1)]

    with pytest.raises(MisconfigurationException, match="attached with an optimizer that wasn't returned"):
        trainer().fit(Mixed(), loader())


@both
@pytest.mark.parametrize("monitor", ["train", "val"])
def test_a_plateau_scheduler_advances_by_step_after_the_validation_of_the_step(
    trainer: Any, monitor: str
) -> None:
    class Plateau(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("train", float(batch_idx))
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", float(self.global_step))

        def configure_optimizers(self) -> Any:
            self.made = torch.optim.SGD(self.parameters(), lr=0.1)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.made, patience=1)
            schedule = {"scheduler": plateau, "monitor": monitor, "interval": "step", "frequency": 2}
            return {"optimizer": self.made, "lr_scheduler": schedule}

        def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
            got.append(float(metric))
            super().lr_scheduler_step(scheduler, metric)

    got: list[float] = []
    module = Plateau()
    trainer(val_check_interval=2).fit(module, loader(6), loader())
    assert got == {"train": [1.0, 3.0, 5.0], "val": [2.0, 4.0, 6.0]}[monitor]
    assert module.made.param_groups[0]["lr"] == pytest.approx(0.01)


@both
def test_reductions_may_be_written_in_capitals_and_as_functions(trainer: Any) -> None:
    class Reduces(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            for name, how in (("sum", "SUM"), ("top", max), ("low", "Min"), ("mean", torch.mean)):
                self.log(name, float(batch_idx), on_step=False, on_epoch=True, reduce_fx=how)
            return super().training_step(batch, batch_idx)

    made = trainer()
    made.fit(Reduces(), loader(3))
    found = {name: float(made.callback_metrics[name]) for name in ("sum", "top", "low", "mean")}
    assert found == {"sum": 3.0, "top": 2.0, "low": 0.0, "mean": 1.0}


@both
def test_the_stage_of_setup_is_text_and_lightnings_constant(trainer: Any) -> None:
    class Asks(BoringModel):
        def setup(self, stage: str) -> None:
            got.append(
                (stage == "fit", stage == TrainerFn.FITTING, stage in ("fit", None), isinstance(stage, str))
            )

    got: Got = []
    trainer().fit(Asks(), loader())
    trainer().validate(Asks(), loader())
    assert got == [(True, True, True, True), (False, False, False, True)]


class SomeNone:
    """A loader with a batch that is None."""

    def __iter__(self) -> Any:
        yield from (torch.ones(1, 32), None, torch.ones(1, 32), None)

    def __len__(self) -> int:
        return 4


@both
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_that_is_none_is_skipped(trainer: Any, accumulate: int) -> None:
    class Counts(BoringModel):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            got.append(("start", batch_idx))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            got.append(("step", batch_idx))
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            got.append(("end", batch_idx, batch is None))

    got: Got = []
    made = trainer(accumulate_grad_batches=accumulate)
    made.fit(Counts(), SomeNone())
    whole = [("start", 0), ("step", 0), ("end", 0, False), ("end", 1, True)]
    assert got == [*whole, ("start", 2), ("step", 2), ("end", 2, False), ("end", 3, True)]
    if accumulate == 1:
        assert made.global_step == 2


@both
@pytest.mark.parametrize(("accumulate", "steps"), [(1, 4), (2, 2)])
def test_a_step_without_a_loss_is_counted(trainer: Any, accumulate: int, steps: int) -> None:
    class Skips(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx >= 2 else super().training_step(batch, batch_idx)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            got.append("update")

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            got.append(self.trainer.global_step)
            self.weights.append(self.layer.weight.sum().item())

    got: list[Any] = []
    module = Skips()
    module.weights = []  # type: ignore[assignment]
    made = trainer(accumulate_grad_batches=accumulate)
    made.fit(module, loader(4))
    assert made.global_step == steps
    assert got.count("update") == steps
    assert module.weights[1] == module.weights[3]


def test_hooklines_own_trainer_does_not_count_a_step_without_a_loss() -> None:
    class Skips(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

    made = quiet()
    made.fit(Skips(), loader(2))
    assert made.global_step == 0


@both
def test_evaluation_samplers_get_the_epoch(trainer: Any) -> None:
    class Sampler(torch.utils.data.SequentialSampler):
        def __init__(self, name: str) -> None:
            super().__init__(data)
            self.name = name

        def set_epoch(self, epoch: int) -> None:
            got.append((self.name, epoch))

    data: Any = torch.ones(2, 32)
    got: Got = []
    train, val, test = (DataLoader(data, sampler=Sampler(name)) for name in ("train", "val", "test"))
    module, made = BoringModel(), trainer()
    made.fit(module, train, val)
    assert got == [("train", 0), ("val", 0)]
    made.test(module, test)
    made.predict(module, test)
    assert got[2:] == [("test", 1), ("test", 1)]


# ---- the optimizer's closure -------------------------------------------------------------------------------


def recorded(base: Any, got: list[Any], **methods: Any) -> Any:
    """A model that records the calls of an update."""

    class Recorded(base):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            got.append("training_step")
            return super().training_step(batch, batch_idx)

        def on_before_zero_grad(self, optimizer: Any) -> None:
            got.append("zero_grad")

        def on_after_backward(self) -> None:
            got.append("backward")

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            got.append("before_step")

        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            got.append("clip")

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            got.append((self.trainer.global_step, sorted(outputs or [])))

    return type("Recorded", (Recorded,), methods)()


class Demanding(torch.optim.SGD):
    """An optimizer that cannot be called without a closure, and changes the weights before it."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(0.5)
        return super().step(closure)


def in_optimizer_step(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
    self.trainer.order.append("optimizer_step")
    optimizer.step(closure=optimizer_closure)


def by_hand(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
    self.trainer.order.append("optimizer_step")
    assert isinstance(optimizer_closure(), torch.Tensor)
    optimizer.step()


def demanding(self: Any) -> Any:
    return Demanding(self.parameters(), lr=0.1)


def lbfgs(self: Any) -> Any:
    return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


@pytest.mark.parametrize(
    ("methods", "accumulate"),
    [
        ({"optimizer_step": in_optimizer_step}, 1),
        ({"optimizer_step": in_optimizer_step}, 2),
        ({"optimizer_step": by_hand}, 1),
        ({"optimizer_step": by_hand}, 2),
        ({"configure_optimizers": demanding}, 1),
    ],
    ids=["optimizer_step", "optimizer_step of two", "by hand", "by hand of two", "required"],
)
def test_the_optimizers_step_wraps_the_training_step(methods: dict[str, Any], accumulate: int) -> None:
    def run(trainer: Any) -> tuple[list[Any], Any]:
        got: list[Any] = []
        torch.manual_seed(0)
        module = recorded(BoringModel, got, **methods)
        made = trainer(accumulate_grad_batches=accumulate)
        made.order = got
        made.fit(module, DataLoader(torch.randn(4, 32, generator=torch.Generator().manual_seed(1))))
        return got, module.layer.weight.detach()

    (theirs_got, theirs_weight), (ours_got, ours_weight) = run(theirs), run(ours)
    assert ours_got == theirs_got
    torch.testing.assert_close(ours_weight, theirs_weight, rtol=0, atol=0)


def test_an_optimizer_that_recomputes_the_loss_gives_lightnings_weights() -> None:
    def run(trainer: Any) -> Any:
        torch.manual_seed(0)
        got: list[Any] = []
        module = recorded(BoringModel, got, configure_optimizers=lbfgs)
        trainer().fit(module, DataLoader(torch.randn(3, 32, generator=torch.Generator().manual_seed(1))))
        return got, module.layer.weight.detach()

    (theirs_got, theirs_weight), (ours_got, ours_weight) = run(theirs), run(ours)
    assert ours_got == theirs_got
    torch.testing.assert_close(ours_weight, theirs_weight, rtol=0, atol=0)


@both
def test_a_closure_that_is_not_called_is_an_error(trainer: Any) -> None:
    class Forgets(BoringModel):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None: ...

    with pytest.raises(MisconfigurationException, match="closure"):
        trainer().fit(Forgets(), loader())
