"""A loss that is NaN or infinite: the run stops one step late and saves nothing, or leaves such updates out."""

from __future__ import annotations

import contextlib
import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet

from hookline import SKIP_STEP, Hook, Line, NonFiniteLoss
from hookline.checkpoint.files import read
from hookline.hooks import ModelCheckpoint
from hookline.report.summary import summarize
from hookline.run.finite import FiniteWatch, all_finite, find_nonfinite


def poisoned(at: int, n: int = 4, value: float = math.nan) -> list[Any]:
    """Batches of which one makes the loss not finite."""
    data = batches(n)
    data[at][1].fill_(value)
    return data


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_run_stops_one_step_late(value: float) -> None:
    trainer = quiet()
    with pytest.raises(
        NonFiniteLoss, match=f"The loss became {value}, in the batch before this one.*NaNGuard"
    ):
        trainer.fit(Net(), poisoned(at=1, value=value))
    assert trainer.status == "error"
    assert trainer.state.batch_idx == 2


def test_a_loss_that_is_not_finite_on_the_very_last_batch_is_noticed() -> None:
    with pytest.raises(NonFiniteLoss):
        quiet().fit(Net(), poisoned(at=3))


def test_nothing_is_saved_from_such_a_loss(tmp_path: Path) -> None:
    class SaveEveryStep(Hook):
        def on_step_end(self, trainer: Any, step: int) -> None:
            trainer.save_checkpoint(tmp_path / f"step-{step}")

    with pytest.raises(NonFiniteLoss):
        quiet(hooks=[SaveEveryStep()]).fit(Net(), poisoned(at=2))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["step-1", "step-2"]


def test_nothing_is_saved_after_the_run_either(tmp_path: Path) -> None:
    trainer = quiet()
    trainer.on("train_epoch_end")(lambda trainer: trainer.save_checkpoint(tmp_path / "last", "last"))
    with pytest.raises(NonFiniteLoss):
        trainer.fit(Net(), poisoned(at=3))
    assert list(tmp_path.iterdir()) == []


def test_skip_leaves_the_update_out_and_says_so() -> None:
    net = Net()
    twin = copy.deepcopy(net)
    reasons: list[str] = []
    trainer = quiet(nonfinite="skip")
    trainer.on("step_skipped")(lambda reason: reasons.append(reason))
    metrics = trainer.fit(net, poisoned(at=1))
    clean = [b for i, b in enumerate(batches(4)) if i != 1]
    expected = quiet().fit(twin, clean)
    assert reasons == ["nonfinite"]
    assert trainer.global_step == 3
    assert torch.equal(net.layer.weight, twin.layer.weight)
    assert metrics["train/loss"] == expected["train/loss"]


def test_the_first_skip_is_a_warning_and_the_summary_counts_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = poisoned(at=1)
    data[3][1].fill_(math.nan)
    quiet(nonfinite="skip", logger=True, run_dir=tmp_path / "x").fit(Net(), data)
    said = [each for each in caplog.messages if "is skipped" in each]
    assert len(said) == 1 and said[0].startswith("The update of epoch 0, batch 1 is skipped")
    (about,) = summarize([tmp_path / "x"])["runs"]
    assert about["skips"] == [
        {"step": 1, "reason": "nonfinite, batch 1"},
        {"step": 2, "reason": "nonfinite, batch 3"},
    ]


def test_skip_leaves_a_whole_window_out() -> None:
    net = Net()
    twin = copy.deepcopy(net)
    trainer = quiet(nonfinite="skip", accumulate_grad_batches=2)
    trainer.fit(net, poisoned(at=0))
    quiet(accumulate_grad_batches=2).fit(twin, batches(4)[2:])
    assert trainer.global_step == 1
    assert torch.equal(net.layer.weight, twin.layer.weight)


def test_skip_does_not_stop_a_manual_run() -> None:
    class Manual(Net):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if loss.isfinite():
                self.optimizers().zero_grad()
                self.manual_backward(loss)
                self.optimizers().step()
            return loss

    trainer = quiet(nonfinite="skip")
    trainer.fit(Manual(), poisoned(at=1))
    assert trainer.global_step == 3


