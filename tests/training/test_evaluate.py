"""Validation and test: what they measure, and that the training they interrupt finds everything as it left it."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from tiny import Net, batches, quiet
from torch import Tensor, nn
from torchmetrics import MeanMetric

from hookline import Hook, HooklineError, OptionError, Recorder


class Mixed(Net):
    """One part is frozen in eval mode, one drops out."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.BatchNorm1d(4)
        self.frozen.eval()
        self.drop = nn.Dropout(0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((self.drop(self.frozen(batch[0])), batch[1]), batch_idx)


def modes(module: nn.Module) -> dict[str, bool]:
    return {name: each.training for name, each in module.named_modules()}


# ---- modes and gradients -----------------------------------------------------------------------------------------


def test_validation_runs_in_eval_mode_without_gradients() -> None:
    class Look(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            assert not any(modes(self).values())
            assert not torch.is_grad_enabled()
            self.looked = True
            return super().validation_step(batch, batch_idx)

    net = Look()
    quiet().fit(net, batches(), batches(2))
    assert net.looked


def test_the_gradients_of_an_open_window_survive_a_validation() -> None:
    grads: list[Tensor] = []

    class Look(Hook):
        def on_train_batch_end(self, module: Any) -> None:
            grads.append(module.layer.weight.grad.clone())

        def on_validation_end(self, module: Any) -> None:
            assert torch.equal(module.layer.weight.grad, grads[-1])

    net = Net()
    twin = copy.deepcopy(net)
    quiet(hooks=[Look()], accumulate_grad_batches=4, val_check_interval=1).fit(net, batches(4), batches(2))
    quiet(accumulate_grad_batches=4).fit(twin, batches(4))
    assert len(grads) == 4
    assert torch.equal(net.layer.weight, twin.layer.weight)


# ---- what is measured --------------------------------------------------------------------------------------------


def test_validate_returns_the_mean_loss_weighted_by_batch_size() -> None:
    net = Net()
    big, small = batches(1, size=6)[0], batches(1, size=2)[0]
    metrics = quiet().validate(net, [big, small])
    losses = [net.training_step(b, 0).item() for b in (big, small)]
    assert metrics["val/loss"] == pytest.approx((6 * losses[0] + 2 * losses[1]) / 8)
    assert set(metrics) == {"val/loss"}


def test_test_measures_under_its_own_names() -> None:
    trainer = quiet()
    with Recorder(trainer) as recorder:
        metrics = trainer.test(Net(), batches(2))
    assert set(metrics) == {"test/loss"}
    assert [each.event for each in recorder.calls] == ["test_step", "test_step"]


def test_limit_test_batches_is_honoured() -> None:
    net = Net()
    assert (
        quiet(limit_test_batches=1).test(net, batches(3))["test/loss"]
        == quiet().test(net, batches(1))["test/loss"]
    )


def test_the_numbers_of_a_returned_dictionary_are_measured_too() -> None:
    class Rich(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": super().validation_step(batch, batch_idx), "acc": batch_idx, "pred": batch[0]}

    metrics = quiet().validate(Rich(), batches(3))
    assert set(metrics) == {"val/loss", "val/acc"}
    assert metrics["val/acc"] == 1.0


def test_what_a_validation_step_logs_is_its_epochs_mean() -> None:
    class Logging(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/mine", float(batch_idx))

    metrics = quiet().validate(Logging(), batches(4))
    assert dict(metrics) == {"val/mine": 1.5}


def test_several_loaders_have_one_mean_and_each_their_own() -> None:
    net = Net()
    a, b = batches(2), batches(4)[2:]
    metrics = quiet().validate(net, {"a": a, "b": b})
    mean = {
        name: sum(net.training_step(x, 0).item() for x in data) / 2 for name, data in {"a": a, "b": b}.items()
    }
    assert metrics["val/dl_a/loss"] == pytest.approx(mean["a"])
    assert metrics["val/dl_b/loss"] == pytest.approx(mean["b"])
    assert metrics["val/loss"] == pytest.approx((mean["a"] + mean["b"]) / 2)


@pytest.mark.parametrize("verb", ["validate", "test"])
def test_measuring_without_a_loader_says_what_to_pass(verb: str) -> None:
    with pytest.raises(HooklineError, match=f"{verb}.* needs a loader: pass"):
        getattr(quiet(), verb)(Net())


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_every_verb_ends_as_completed(verb: str) -> None:
    trainer = quiet()
    getattr(trainer, verb)(Net(), batches(2))
    assert trainer.status == "completed"


@pytest.mark.parametrize(("verb", "kind"), [("validate", "val"), ("test", "test"), ("predict", "predict")])
@pytest.mark.parametrize("off", [0, 0.0])
@pytest.mark.parametrize(
    "loaders", [batches(2), {"a": batches(1), "b": batches(1)}, None], ids=["one", "two", "none"]
)
def test_a_limit_of_zero_switches_the_verb_off_and_says_so(
    verb: str, kind: str, off: float, loaders: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Never(Hook):
        def on_validation_start(self) -> None:
            raise AssertionError

        on_test_start = on_predict_start = on_validation_start

    trainer = quiet(hooks=[Never()], **{f"limit_{kind}_batches": off})
    came = getattr(trainer, verb)(Net(), loaders)
    assert list(came) == []
    assert isinstance(came, list) == (verb == "predict")
    assert f"Nothing to {verb}: limit_{kind}_batches={off} switches it off." in caplog.text
    assert trainer.status == "completed"


def test_a_limit_of_zero_switches_a_validation_from_a_hook_off_too() -> None:
    came = []
    trainer = quiet(limit_val_batches=0)
    trainer.on("step_end")(lambda trainer: came.append(dict(trainer.validate())))
    trainer.fit(Net(), batches(2), batches(1))
    assert came == [{}, {}]


@pytest.mark.parametrize(("verb", "kind"), [("validate", "val"), ("test", "test"), ("predict", "predict")])
def test_a_fraction_that_is_no_batch_is_an_error_of_its_own(verb: str, kind: str) -> None:
    with pytest.raises(
        OptionError, match=f"limit_{kind}_batches=0.1 of 4 batches is 0 batches; pass a larger fraction, or 0"
    ):
        getattr(quiet(**{f"limit_{kind}_batches": 0.1}), verb)(Net(), batches(4))


# ---- validate() called from a hook -------------------------------------------------------------------------------


class ValidatesAt(Hook):
    """Calls trainer.validate() at one event."""

    def __init__(self) -> None:
        self.results: list[float] = []

    def now(self, trainer: Any) -> None:
        self.results.append(trainer.validate()["val/loss"])


@pytest.mark.parametrize("event", ["train_batch_end", "step_end", "train_epoch_end"])
def test_a_hook_may_validate_at_the_end_of_a_batch_step_or_epoch(event: str) -> None:
    hook = ValidatesAt()
    trainer = quiet(max_epochs=2, accumulate_grad_batches=2)
    trainer.on(event)(hook.now)
    net = Net()
    trainer.fit(net, batches(4), batches(2))
    assert len(hook.results) == {"train_batch_end": 8, "step_end": 4, "train_epoch_end": 2}[event]
    assert hook.results[-1] == pytest.approx(quiet().validate(net, batches(2))["val/loss"])


@pytest.mark.parametrize(
    "event",
    [
        "train_start",
        "train_epoch_start",
        "train_batch_start",
        "before_backward",
        "before_optimizer_step",
        "validation_end",
        "train_end",
        "train_metrics",
    ],
)
def test_validating_elsewhere_is_refused_with_the_reason(event: str) -> None:
    hook = ValidatesAt()
    trainer = quiet(log_every_n_steps=1)
    trainer.on(event)(hook.now)
    with pytest.raises(HooklineError, match="at the end of a batch, step or training epoch"):
        trainer.fit(Net(), batches(2), batches(2))
    assert hook.results == []


def test_a_hook_may_validate_at_the_step_that_closes_a_short_window() -> None:
    hook = ValidatesAt()
    trainer = quiet(accumulate_grad_batches=2)
    trainer.on("step_end")(hook.now)
    trainer.fit(Net(), (b for b in batches(3)), batches(2))
    assert len(hook.results) == 2


def test_a_validation_from_a_hook_leaves_no_trace() -> None:
    """Modes, gradients, weights and every random stream are those of a run without it."""

    class Noisy(Mixed):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            torch.rand(5)
            return super().validation_step(batch, batch_idx)

    def run(nested: bool) -> tuple[Mixed, Tensor]:
        torch.manual_seed(3)
        net = Noisy()
        trainer = quiet(accumulate_grad_batches=2)
        if nested:
            trainer.on("train_batch_end")(lambda trainer: trainer.validate() and None)
        trainer.fit(net, batches(4), batches(2))
        return net, torch.rand(4)

    (plain, plain_numbers), (watched, numbers) = run(False), run(True)
    assert torch.equal(plain.layer.weight, watched.layer.weight)
    assert torch.equal(plain.layer.weight.grad, watched.layer.weight.grad)  # type: ignore[arg-type]
    assert modes(plain) == modes(watched)
    assert torch.equal(plain_numbers, numbers)


def test_a_validation_from_a_hook_leaves_python_and_numpy_randomness_alone() -> None:
    class Noisy(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            random.random()
            np.random.rand()
            return super().validation_step(batch, batch_idx)

    states: list[tuple[Any, int]] = []

    def nested(trainer: Any) -> None:
        states.append((random.getstate(), np.random.get_state()[2]))
        trainer.validate()
        states.append((random.getstate(), np.random.get_state()[2]))

    trainer = quiet()
    trainer.on("train_batch_end")(nested)
    trainer.fit(Noisy(), batches(1), batches(2))
    assert states[0] == states[1]


def test_a_validation_from_a_hook_needs_a_loader() -> None:
    trainer = quiet()
    trainer.on("step_end")(lambda trainer: trainer.validate() and None)
    with pytest.raises(HooklineError, match=r"validate\(\) needs a loader"):
        trainer.fit(Net(), batches(2))


@pytest.mark.parametrize("verb", ["fit", "test", "predict"])
def test_no_other_verb_may_be_called_inside_a_run(verb: str) -> None:
    trainer = quiet()
    trainer.on("step_end")(lambda trainer: getattr(trainer, verb)(Net(), batches(1)) and None)
    with pytest.raises(HooklineError, match=rf"{verb}\(\) was called inside a run"):
        trainer.fit(Net(), batches(2), batches(2))


def test_samplers_and_datasets_of_evaluations_get_the_epoch() -> None:
    class Sampler(torch.utils.data.SequentialSampler):
        def set_epoch(self, epoch: int) -> None:
            got.append(epoch)

    data: Any = torch.utils.data.TensorDataset(torch.ones(4, 4), torch.ones(4, 2))
    got: list[int] = []
    val = torch.utils.data.DataLoader(data, sampler=Sampler(data))
    module, trainer = Net(), quiet(max_epochs=3, num_sanity_val_steps=1)
    trainer.fit(module, batches(2), val)
    assert got == [0, 0, 1, 2]
    trainer.validate(module, val)
    assert got[4:] == [3]


# ---- metric objects and several loaders --------------------------------------------------------------------------


class Measures(Net):
    """Logs a metric object of all loaders, or one for each under one name."""

    def __init__(self, each: bool = False) -> None:
        super().__init__()
        self.errors = nn.ModuleList([MeanMetric(), MeanMetric()])
        self.each = each

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        metric: Any = self.errors[dataloader_idx if self.each else 0]
        metric.update(3.0 + 4.0 * dataloader_idx)
        self.log("val/error", metric)


def test_a_metric_object_has_one_result_of_all_loaders() -> None:
    loaders = {"near": batches(2), "far": batches(2)}
    assert quiet().validate(Measures(), loaders)["val/error"] == 5.0
    with pytest.raises(OptionError, match="aggregation='macro' needs a result of each loader, and a MeanM"):
        quiet(evaluation={"aggregation": "macro"}).validate(Measures(), loaders)


def test_two_metric_objects_under_one_name_are_refused() -> None:
    with pytest.raises(HooklineError, match="log\\('val/error', ...\\) has got two metric objects"):
        quiet().validate(Measures(each=True), {"near": batches(2), "far": batches(2)})
