"""Averaged weights: what they are, when they are used, and that training is not disturbed by them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny import Net, SavesFirstEpoch, batches, quiet
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hookline import Hook, HookError, OptionError
from hookline.hooks.weight_averaging import WeightAveraging


class Normed(Net):
    """With running statistics, which are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))  # type: ignore[assignment]


class Follow(Hook):
    """The weights after every update, and those seen by evaluations."""

    def __init__(self) -> None:
        self.trained: list[dict[str, Any]] = []
        self.measured: list[dict[str, Any]] = []

    def on_step_end(self, module: Any) -> None:
        self.trained.append(weights(module))

    def on_validation_batch_end(self, module: Any) -> None:
        self.measured.append(weights(module))

    def on_test_batch_end(self, module: Any) -> None:
        self.measured.append(weights(module))


def weights(module: nn.Module) -> dict[str, Any]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def average(hook: WeightAveraging, net: Net | None = None, **options: Any) -> tuple[Any, Follow, Net]:
    net, follow = net or Net(), Follow()
    trainer = quiet(**{"max_epochs": 2, "hooks": [hook, follow], **options})
    trainer.fit(net, batches(4), batches(1))
    return trainer, follow, net


def expected(follow: Follow, kind: str, decay: float, first: int = 0, every: int = 1) -> dict[str, Any]:
    """The same average by torch's own class."""
    host = Net()
    model = AveragedModel(host, multi_avg_fn=get_ema_multi_avg_fn(decay) if kind == "ema" else None)
    for state in follow.trained[first::every]:
        host.load_state_dict(state)
        model.update_parameters(host)
    return weights(model.module)


@pytest.mark.parametrize("kind", ["ema", "swa"])
def test_validation_sees_the_average_that_torch_would_make(kind: str) -> None:
    hook = WeightAveraging(kind, decay=0.9)
    _, follow, _ = average(hook)
    for key, value in expected(follow, kind, 0.9).items():
        torch.testing.assert_close(hook.averages[key], value)
        torch.testing.assert_close(follow.measured[-1][key], value)
    assert not same(follow.measured[-1], follow.trained[-1])


def test_training_is_the_same_to_the_bit_as_without_it() -> None:
    net = Net()
    plain, _ = copy.deepcopy(net), None
    _, follow, trained = average(WeightAveraging("ema", 0.5), net, val_check_interval=1)
    _, bare, without = average(
        WeightAveraging("ema", 0.5, use_for_evaluation=False), plain, val_check_interval=1
    )
    assert same(weights(trained), weights(without))
    assert all(same(one, other) for one, other in zip(follow.trained, bare.trained, strict=True))
    assert all(same(one, other) for one, other in zip(bare.measured, bare.trained, strict=True))


def test_it_may_start_later_and_go_slower() -> None:
    hook = WeightAveraging("swa", start="3 steps", every="2 steps")
    _, follow, _ = average(hook)
    assert hook.updates == 3  # after steps 4, 6 and 8
    for key, value in expected(follow, "swa", 0, first=3, every=2).items():
        torch.testing.assert_close(hook.averages[key], value)


def test_before_it_starts_evaluations_use_the_trained_weights() -> None:
    _, follow, _ = average(WeightAveraging(start="1 epoch"))
    assert same(follow.measured[0], follow.trained[3])
    assert not same(follow.measured[1], follow.trained[7])


def test_test_uses_the_average_and_gives_the_weights_back() -> None:
    hook = WeightAveraging("swa")
    trainer, follow, net = average(hook)
    before = weights(net)
    trainer.test(loaders=batches(1))
    assert same(follow.measured[-1], dict(hook.averages))
    assert same(weights(net), before)


def test_another_module_is_left_alone() -> None:
    trainer, follow, _ = average(WeightAveraging("swa"))
    other = Net()
    trainer.test(other, batches(1))
    assert same(follow.measured[-1], weights(other))


def test_the_average_can_stay_at_the_end() -> None:
    hook = WeightAveraging("swa", swap_at_end=True)
    _, follow, net = average(hook)
    assert same(weights(net), dict(hook.averages))
    hook = WeightAveraging("swa")
    _, follow, net = average(hook)
    assert same(weights(net), follow.trained[-1])