def test_the_watch_reads_nothing_where_reading_would_fail() -> None:
    watch = FiniteWatch(torch.device("meta"))
    watch.look(torch.empty((), device="meta"))
    watch.look(torch.empty((), device="meta"))
    watch.check_now()


# ---- updates that a hook skips -------------------------------------------------------------------------------------


class SkipsAt(Hook):
    """Skips the updates that end with these batches, of these optimizers."""

    def __init__(self, *at: int, optimizers: tuple[int, ...] = (0,)) -> None:
        self.at, self.of = at, optimizers

    def on_before_optimizer_step(self, batch_idx: int, optimizer_idx: int) -> Any:
        return SKIP_STEP if batch_idx in self.at and optimizer_idx in self.of else None


@pytest.mark.parametrize(("accumulate", "bad", "end"), [(1, 1, 1), (1, 5, 5), (2, 2, 3), (3, 0, 2)])
def test_a_loss_whose_update_a_hook_skips_does_not_end_the_run(
    tmp_path: Path, accumulate: int, bad: int, end: int
) -> None:
    """The first, a middle or the last batch of a window; the last update of the run."""
    net = Net()
    twin = copy.deepcopy(net)
    quiet(hooks=[SkipsAt(end), ModelCheckpoint()], accumulate_grad_batches=accumulate, run_dir=tmp_path).fit(
        net, poisoned(at=bad, n=6)
    )
    clean = [each for index, each in enumerate(batches(6)) if index // accumulate != end // accumulate]
    quiet(accumulate_grad_batches=accumulate).fit(twin, clean)
    assert torch.equal(net.layer.weight, twin.layer.weight)


@pytest.mark.parametrize(("accumulate", "at"), [(1, 2), (2, 4), (3, 3)])
def test_a_loss_whose_update_no_hook_skips_ends_the_run(accumulate: int, at: int) -> None:
    """A hook that may skip it is asked first, so the run notices it in the next window."""
    trainer = quiet(hooks=[SkipsAt()], accumulate_grad_batches=accumulate)
    where = "batch" if accumulate == 1 else "update"
    with pytest.raises(NonFiniteLoss, match=f"The loss became nan, in the {where} before this one"):
        trainer.fit(Net(), poisoned(at=2 if accumulate == 2 else 1, n=9))
    assert trainer.state.batch_idx == at


def test_a_window_with_such_a_loss_is_not_saved_while_it_is_open(tmp_path: Path) -> None:
    class Saves(Hook):
        def on_train_batch_end(self, trainer: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                trainer.save_checkpoint(tmp_path / "open")

    with pytest.raises(NonFiniteLoss):
        quiet(hooks=[SkipsAt(2), Saves()], accumulate_grad_batches=3).fit(Net(), poisoned(at=0, n=6))
    assert [*tmp_path.iterdir()] == []


def test_an_update_that_another_optimizer_makes_is_checked() -> None:
    class Two(Net):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD([each], lr=0.1) for each in self.layer.parameters()]

    trainer = quiet(hooks=[SkipsAt(*range(9))])
    with pytest.raises(NonFiniteLoss, match="in the batch before this one"):
        trainer.fit(Two(), poisoned(at=1, n=9))
    assert trainer.state.batch_idx == 2


def test_an_epoch_without_an_update_ends_a_run_whose_weights_are_not_finite() -> None:
    net = Net()
    net.layer.weight.data.fill_(math.nan)
    trainer = quiet(hooks=[SkipsAt(*range(3))], max_epochs=5)
    with pytest.raises(NonFiniteLoss, match="weights are not finite"):
        trainer.fit(net, batches(3))
    assert trainer.current_epoch == 0


def test_the_sum_of_large_losses_in_float16_is_finite() -> None:
    watch, loss = FiniteWatch(torch.device("xpu")), torch.tensor(6e4, dtype=torch.float16)
    watch.look(loss)
    watch.add(loss)
    watch.check_now()
    watch.add(torch.tensor(math.nan, dtype=torch.float16))
    with pytest.raises(NonFiniteLoss):
        watch.check_now()


def test_on_a_gpu_a_loss_is_sent_when_its_update_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def record(self) -> None: ...

        def query(self) -> bool:
            return True

    zeros = torch.zeros
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "zeros", lambda *size, pin_memory, **options: zeros(*size, **options))
    watch = FiniteWatch(torch.device("cuda"))
    good, bad = torch.tensor(1.0), torch.tensor(math.nan)
    for loss in (bad, good, bad, good):
        watch.look(loss)
        if loss is bad:
            watch.drop()
    for loss in (bad, good):
        watch.look(loss)
    with pytest.raises(NonFiniteLoss, match="in an earlier batch"):
        watch.look(good)


