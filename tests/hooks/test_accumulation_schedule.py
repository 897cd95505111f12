"""AccumulationSchedule: other numbers of batches per update from a step or an epoch on, exact across a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_budgets import is_ours, per_step, with_hooks, without_hooks
from tiny import Net, batches, quiet, step_graphs
from torch import Tensor

from hookline import Hook, HookError, Line, Mixture, OptionError
from hookline.hooks import AccumulationSchedule, LRSchedule
from hookline.training.accumulation import AccumulatedStep
from hookline.training.step import TrainStep
from hookline.util.errors import HooklineError


class Windows(Hook):
    """The batches of each update, the losses that were reported for it, and a checkpoint after every batch."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.sizes: list[int] = []
        self.losses: list[float] = []
        self.kinds: list[type] = []
        self.open = 0

    def on_train_batch_start(self, trainer: Any) -> None:
        self.kinds.append(type(trainer._run.step))

    def on_train_batch_end(self, trainer: Any, batches_seen: int) -> None:
        self.open += 1
        if self.folder is not None:
            trainer.save_checkpoint(self.folder / f"after-{batches_seen}")

    def on_step_end(self, loss: float) -> None:
        self.sizes.append(self.open)
        self.losses.append(loss)
        self.open = 0


class Stateful(Net):
    """A net whose optimizer has momentum, so that a wrong update shows for ever."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def fit(schedule: Any, data: Any, resume: Any = None, folder: Path | None = None, **options: Any) -> Any:
    torch.default_generator.manual_seed(0)
    windows, net = Windows(folder), Stateful()
    quiet(hooks=[AccumulationSchedule(schedule), windows], **options).fit(net, data, resume=resume)
    return windows, net


@pytest.mark.parametrize(
    ("schedule", "options", "sizes"),
    [
        ({"0 epochs": 4, "1 epoch": 2, "2 epochs": 1}, {}, [4, 3] + [2, 2, 2, 1] + [1] * 7),
        ({2: 3}, {}, [1, 1, 3, 2] + [3, 3, 1] * 2),
        ({2: 3}, {"accumulate_grad_batches": 2}, [2, 2, 3] + [3, 3, 1] * 2),
        ({0: 3, "2 steps": 1, "5": 2}, {}, [3, 3, 1] + [1, 1, 2, 2, 1] + [2, 2, 2, 1]),
        ({0: 2, "1 epoch": 3, 6: 1}, {}, [2, 2, 2, 1] + [3, 3, 1] + [1] * 7),
        ({0: 2, "4 steps": 4}, {"accumulate_by": "samples"}, [2, 2, 2, 1] + [4, 3] * 2),
        ({0: 1, 3: 2, 5: 1}, {"nonfinite": "skip"}, [1, 1, 1, 2, 2] + [1] * 14),
    ],
    ids=str,
)
def test_a_number_holds_from_the_first_window_after_its_moment(
    schedule: Any, options: dict[str, Any], sizes: list[int]
) -> None:
    windows, _ = fit(schedule, batches(7), max_epochs=3, **options)
    assert windows.sizes == sizes


def test_an_update_is_that_of_a_loop_with_this_many_batches_and_reports_their_mean_loss() -> None:
    data = batches(9)
    windows, net = fit({0: 3, 2: 1, 4: 2}, data)
    assert windows.sizes == [3, 3, 1, 1, 1]  # the last window of the epoch is short
    torch.default_generator.manual_seed(0)
    bare, losses, first = Stateful(), [], 0
    optimizer = bare.configure_optimizers()
    for size in windows.sizes:
        loss = torch.stack([bare.training_step(each, 0) for each in data[first : first + size]]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        first += size
    assert windows.losses == pytest.approx(losses, rel=1e-5)
    assert torch.allclose(net.layer.weight, bare.layer.weight, rtol=1e-5)


def test_windows_of_one_batch_have_the_plain_step_again() -> None:
    windows, _ = fit({0: 1, 2: 2, 4: 1}, batches(8))
    assert windows.kinds == [TrainStep] * 2 + [AccumulatedStep] * 4 + [TrainStep] * 2


CUT = {0: 3, "2 steps": 1, "1 epoch": 4, "5 steps": 2}


@pytest.fixture(scope="module", name="whole")
def _whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run that was not interrupted, in each weighting, with a checkpoint after every batch."""
    found = {}
    for by in ("batches", "samples"):
        folder = tmp_path_factory.mktemp(by)
        data = [(inputs[: 1 + n % 3], targets[: 1 + n % 3]) for n, (inputs, targets) in enumerate(batches(8))]
        found[by] = folder, data, fit(CUT, data, folder=folder, max_epochs=3, accumulate_by=by)
    return found


