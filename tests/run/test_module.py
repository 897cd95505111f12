"""`Module` and `DataModule`: what a user writes, and what can be asked of them during a run."""

from __future__ import annotations

import copy
import io
import traceback
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet
from torch import nn

from hookline import DataModule, HooklineError, LossError, Module, OptionError


def test_a_module_can_listen_to_events_itself() -> None:
    class Listening(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norms: list[float] = []

        def on_after_backward(self) -> None:
            self.norms.append(float(self.layer.weight.grad.norm()))

    net = Listening()
    quiet().fit(net, batches(3))
    assert len(net.norms) == 3
    assert all(norm > 0 for norm in net.norms)


def test_a_modules_events_may_use_any_spelling() -> None:
    calls: list[str] = []

    class Old(Net):
        def on_epoch_start(self) -> None:
            calls.append("epoch start")

        def on_batch_start(self) -> None:
            calls.append("batch start")

        def on_batch_end(self) -> None:
            calls.append("batch end")

        def on_pre_performance_check(self) -> None:
            calls.append("validation start")

        def on_post_performance_check(self) -> None:
            calls.append("validation end")

        def on_epoch_end(self) -> None:
            calls.append("epoch end")

    quiet().fit(Old(), batches(1), batches(1))
    assert calls == [
        "epoch start",
        "batch start",
        "batch end",
        "validation start",
        "validation end",
        "epoch end",
    ]


def test_a_module_knows_trainer_logger_epoch_step_and_device_during_a_run() -> None:
    seen: list[Any] = []

    class Asking(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append((self.trainer.global_step, self.current_epoch, self.global_step, self.device.type))
            assert self.logger is self.experiment is self.trainer.logger
            self.experiment.add_histogram(
                tag="weights", values=self.layer.weight, global_step=self.global_step
            )
            return super().training_step(batch, batch_idx)

    quiet(max_epochs=2).fit(Asking(), batches(1))
    assert seen == [(0, 0, 0, "cpu"), (1, 1, 1, "cpu")]


@pytest.mark.parametrize("attribute", ["trainer", "logger", "current_epoch", "global_step", "experiment"])
def test_outside_a_run_it_says_so(attribute: str) -> None:
    with pytest.raises(HooklineError, match="Net is not in a run"):
        getattr(Net(), attribute)


def test_logging_outside_a_run_says_so() -> None:
    with pytest.raises(HooklineError, match="Net is not in a run"):
        Net().log("loss", 1.0)


def test_a_copy_made_during_a_run_does_not_take_the_run_along() -> None:
    class Copying(Net):
        def on_train_batch_end(self) -> None:
            copies.append(copy.deepcopy(self))

    copies: list[Any] = []
    net = Copying()
    quiet().fit(net, batches(1))
    with pytest.raises(HooklineError, match="is not in a run"):
        _ = copies[0].trainer
    assert torch.equal(copies[0].layer.weight, net.layer.weight)


def test_a_module_can_be_saved_whole_during_a_run() -> None:
    files: list[io.BytesIO] = []

    def keep(module: nn.Module) -> None:
        file = io.BytesIO()
        torch.save(module, file)
        files.append(file)

    net = Net()
    trainer = quiet()
    trainer.on("train_end")(keep)
    trainer.fit(net, batches(1))
    files[0].seek(0)
    loaded = torch.load(files[0], weights_only=False)
    assert torch.equal(loaded.layer.weight, net.layer.weight)


def test_the_state_dict_holds_the_users_parameters_only() -> None:
    net = Net()
    quiet().fit(net, batches(1))
    assert list(net.state_dict()) == ["layer.weight", "layer.bias"]


def test_the_same_module_can_be_run_by_several_trainers() -> None:
    net = Net()
    quiet().fit(net, batches(2))
    trainer = quiet()
    trainer.fit(net, batches(2))
    assert trainer.global_step == 2


def test_log_takes_numbers_and_tensors_of_one_element() -> None:
    class Logging(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("int", 1)
            self.log_dict({"tensor": torch.tensor([2.0]), "float": 3.0}, prog_bar=True)
            return super().training_step(batch, batch_idx)

    metrics = quiet().fit(Logging(), batches(1))
    assert (metrics["int"], metrics["tensor"], metrics["float"]) == (1.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("value", "text"), [("text", "takes a number"), (torch.zeros(2), "not a tensor of shape")]
)
def test_log_refuses_everything_else(value: Any, text: str) -> None:
    class Logging(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("bad", value)
            return super().training_step(batch, batch_idx)

    with pytest.raises(HooklineError, match=text):
        quiet().fit(Logging(), batches(1))


def test_a_value_logged_with_its_own_batch_size_is_weighted_by_it() -> None:
    class Logging(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("mine", float(batch_idx), batch_size=1 + 2 * batch_idx)

    assert quiet().validate(Logging(), batches(2))["mine"] == pytest.approx(0.75)


def test_a_module_without_configure_optimizers_says_what_to_return() -> None:
    class NoOptimizer(Module):
        def training_step(self, batch: Any, batch_idx: int) -> None: ...

    with pytest.raises(
        HooklineError, match="NoOptimizer has no configure_optimizers. Return an optimizer from it"
    ):
        quiet().fit(NoOptimizer(), batches())


def test_one_optimizer_comes_alone_and_several_as_a_list() -> None:
    seen: list[Any] = []

    class Two(Net):
        def on_train_start(self) -> None:
            seen.append(self.optimizers())

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([self.layer.weight], lr=0.1), torch.optim.SGD([self.layer.bias], lr=0.1)]

    class One(Net):
        def on_train_start(self) -> None:
            seen.append(self.optimizers())

    quiet().fit(Two(), batches(1))
    quiet().fit(One(), batches(1))
    assert len(seen[0]) == 2
    assert seen[1].param_groups[0]["lr"] == 0.1


def test_a_module_that_forgot_super_init_is_told_so_before_the_run() -> None:
    class Forgetful(Module):
        def __init__(self) -> None:
            self.width = 3

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise AssertionError("never reached")

    with pytest.raises(
        HooklineError, match=r"Forgetful.__init__ does not call super\(\).__init__\(\)"
    ) as caught:
        quiet().fit(Forgetful(), batches(1))
    assert not hasattr(caught.value, "__notes__")


# ---- a plain model that computes its own loss -----------------------------------------------------------------------


class Output:
    """What a model returns: an object with a loss."""

    def __init__(self, prediction: Any, loss: Any) -> None:
        self.prediction, self.loss = prediction, loss


class OwnLoss(nn.Module):
    """Computes its loss from the targets, if it gets them."""

    def __init__(self, kind: Any = dict) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 2), kind

    def forward(self, inputs: Any, targets: Any = None) -> Any:
        prediction = self.layer(inputs)
        loss = None if targets is None else nn.functional.mse_loss(prediction, targets)
        return self.kind(prediction=prediction, loss=loss)


def named(*keys: str) -> list[dict[str, Any]]:
    return [dict(zip(keys, each, strict=False)) for each in batches(3)]


@pytest.mark.parametrize("kind", [dict, Output])
def test_a_model_that_takes_the_entries_of_a_batch_and_returns_its_loss_needs_no_loss_function(
    kind: Any,
) -> None:
    torch.manual_seed(0)
    net, trainer = OwnLoss(kind), quiet()
    plain = copy.deepcopy(net.layer)
    data = named("inputs", "targets")
    trainer.fit(net, data, data, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    quiet().fit(
        plain, batches(3), loss=nn.functional.mse_loss, optimizer=torch.optim.SGD(plain.parameters(), lr=0.1)
    )
    assert torch.equal(net.layer.weight, plain.weight)
    assert {"train/loss", "val/loss"} <= set(trainer.metrics)
    predicted = trainer.predict(net, named("inputs"))
    assert len(predicted) == 3


def test_a_model_that_takes_the_batch_itself_gets_it() -> None:
    class Whole(nn.Linear):
        def forward(self, batch: Any) -> Any:
            return super().forward(batch["inputs"])

    assert [tuple(each.shape) for each in quiet().predict(Whole(4, 2), named("inputs"))] == [(3, 2)] * 3


def test_an_entry_that_only_later_batches_have_is_explained() -> None:
    net = OwnLoss()
    update = torch.optim.SGD(net.parameters(), lr=0.1)
    later = [{**each, "weight": 1} for each in named("inputs", "targets")]
    with pytest.raises(OptionError, match="OwnLoss.forward has no argument 'weight', which the batches have"):
        quiet(num_sanity_val_steps=0).fit(net, named("inputs", "targets"), later, optimizer=update)


def test_batches_from_which_a_model_cannot_compute_a_loss_are_explained() -> None:
    net = OwnLoss()
    update = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(
        OptionError, match="OwnLoss returned no loss, but dict with prediction, loss, for a batch"
    ):
        quiet().fit(net, named("inputs"), optimizer=update)
    with pytest.raises(
        OptionError, match="OwnLoss.forward has no argument 'target'.* Did you mean 'targets'"
    ):
        quiet().fit(net, named("inputs", "target"), optimizer=update)


def test_a_step_may_return_an_object_with_a_loss_and_no_other_object() -> None:
    class Steps(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return Output(None, super().training_step(batch, batch_idx))

    trainer = quiet()
    trainer.fit(Steps(), batches(2))
    assert trainer.global_step == 2

    class Wrong(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return object()

    with pytest.raises(LossError, match="returned object .* or an object with 'loss'"):
        quiet().fit(Wrong(), batches(1))


def test_a_second_trainer_cannot_take_a_module_out_of_a_run() -> None:
    class Logs(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("error", loss)  # needs the run
            return loss

    module, refused, evaluated = Logs(), [], []
    trainer, other = quiet(), quiet()

    @trainer.on("train_batch_end")
    def evaluate(batch_idx: int) -> None:
        if batch_idx == 1:
            with pytest.raises(HooklineError) as caught:
                other.validate(module, batches(1))
            refused.append(str(caught.value))
            evaluated.append(other.validate(copy.deepcopy(module), batches(1)))

    trainer.fit(module, batches(4))
    assert trainer.state.batches_seen == 4 and trainer.metrics["error"] > 0 and evaluated[0]
    assert refused == [
        "validate() of another trainer was called with Logs, which is in a running fit(). A module can be in one run "
        "only. To evaluate it in a hook, request `trainer` and call trainer.validate(), or pass a copy: "
        "copy.deepcopy(module)."
    ]
    other.validate(module, batches(1))  # the run is over


def test_save_hyperparameters_is_told_to_be_left_out() -> None:
    class Saving(Net):
        def __init__(self, width: int = 4) -> None:
            super().__init__()
            self.save_hyperparameters()

    with pytest.raises(
        HooklineError, match="Saving needs no save_hyperparameters.*self.lr.*load_from_checkpoint"
    ):
        Saving()


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("hparams", "keep the arguments that you use as attributes: self.lr = lr."),
        ("print", "Call print()"),
        ("global_rank", "Use trainer.strategy.rank"),
        ("all_gather", "trainer.strategy.reduce"),
        ("toggle_optimizer", "requires_grad_"),
    ],
)
def test_a_name_of_lightning_in_a_module_leads_to_ours(name: str, advice: str) -> None:
    class Ported(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return getattr(self, name)

    with pytest.raises(AttributeError) as refused:
        quiet().fit(Ported(), batches(1))
    told = traceback.format_exception_only(refused.value)[0]
    assert told.startswith(f"AttributeError: 'Ported' object has no attribute '{name}'. ")
    assert advice in told and "Did you mean" not in told
    net = Ported()
    assert not hasattr(net, name) and getattr(net, name, None) is None
    setattr(net, name, nn.Linear(1, 1))  # the user may have a layer or a value of this name
    assert isinstance(getattr(net, name), nn.Linear)
    delattr(net, name)
    assert not hasattr(net, name)


def test_a_missing_name_that_no_system_has_is_pythons_error() -> None:
    class Wrong(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.unknown

    with pytest.raises(AttributeError) as failed:
        quiet().fit(Wrong(), batches(1))
    assert str(failed.value) == "'Wrong' object has no attribute 'unknown'"


def test_layers_are_looked_up_by_torch_itself() -> None:
    """torch.compile knows the names of layers by this, and a step has no call of ours for each layer."""
    assert Module.__getattr__ is nn.Module.__getattr__


def test_a_name_of_lightning_in_a_data_module_leads_to_ours() -> None:
    class Data(DataModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters()  # type: ignore[attr-defined]

    with pytest.raises(AttributeError, match="'Data' object has no attribute 'save_hyperparameters'. Leave"):
        Data()
    with pytest.raises(
        AttributeError, match=r"Request it in an event method: def setup\(self, stage, trainer\)"
    ):
        DataModule().trainer  # type: ignore[attr-defined]  # noqa: B018
