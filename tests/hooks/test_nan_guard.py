"""NaNGuard: stops before a NaN gets into the weights, and says where it came from."""

from __future__ import annotations

import logging
import math
import sys
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from hookline import Module
from hookline.hooks.nan_guard import NaNGuard, not_finite
from hookline.util.errors import NonFiniteLoss, OptionError


class Divides(nn.Module):
    """Makes an infinity in the middle of a network, when told to."""

    broken = False

    def forward(self, x: Tensor) -> Tensor:
        return x / 0.0 if self.broken else x


class Deep(Module):
    def __init__(self, break_at: int = 2, lr: float = 0.1) -> None:
        super().__init__()
        self.first, self.trap, self.last = nn.Linear(4, 3), Divides(), nn.Linear(3, 2)
        self.break_at, self.lr = break_at, lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trap.broken = batch_idx == self.break_at
        return F.mse_loss(self.last(self.trap(self.first(batch[0]))), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def hooks_on(module: nn.Module) -> int:
    return sum(len(each._forward_hooks) for each in module.modules())


def test_a_loss_that_is_not_finite_stops_before_it_gets_into_the_weights() -> None:
    net = Deep()
    with pytest.raises(
        NonFiniteLoss, match=r"The loss is (nan|inf).*epoch 0, batch 2, update 3; batch: float32\[3, 4\]"
    ) as caught:
        quiet(hooks=[NaNGuard()]).fit(net, batches(4))
    assert "check='activations'" in str(caught.value)
    assert not not_finite(list(net.named_parameters()))


def test_the_first_module_is_named_and_nothing_stays_on_the_modules() -> None:
    net = Deep()
    guard = NaNGuard(check="activations")
    with pytest.raises(
        NonFiniteLoss, match="output of module 'trap' is the first that is not finite; 2 in all"
    ):
        quiet(hooks=[guard]).fit(net, batches(4))
    assert hooks_on(net) == 0


@pytest.mark.parametrize("check", ["batch", "activations", "parameters"])
def test_further_checks_do_not_replace_that_of_the_loss(check: str) -> None:
    class Nan(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * (math.nan if batch_idx == 2 else 1.0)

    net = Nan()
    with pytest.raises(NonFiniteLoss, match=r"The loss is nan.*batch 2, update 3") as caught:
        quiet(hooks=[NaNGuard(check=check)]).fit(net, batches(4))
    assert ("the outputs of all modules are finite" in str(caught.value)) == (check == "activations")
    assert not not_finite(list(net.named_parameters()))
    assert "then, while the run was ending" not in "".join(caught.value.__notes__)


def test_of_loss_and_gradients_one_can_be_chosen() -> None:
    assert NaNGuard().check == NaNGuard(check=[]).check == {"loss", "gradients"}
    assert NaNGuard(check=["activations", "gradients"]).check == {"activations", "gradients"}


def test_a_failing_run_leaves_nothing_on_the_modules() -> None:
    class Fails(Deep):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert hooks_on(self) > 0
            raise RuntimeError("broken")

    net = Fails()
    with pytest.raises(RuntimeError, match="broken"):
        quiet(hooks=[NaNGuard(check="activations")]).fit(net, batches(1))
    assert hooks_on(net) == 0


def test_modules_are_watched_only_in_the_batches_that_are_checked() -> None:
    watched: list[int] = []

    class Looks(Deep):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            watched.append(hooks_on(self))
            return super().training_step(batch, batch_idx)

    net = Looks(break_at=-1)
    quiet(hooks=[NaNGuard(check="activations", every=3)]).fit(net, batches(7))
    assert [bool(each) for each in watched] == [True, False, False, True, False, False, True]
    assert hooks_on(net) == 0


def test_when_only_a_gradient_is_bad_the_parameter_nearest_to_the_loss_is_named() -> None:
    class Root(Module):
        """The square root of 0 has no finite slope."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 2, bias=False), nn.Linear(2, 2, bias=False)
            self.own = nn.Parameter(torch.zeros(2))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return torch.sqrt(0.0 * self.first(batch[0])).sum() + self.last(batch[0][:, :2]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    net = Root()
    with pytest.raises(
        NonFiniteLoss, match=r"gradient of parameter 'first.weight' is not finite.*1 of 2 are"
    ):
        quiet(hooks=[NaNGuard()]).fit(net, batches(1))
    assert not not_finite(list(net.named_parameters()))


def test_the_gradient_nearest_to_the_loss_comes_first_when_several_are_bad() -> None:
    with pytest.raises(
        NonFiniteLoss,
        match=r"parameter 'last.bias' .*4 of 4 are: last.bias, last.weight, first.bias, first.weight",
    ):
        quiet(hooks=[NaNGuard(check="gradients")]).fit(Deep(0), batches(1))


def test_a_bad_batch_is_named_by_its_place() -> None:
    data = [{"x": torch.ones(2, 4), "y": [torch.ones(2), torch.tensor([1.0, math.nan])]}]
    with pytest.raises(
        NonFiniteLoss, match=r"batch has values that are not finite: batch\['y'\]\[1\].*x: float32\[2, 4\]"
    ) as caught:
        quiet(hooks=[NaNGuard(check=["batch"])]).fit(Net(), data)
    assert str(caught.value).count("batch['y'][1]") == 1 and "activations" not in str(caught.value)


def test_a_bad_batch_is_a_clue_when_the_loss_is_bad() -> None:
    (inputs, targets), *_ = batches(1)
    with pytest.raises(NonFiniteLoss, match=r"The loss is nan.*The batch itself is not finite: batch\[1\]"):
        quiet(hooks=[NaNGuard()]).fit(Net(), [(inputs, targets * math.nan)])


def test_an_update_that_spoils_the_weights_is_seen() -> None:
    with pytest.raises(NonFiniteLoss, match=r"update left parameters that are not finite: first.weight"):
        quiet(hooks=[NaNGuard(check="parameters")]).fit(Deep(-1, lr=math.inf), batches(2))


def test_weights_that_are_bad_from_the_start_are_not_blamed_on_samples() -> None:
    data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randn(8, 2))
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    net = Deep(break_at=1)
    with pytest.raises(NonFiniteLoss, match="Its samples: 4"):
        quiet(hooks=[NaNGuard()]).fit(net, loader)
    with torch.no_grad():
        net.first.weight.fill_(math.nan)
    with pytest.raises(NonFiniteLoss, match="Parameters are not finite: first.weight") as caught:
        quiet(hooks=[NaNGuard()]).fit(net, loader)
    assert "samples" not in str(caught.value)


def test_at_a_terminal_it_breaks_into_the_debugger_and_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def debugger() -> None:
        seen.append(sys._getframe(1).f_locals["state"].batch_idx)

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "breakpointhook", debugger)
    guard = NaNGuard(check="activations")
    quiet(hooks=[guard], nonfinite="skip").fit(Deep(), batches(4))
    assert seen == [2] and guard.found == 1


def test_it_only_warns_when_told_so(caplog: pytest.LogCaptureFixture) -> None:
    guard = NaNGuard(break_on_nan=False, check="activations")
    with caplog.at_level(logging.WARNING, "hookline"):
        quiet(hooks=[guard], nonfinite="skip").fit(Deep(), batches(4))
    assert guard.found == 1 and "'trap'" in caplog.text


def test_shapes_are_logged_when_they_change(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "hookline"):
        quiet(hooks=[NaNGuard(log_shapes=True)]).fit(Net(), [*batches(3, 3), *batches(2, 5)])
    assert [record.getMessage() for record in caplog.records if "float32" in record.getMessage()] == [
        "batch 0: float32[3, 4], float32[3, 2]",
        "batch 3: float32[5, 4], float32[5, 2]",
    ]


@pytest.mark.parametrize("count", [2, 40])
def test_one_read_however_many_tensors(count: int) -> None:
    reads: list[str] = []

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            reads.append(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    tensors = [(str(index), torch.full((3,), math.nan if index == 1 else 1e30)) for index in range(count)]
    with Reads():
        assert not_finite(tensors) == ["1"]
    assert reads.count("_foreach_norm") == 1 and reads.count("_local_scalar_dense") == 0


def test_with_accumulation_every_update_is_checked() -> None:
    with pytest.raises(NonFiniteLoss, match="'last.bias'"):
        quiet(hooks=[NaNGuard(check="gradients", every=2)], accumulate_grad_batches=2).fit(
            Deep(1), batches(4)
        )


def test_a_scaler_that_finds_its_scale_is_no_alarm() -> None:
    guard = NaNGuard(check=["loss", "gradients", "parameters"])
    trainer = quiet(hooks=[guard], precision="16-mixed", max_steps=2)
    trainer.fit(Net(), batches(1) * 40)
    assert guard.found == 0 and trainer.global_step == 2


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)  # torch.compile looks at it after a graph break
def test_the_modules_of_a_compiled_model_are_named_too() -> None:
    net = Deep()
    with pytest.raises(NonFiniteLoss, match="output of module 'trap'"):
        quiet(hooks=[NaNGuard(check="activations")], compile={"backend": "eager"}).fit(net, batches(4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"check": "gradient"}, "Did you mean 'gradients'"),
        ({"every": 0}, "every=0"),
        ({"break_on_nan": 1}, "must be True or False"),
    ],
)
def test_wrong_parameters_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        NaNGuard(**arguments)