@pytest.mark.parametrize("by", ["batches", "samples"])
@pytest.mark.parametrize("cut", [1, 3, 7, 8, 9, 11, 13, 17, 23])
def test_a_run_that_resumes_anywhere_makes_the_same_updates_to_the_bit(
    whole: Any, cut: int, by: str, tmp_path: Path
) -> None:
    folder, data, (windows, net) = whole[by]
    assert windows.sizes == [3, 3, 1, 1] + [4, 2, 2] + [2] * 4
    resumed, other = fit(CUT, data, resume=folder / f"after-{cut}", max_epochs=3, accumulate_by=by)
    assert torch.equal(net.layer.weight, other.layer.weight) and torch.equal(net.layer.bias, other.layer.bias)
    count = len(resumed.losses)
    assert count and windows.losses[-count:] == resumed.losses


def test_a_hook_of_the_user_may_set_the_number_too_and_also_inside_a_window() -> None:
    seen: list[tuple[int, int]] = []

    class Sets(Hook):
        def on_train_batch_end(self, trainer: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                trainer.accumulate_grad_batches = 1
            seen.append((batch_idx, trainer.accumulate_grad_batches))

    windows = Windows()
    trainer = quiet(hooks=[Sets(), windows], accumulate_grad_batches=4)
    trainer.fit(Net(), batches(7))
    assert windows.sizes == [4, 1, 1, 1] and seen[0] == (0, 4) and seen[1] == (1, 1)
    losses = windows.losses
    assert losses[0] != pytest.approx(losses[1])
    assert trainer.accumulate_grad_batches == 4  # the option, once the run is over
    trainer.accumulate_grad_batches = 2
    assert trainer.options.accumulate_grad_batches == 2
    with pytest.raises(OptionError, match="accumulate_grad_batches=0 must be a whole number from 1"):
        trainer.accumulate_grad_batches = 0


def test_the_loss_of_a_window_that_is_open_when_the_number_changes_is_still_its_mean() -> None:
    def losses(*hooks: Hook) -> list[float]:
        torch.default_generator.manual_seed(0)
        windows = Windows()
        quiet(hooks=[*hooks, windows], accumulate_grad_batches=3).fit(Net(), batches(3))
        return windows.losses

    class Sets(Hook):
        def on_train_batch_end(self, trainer: Any, batch_idx: int) -> None:
            trainer.accumulate_grad_batches = 1

    assert losses(Sets()) == losses()


def test_the_learning_rate_schedule_ends_with_the_run() -> None:
    class Rates(Hook):
        def __init__(self) -> None:
            self.seen: list[float] = []

        def on_step_end(self, lr: float) -> None:
            self.seen.append(lr)

    for schedule, updates in (({"0 epochs": 4, "1 epoch": 2}, 2 + 4), ({1: 2, 3: 7}, 3 + 1 + 1)):
        rates = Rates()
        hooks = [AccumulationSchedule(schedule), LRSchedule("linear"), rates]
        quiet(hooks=hooks, max_epochs=2).fit(Net(lr=1.0), batches(7 if 1 not in schedule else 6))
        assert rates.seen == pytest.approx([1 - n / updates for n in range(updates)])


def test_the_updates_of_a_long_run_are_counted_without_walking_through_it() -> None:
    hook = AccumulationSchedule({0: 8, "1000 steps": 2, "2 epochs": 1})
    assert hook.count_updates(10**9, 3, 1) == 1000 + (10**9 - 8000) // 2 + 10**9 // 2 + 10**9
    assert hook.count_updates(10**9, 3, 1, most=5000) == 5000


class ByHand(Net):
    automatic_optimization = False


class Searching(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=2)


class Twice(Net):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]