def test_buffers_are_kept_or_averaged() -> None:
    kept, averaged = WeightAveraging("swa"), WeightAveraging("swa", buffers="average")
    _, follow, net = average(kept, Normed())
    assert torch.equal(
        follow.measured[-1]["layer.0.running_mean"], follow.trained[-1]["layer.0.running_mean"]
    )
    before = copy.deepcopy(net)
    _, follow, net = average(averaged, Normed())
    means = torch.stack([each["layer.0.running_mean"] for each in follow.trained]).mean(0)
    torch.testing.assert_close(follow.measured[-1]["layer.0.running_mean"], means)
    assert torch.equal(net.state_dict()["layer.0.running_mean"], follow.trained[-1]["layer.0.running_mean"])
    assert int(before.state_dict()["layer.0.num_batches_tracked"]) == 8


def test_a_failing_validation_gives_the_weights_back() -> None:
    class Breaks(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            raise ValueError("boom")

    net, follow = Breaks(), Follow()
    with pytest.raises(ValueError, match="boom"):
        quiet(hooks=[WeightAveraging("swa"), follow]).fit(net, batches(4), batches(1))
    assert same(weights(net), follow.trained[-1])


def test_a_resumed_run_continues_averaging() -> None:
    whole, saver = WeightAveraging("ema", 0.8), SavesFirstEpoch()
    net = Net()
    again = copy.deepcopy(net)
    quiet(max_epochs=2, hooks=[whole, saver]).fit(net, batches(4), batches(1))
    rest = WeightAveraging("ema", 0.8)
    quiet(max_epochs=2, hooks=[rest]).fit(again, batches(4), batches(1), resume=saver.path)
    assert rest.updates == whole.updates == 8
    assert same(dict(rest.averages), dict(whole.averages))


def test_half_precision_is_averaged_in_full() -> None:
    net = Net().to(torch.bfloat16)
    hook = WeightAveraging("ema", 0.999)
    data = [(x.to(torch.bfloat16), y.to(torch.bfloat16)) for x, y in batches(4)]
    quiet(hooks=[hook]).fit(net, data, data[:1])
    assert {each.dtype for each in hook.averages.values()} == {torch.float32}
    assert net.layer.weight.dtype == torch.bfloat16


def test_a_second_fit_begins_anew() -> None:
    hook = WeightAveraging("swa")
    trainer, _, _ = average(hook)
    trainer.fit(Net(), batches(1))
    assert hook.updates == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "emma"}, "kind='emma'.*Did you mean 'ema'"),
        ({"decay": 1.5}, "decay=1.5"),
        ({"decay": "x"}, "decay='x'"),
        ({"every": 0}, "every=0"),
        ({"start": "3 lightyears"}, "unknown unit 'lightyears'"),
        ({"buffers": "drop"}, "buffers='drop'"),
        ({"swap_at_end": 1}, "swap_at_end=1"),
        ({"use_for_evaluation": None}, "use_for_evaluation=None"),
    ],
)
def test_wrong_parameters_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((OptionError, HookError), match=message):
        WeightAveraging(**options)


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_each_verb_uses_the_average_from_its_start_to_its_end(verb: str) -> None:
    hook, seen = WeightAveraging("swa"), []
    trainer, follow, net = average(hook)

    class Late(Hook):
        order = 1000  # after the built-in ones

        def on_validation_start(self) -> None:
            seen.append(weights(net))

        on_validation_end = on_test_start = on_test_end = on_predict_start = on_predict_end = (
            on_validation_start
        )

    trainer.add_hook(Late())
    getattr(trainer, verb)(loaders=batches(1))
    assert same(seen[0], dict(hook.averages))
    assert same(seen[1], follow.trained[-1])


def test_a_checkpoint_of_a_failure_holds_the_trained_weights() -> None:
    class Breaks(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            raise ValueError("boom")

    class SaveIt(SavesFirstEpoch):
        def on_exception(self, trainer: Any) -> None:
            trainer.save_checkpoint(reason="exception")

        def on_checkpoint_save(self, module: Any) -> None:
            self.held = weights(module)

    saver, follow = SaveIt(), Follow()
    with pytest.raises(ValueError, match="boom"):
        quiet(hooks=[WeightAveraging("swa"), saver, follow]).fit(Breaks(), batches(4), batches(1))
    assert same(saver.held, follow.trained[-1])


def test_one_that_is_removed_in_the_middle_gives_the_weights_back() -> None:
    net, follow = Net(), Follow()
    trainer = quiet(hooks=[WeightAveraging("swa"), follow])
    trainer.on("validation_batch_end")(lambda: trainer.remove_hook("weight_averaging"))
    trainer.fit(net, batches(4), batches(1))
    assert same(weights(net), follow.trained[-1])
