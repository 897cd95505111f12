"""Who does what: every operation of a run can be overridden, its parameters called whatever the user likes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet
from torch import nn
from torch.nn import functional as F

from hookline import SKIP_STEP, DataModule, Hook, Module, OptionError
from hookline.distributed import SingleDevice


def fitted(net: Any, **options: Any) -> Any:
    trainer = quiet(**options)
    trainer.fit(net, batches(), batches(1))
    return net


def twin_of(net: nn.Module) -> Net:
    twin = Net()
    twin.load_state_dict(net.state_dict())
    return twin


# ---- steps -------------------------------------------------------------------------------------------------------


def test_a_step_may_call_its_parameters_what_it_likes_and_take_as_many_as_it_wants() -> None:
    class One(Net):
        def training_step(self, xy: Any) -> Any:  # type: ignore[override]
            return F.mse_loss(self.layer(xy[0]), xy[1])

    class Four(Net):
        def training_step(self, xy: Any, number: int, which: int, called: str) -> Any:  # type: ignore[override]
            assert (type(number), which, called) == (int, 0, "train")
            return F.mse_loss(self.layer(xy[0]), xy[1])

    for cls in (One, Four):
        net = cls()
        twin = fitted(twin_of(net))
        assert torch.equal(fitted(net).layer.weight, twin.layer.weight)


def test_a_step_may_ask_for_further_facts_by_name() -> None:
    seen: list[int] = []

    class Asking(Net):
        def training_step(self, batch: Any, batch_idx: int, *, epoch: int) -> Any:  # type: ignore[override]
            seen.append(epoch)
            return super().training_step(batch, batch_idx)

    fitted(Asking(), max_epochs=2)
    assert seen == [0] * 4 + [1] * 4


# ---- operations --------------------------------------------------------------------------------------------------


class Overriding(Net):
    """Every operation overridden by one that does the default; names are deliberately different."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def backward(self, what: Any) -> None:  # type: ignore[override]
        self.calls.append("backward")
        super().backward(what)

    def optimizer_zero_grad(self, e: int, b: int, opt: Any) -> None:  # type: ignore[override]
        self.calls.append("zero_grad")
        super().optimizer_zero_grad(e, b, opt)

    def optimizer_step(self, e: int, b: int, opt: Any, again: Any) -> None:  # type: ignore[override]
        self.calls.append("step")
        super().optimizer_step(e, b, opt, again)

    def configure_gradient_clipping(self, opt: Any, limit: Any, kind: Any) -> None:  # type: ignore[override]
        self.calls.append(f"clip {limit} {kind}")
        super().configure_gradient_clipping(opt, limit, kind)

    def lr_scheduler_step(self, what: Any, metric: Any) -> None:  # type: ignore[override]
        self.calls.append("schedule")
        super().lr_scheduler_step(what, metric)

    def transfer_batch_to_device(self, stuff: Any, device: Any, index: int) -> Any:  # type: ignore[override]
        self.calls.append(f"move {device}")
        return super().transfer_batch_to_device(stuff, device, index)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)}


def test_overridden_operations_are_called_and_their_defaults_change_nothing() -> None:
    net = Overriding()
    twin = twin_of(net)
    quiet(gradient_clip_val=0.1, device="cpu").fit(net, batches(1))
    quiet(gradient_clip_val=0.1).fit(twin, batches(1))
    assert net.calls == ["move cpu", "zero_grad", "backward", "clip 0.1 norm", "step", "schedule"]
    assert torch.equal(net.layer.weight, twin.layer.weight)


def test_an_own_way_of_clipping_is_used_without_a_clip_option() -> None:
    class Own(Net):
        def configure_gradient_clipping(self, optimizer: Any) -> None:  # type: ignore[override]
            self.clip_gradients(optimizer, 0.01, "value")

    largest: list[float] = []
    trainer = quiet()
    trainer.on("after_optimizer_step")(
        lambda module: largest.append(max(p.grad.abs().max().item() for p in module.parameters()))
    )
    trainer.fit(Own(), batches(2))
    assert largest == [pytest.approx(0.01)] * 2


def test_an_optimizer_step_may_call_the_closure_itself() -> None:
    class Own(Net):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:  # type: ignore[override]
            self.loss = optimizer_closure()
            optimizer.step()

    net = Own()
    twin = fitted(twin_of(net))
    assert torch.equal(fitted(net).layer.weight, twin.layer.weight)
    assert net.loss.grad_fn is None