# ---- gradients and weights ---------------------------------------------------------------------------------------


class Poisoned(Net):
    """At one batch the loss is finite, and a gradient is not."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + (0 * self.layer.bias[0]).sqrt() if batch_idx == self.at else loss


class PoisonedByHand(Poisoned):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        return loss


@pytest.mark.parametrize("kind", [Poisoned, PoisonedByHand])
def test_skip_leaves_an_update_out_whose_gradient_is_not_finite_though_its_loss_is(
    kind: type[Poisoned], tmp_path: Path
) -> None:
    net = kind(at=1)
    twin = Net()
    twin.load_state_dict(net.state_dict())
    reasons: list[str] = []
    trainer = quiet(nonfinite="skip")
    trainer.on("step_skipped")(lambda reason: reasons.append(reason))
    trainer.on("train_epoch_end")(lambda trainer: trainer.save_checkpoint(tmp_path / "last"))
    metrics = trainer.fit(net, batches(4))
    expected = quiet().fit(twin, [b for i, b in enumerate(batches(4)) if i != 1])
    assert reasons == ["nonfinite"] and trainer.global_step == 3
    assert torch.equal(net.layer.weight, twin.layer.weight)
    assert torch.equal(read(tmp_path / "last")["module"]["layer.weight"], twin.layer.weight)
    assert metrics["train/loss"] == expected["train/loss"]


def test_skip_leaves_a_loss_that_is_not_finite_out_of_a_manual_run_too() -> None:
    reasons: list[str] = []
    trainer = quiet(nonfinite="skip")
    trainer.on("step_skipped")(lambda reason: reasons.append(reason))
    metrics = trainer.fit(PoisonedByHand(at=-1), poisoned(at=1))
    assert reasons == ["nonfinite"] and trainer.global_step == 3 and math.isfinite(metrics["train/loss"])


def test_skip_looks_at_no_gradients_that_a_closure_has_yet_to_make() -> None:
    class Closes(Net):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            def closure() -> Any:
                self.optimizers().zero_grad()
                loss = super(Closes, self).training_step(batch, batch_idx)
                self.manual_backward(loss)
                return loss

            self.layer.bias.grad = torch.full((2,), math.nan)
            self.optimizers().step(closure)

    trainer = quiet(nonfinite="skip")
    trainer.fit(Closes(), batches(3))
    assert trainer.global_step == 3


@pytest.mark.parametrize("how", ["skip", "stop"])
def test_large_gradients_that_are_finite_are_used(how: str) -> None:
    """Their norm is not: it is a sum of squares."""

    class Steep(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return 1e30 * self.layer.weight.sum()

    trainer = quiet(nonfinite=how)
    trainer.fit(Steep(lr=1e-30), batches(2))
    assert trainer.global_step == 2


def test_skip_does_not_save_weights_that_an_update_itself_has_broken(tmp_path: Path) -> None:
    class Breaks(Hook):
        def on_after_optimizer_step(self, module: Any, step: int) -> None:
            if step == 3:
                module.layer.weight.data[0] = math.nan

        def on_step_end(self, trainer: Any, step: int) -> None:
            trainer.save_checkpoint(tmp_path / "last")

    with pytest.raises(NonFiniteLoss, match="weights are not finite"):
        quiet(nonfinite="skip", hooks=[Breaks()]).fit(Net(), batches(6))
    assert read(tmp_path / "last")["counters"]["step"] == 2


def test_an_epoch_in_which_every_update_was_skipped_is_told(caplog: pytest.LogCaptureFixture) -> None:
    data = batches(3)
    for each in data:
        each[1].fill_(math.nan)
    quiet(nonfinite="skip").fit(Net(), data)
    assert (
        "No update was made in epoch 0: 3 were skipped, the last because loss or gradients were not finite"
        in caplog.text
    )
    caplog.clear()
    quiet(nonfinite="skip").fit(Net(), poisoned(at=1))
    assert "No update" not in caplog.text


def test_a_run_that_cannot_recover_stops_at_the_end_of_the_epoch() -> None:
    net = Net()
    net.layer.weight.data.fill_(math.nan)
    trainer = quiet(nonfinite="skip", max_epochs=5)
    with pytest.raises(NonFiniteLoss, match="weights are not finite. A loss or a gradient"):
        trainer.fit(net, batches(2))
    assert trainer.current_epoch == 0


@pytest.mark.parametrize(
    ("losses", "tensors", "expected"),
    [
        ([], [], True),
        ([1.0, 2.0], [], True),
        ([1.0, math.nan], [], False),
        ([torch.tensor(math.inf)], [], False),
        ([torch.tensor([1.0])], [torch.ones(2), torch.empty(0)], True),
        ([], [torch.tensor([1e300], dtype=torch.float64), torch.ones(2)], True),
        ([], [torch.ones(2), torch.tensor([[0.0, math.nan]])], False),
        ([], [torch.tensor([-math.inf, 1.0])], False),
        ([], [torch.tensor([complex(1, math.nan)])], False),
        ([torch.empty((), device="meta")], [torch.empty(2, device="meta")], True),
    ],
)
def test_what_counts_as_finite(losses: list[Any], tensors: list[torch.Tensor], expected: bool) -> None:
    assert all_finite(losses, tensors) is expected


def test_gradients_of_sparse_layers_are_looked_at() -> None:
    class Sparse(Net):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(5, 2, sparse=True)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            rows = self.table(torch.tensor([1, 3])).sum()
            return rows + (0 * rows).sqrt() if batch_idx == 1 else rows

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.table.parameters(), lr=0.1)

    net, trainer = Sparse(), quiet(nonfinite="skip")
    trainer.fit(net, batches(3))
    assert trainer.global_step == 2 and bool(net.table.weight.isfinite().all())


@pytest.mark.parametrize("last", [False, True])
def test_a_gradient_that_breaks_the_weights_under_a_finite_loss_is_never_saved(last: bool) -> None:
    class Breaks(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return (
                loss + (self.layer.weight * 0).norm(p=1).sqrt() if batch_idx == 3 else loss
            )  # sqrt(0): its gradient is no number

    trainer = quiet(run_dir="run", hooks=[ModelCheckpoint(every_n_train_steps=2)])
    with pytest.raises(NonFiniteLoss, match="weights are not finite. A loss or a gradient"):
        trainer.fit(Breaks(), batches(4 if last else 6))
    assert [each.name for each in Path("run/checkpoints").iterdir()] == ["epoch=0-step=2"]


def test_a_parameter_that_is_not_trained_may_hold_what_it_likes() -> None:
    net = Net()
    net.mask = torch.nn.Parameter(torch.full((2,), -math.inf), requires_grad=False)
    trainer = quiet(run_dir="run", hooks=[ModelCheckpoint()])
    trainer.fit(net, batches(2))
    assert trainer.status == "completed"


# ---- the optimizer's state ---------------------------------------------------------------------------------------


class Breaks(Hook):
    """Puts a number into the optimizer's state, the weights being what they are."""

    def __init__(self, at: int, value: float = math.nan, key: str = "exp_avg_sq") -> None:
        self.at, self.value, self.key = at, value, key

    def on_step_end(self, step: int, optimizers: Any) -> None:
        if step == self.at:
            next(iter(optimizers[0].state.values()))[self.key].view(-1)[0] = self.value