ROUTED = {"mixture": Mixture("weighted", {"a": 1, "b": 1}, epoch_length=4, optimizers={"a": 0, "b": 1})}


@pytest.mark.parametrize(
    ("net", "options", "fitted", "text"),
    [
        (ByHand, {}, {}, "2 batches from 5 steps on: Manual optimization accumulates by itself"),
        (Searching, {}, {}, r"2 batches from 5 steps on: .*LBFGS.*accumulate_grad_batches > 1"),
        (Twice, {}, ROUTED, "2 batches from 5 steps on: Mixture: optimizers 0 and 1 train the same"),
        pytest.param(
            Net,
            {"compile": {"step": True, "backend": "aot_eager", "fullgraph": True}},
            {},
            "fullgraph=True makes one graph",
            marks=step_graphs,
        ),
        (Net, {"accumulate_grad_batches": 4}, {}, "accumulate_grad_batches=4 would never be used"),
    ],
    ids=["manual", "LBFGS", "router", "fullgraph", "option"],
)
def test_a_number_that_the_run_cannot_have_is_refused_before_the_first_step(
    net: Any, options: dict[str, Any], fitted: dict[str, Any], text: str
) -> None:
    data = {"a": batches(2), "b": batches(2)} if fitted else batches(2)
    trainer = quiet(hooks=[AccumulationSchedule({0: 1, 5: 2})], **options)
    if "accumulate_grad_batches" in options:
        trainer = quiet(hooks=[AccumulationSchedule({0: 2})], **options)
    with pytest.raises(OptionError, match=text):
        trainer.fit(net(), data, **fitted)
    assert trainer.global_step == 0


@step_graphs
def test_a_compiled_step_follows_the_schedule() -> None:
    def weights(**options: Any) -> tuple[list[int], Tensor]:
        windows, net = fit({0: 1, 2: 2}, batches(6), **options)
        return windows.sizes, net.layer.weight

    sizes, weight = weights()
    compiled, other = weights(compile={"step": True, "backend": "aot_eager"})
    assert sizes == compiled == [1, 1, 2, 2]
    # AdamW divides by small gradients, which makes the last digits of a float32 sum larger; a wrong window moves by lr, 0.1
    assert torch.allclose(weight, other, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        ({}, "must be a mapping such as"),
        ([8], "must be a mapping such as"),
        ({"2 epochs": 0}, "the batches from '2 epochs' on=0 must be a whole number from 1"),
        ({0: True}, "on=True must be a whole number"),
        ({0: 1.5}, "on=1.5 must be a whole number"),
        ({"soon": 2}, "soon"),
        ({"1 hour": 2}, "'1 hour' is not a moment"),
        ({"3 epoch s": 2}, "3 epoch s"),
        ({-1: 2}, "-1 is not a moment"),
    ],
    ids=str,
)
def test_a_wrong_schedule_is_refused_when_it_is_written(schedule: Any, text: str) -> None:
    with pytest.raises(HooklineError, match=text):
        AccumulationSchedule(schedule)


def test_moments_of_epochs_cost_a_step_nothing_and_those_of_steps_one_comparison() -> None:
    class Looks(Hook):
        def on_step_end(self, step: int, state: Any) -> None: ...

    assert per_step(with_hooks(AccumulationSchedule({"5 epochs": 2})), is_ours) == without_hooks(is_ours)
    by_steps = per_step(lambda data: with_hooks(AccumulationSchedule({10**6: 2}))(data))
    assert by_steps <= per_step(lambda data: with_hooks(Looks())(data))


def test_a_loop_that_accumulates_itself_refuses_it() -> None:
    with pytest.raises(HookError, match="which a loop with hookline.Line does not offer to hooks"):
        Line(Net(), None, hooks=[AccumulationSchedule({0: 2})])