def test_an_optimizer_step_that_does_nothing_leaves_the_weights() -> None:
    class Lazy(Net):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:  # type: ignore[override]
            pass

    net = Lazy()
    before = copy.deepcopy(net.state_dict())
    assert torch.equal(fitted(net).layer.weight, before["layer.weight"])


def test_a_skipped_step_calls_neither_clipping_nor_optimizer_step() -> None:
    class Forbidding(Net):
        def configure_gradient_clipping(self, optimizer: Any) -> None:  # type: ignore[override]
            raise AssertionError("clipped")

        def optimizer_step(self, epoch: int) -> None:  # type: ignore[override]
            raise AssertionError("stepped")

    trainer = quiet(gradient_clip_val=1.0)
    trainer.on("before_optimizer_step")(lambda: SKIP_STEP)
    trainer.fit(Forbidding(), batches(2))
    assert trainer.state.batches_seen == 2


# ---- moving batches ----------------------------------------------------------------------------------------------


def test_a_data_module_moves_batches_instead_of_the_module() -> None:
    moved: list[str] = []

    class Data(DataModule):
        def train_dataloader(self) -> Any:
            return batches(1)

        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:  # type: ignore[override]
            moved.append("data module")
            return batch

        def on_after_batch_transfer(self, batch: Any) -> None:
            moved.append("after, data module")

    class Own(Net):
        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:  # type: ignore[override]
            moved.append("module")
            return batch

        def on_after_batch_transfer(self, batch: Any) -> None:
            moved.append("after, module")

    quiet().fit(Own(), Data())
    assert moved == ["data module", "after, data module"]


def test_hooks_may_replace_the_batch_before_and_after_the_move() -> None:
    class Plus(Hook):
        def on_before_batch_transfer(self, batch: Any) -> Any:
            return batch[0] * 0 + 1, batch[1]

        def on_after_batch_transfer(self, batch: Any) -> Any:
            return batch[0] * 3, batch[1]

    seen: list[float] = []

    class Look(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(batch[0].mean().item())
            return super().training_step(batch, batch_idx)

    quiet(hooks=[Plus()]).fit(Look(), batches(2))
    assert seen == [3.0, 3.0]


# ---- a strategy around the actions -------------------------------------------------------------------------------


def test_a_strategy_may_stand_around_steps_backward_and_update() -> None:
    calls: list[str] = []

    class Around(SingleDevice):
        def training_step(self, call: Any, batch_idx: int) -> Any:
            calls.append(f"step {batch_idx}")
            return call()

        def validation_step(self, call: Any) -> Any:
            calls.append("validation step")
            return call()

        def backward(self, call: Any) -> None:
            calls.append("backward")
            call()

        def optimizer_step(self, call: Any, optimizer: Any) -> None:
            calls.append(type(optimizer).__name__)
            call()

    net = Net()
    twin = fitted(twin_of(net))
    fitted(net, strategy=Around(torch.device("cpu")))
    assert torch.equal(net.layer.weight, twin.layer.weight)
    assert calls == [text for i in range(4) for text in (f"step {i}", "backward", "SGD")] + [
        "validation step"
    ]


def test_another_module_on_the_same_trainer_gets_its_own_operations() -> None:
    trainer = quiet()
    first, second = Overriding(), Net()
    trainer.fit(first, batches(1))
    count = len(first.calls)
    trainer.fit(second, batches(1))
    assert len(first.calls) == count


# ---- what cannot be combined -------------------------------------------------------------------------------------


class Curved(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.parametrize(
    "options", [{"accumulate_grad_batches": 2}, {"precision": "16-mixed", "device": "cpu"}]
)
def test_an_optimizer_that_recomputes_the_loss_is_refused_where_it_cannot_work(
    options: dict[str, Any],
) -> None:
    with pytest.raises(OptionError, match=r"recomputes the loss \(LBFGS\) cannot be combined"):
        quiet(**options).fit(Curved(), batches())


def test_the_norm_of_an_optimizer_that_evaluates_again_is_that_of_the_gradients_it_began_with() -> None:
    class Square(Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([3.0]))

        def training_step(self, batch: Any) -> Any:
            return (self.weight**2).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1)

    norms: list[float] = []

    class Reads(Hook):
        def on_step_end(self, grad_norm: float) -> None:
            norms.append(grad_norm)

    quiet(hooks=[Reads()]).fit(Square(), batches(1))
    assert norms == [6.0]