class WithMoments(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("save", ["sync", "async"])
def test_an_optimizer_state_that_is_not_finite_is_never_saved(
    tmp_path: Path, value: float, save: str
) -> None:
    keep = ModelCheckpoint(every_n_train_steps=1, filename="newest")
    trainer = quiet(run_dir=tmp_path, save=save, hooks=[Breaks(3, value), keep])
    with pytest.raises(
        NonFiniteLoss,
        match=r"The optimizer's state is not finite, though the weights are: AdamW \(exp_avg_sq\)",
    ):
        trainer.fit(net := WithMoments(), batches(4))
    assert all(each.isfinite().all() for each in net.parameters())
    saved = read(tmp_path / "checkpoints" / "newest")
    assert saved["counters"]["step"] == 2
    assert all(
        each.isfinite().all() for state in saved["optimizers"][0]["state"].values() for each in state.values()
    )
    with pytest.raises(NonFiniteLoss):
        trainer.save_checkpoint(tmp_path / "after")
    assert not (tmp_path / "after").exists()


def test_counts_and_numbers_of_another_kind_are_not_looked_at(tmp_path: Path) -> None:
    class Counts(Hook):
        def on_step_end(self, optimizers: Any) -> None:
            state = next(iter(optimizers[0].state.values()))
            state.update(step=torch.tensor(math.inf), seen=torch.tensor(3), best=math.inf, name="x")

    quiet(run_dir=tmp_path, hooks=[Counts(), ModelCheckpoint(every_n_train_steps=1)]).fit(
        WithMoments(), batches(2)
    )
    assert (tmp_path / "checkpoints").is_dir()


def test_state_in_lists_is_looked_at_too(tmp_path: Path) -> None:
    class Searches(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1)

    class BreaksDirections(Hook):
        def on_step_end(self, step: int, optimizers: Any) -> None:
            if step == 3:
                next(iter(optimizers[0].state.values()))["old_dirs"][0][0] = math.nan

    with pytest.raises(NonFiniteLoss, match="The optimizer's state is not finite"):
        quiet(run_dir=tmp_path, hooks=[BreaksDirections(), ModelCheckpoint(every_n_train_steps=1)]).fit(
            Searches(), batches(4)
        )
    assert [each.name for each in (tmp_path / "checkpoints").iterdir()] == ["epoch=0-step=2"]


def test_a_run_that_saves_nothing_is_not_ended_by_it() -> None:
    trainer = quiet(hooks=[Breaks(4)])
    trainer.fit(WithMoments(), batches(4))
    assert trainer.status == "completed"


def test_the_whole_state_is_looked_at_with_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = WithMoments()
    trainer = quiet()
    trainer.fit(net, batches(2))
    reads = []
    item = torch.Tensor.item
    monkeypatch.setattr(torch.Tensor, "item", lambda self: reads.append(1) or item(self))
    assert find_nonfinite(trainer.state.optimizers) == "" and len(reads) == 1


def test_a_loop_written_by_hand_does_not_save_it_either(tmp_path: Path) -> None:
    net = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    for breaks in (False, True):
        refused = pytest.raises(NonFiniteLoss, match="optimizer's state is not finite")
        with refused if breaks else contextlib.nullcontext(), Line(net, optimizer, run_dir=tmp_path) as line:
            for batch in line.epoch(batches(2)):
                optimizer.zero_grad()
                line.backward(torch.nn.functional.mse_loss(net(batch[0]), batch[1]))
                optimizer.step()
            if breaks:
                optimizer.state[net.weight]["exp_avg"].fill_(math.nan)
            line.save_checkpoint(tmp_path / "good")
    assert read(tmp_path / "good")["optimizers"][0]["state"][0]["exp_avg"].isfinite().all()


def test_weights_that_are_not_finite_are_reported_before_the_first_step_and_at_the_loss(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = Net()
    with torch.no_grad():
        module.layer.weight.fill_(float("nan"))
    with pytest.raises(
        NonFiniteLoss, match=r"The weights of the module in memory are not finite any more: make"
    ):
        quiet().fit(module, batches())
    assert "layer.weight are not finite before the first step: make the module again" in caplog.text
