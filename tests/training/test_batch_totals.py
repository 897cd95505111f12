"""Weighted gradient accumulation: uneven micro-batches make the update of one large batch."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from distributed.threads import on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import Net, batches, quiet
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training.weighted import (
    CLOSE,
    Batch,
    Heard,
    Tokens,
    assert_close,
    by_tokens,
    count,
    large,
    trained,
    uneven,
    windows,
)

from hookline import CheckpointError, Hook, Mixture, OptionError
from hookline.data.sharding import RankBatch
from hookline.distributed.comm import Ranks
from hookline.run.state import State
from hookline.training.batch_totals import BatchTotals, SharedLoss

"""How far sums of float64 in another order may be apart."""
MANY = 65_536


def assert_same(a: nn.Module, b: nn.Module) -> None:
    for (name, mine), (_, theirs) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name


# ---- equal to one large batch ------------------------------------------------------------------------------------


@settings(max_examples=40)  # each trains twice
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=7),
    window=st.integers(1, 4),
    optimizer=st.sampled_from(["sgd", "adamw"]),
    clip=st.sampled_from(
        [{}, {"gradient_clip_val": 0.05}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}]
    ),
)
def test_samples_split_in_any_way_make_the_update_of_one_large_batch(
    sizes: list[int], window: int, optimizer: str, clip: dict[str, Any]
) -> None:
    data = uneven(*(6 * size for size in sizes))
    many = trained(
        data, optimizer, accumulate_by="samples", accumulate_grad_batches=window, max_epochs=2, **clip
    )
    assert_close(many, trained(windows(data, window), optimizer, max_epochs=2, **clip))


@settings(max_examples=40)
@given(tokens=st.lists(st.integers(0, 40), min_size=2, max_size=7), window=st.integers(1, 4))
def test_tokens_split_in_any_way_make_the_update_of_one_large_batch(tokens: list[int], window: int) -> None:
    data = uneven(*tokens)
    whole = [each for each in windows(data, window) if count(each)]
    if whole:
        many = by_tokens(data, "adamw", accumulate_grad_batches=window)
        assert_close(many, trained(whole, "adamw"))


def test_without_weights_the_mean_of_means_is_another_update() -> None:
    data = uneven(30, 2, 11)
    net, whole = trained(data, accumulate_grad_batches=3), trained(windows(data, 3))
    assert not torch.allclose(net.first.weight, whole.first.weight, rtol=0, atol=1e-6)


# ---- batches that hold nothing -----------------------------------------------------------------------------------


# ---- other ways to train -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["samples", "tokens"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lbfgs"])
def test_on_one_process_without_accumulation_nothing_changes(by: str, optimizer: str) -> None:
    data = uneven(30, 2, 11, 5)
    options = {"max_epochs": 2, "gradient_clip_val": 0.5} if optimizer != "lbfgs" else {"max_epochs": 2}
    assert_same(trained(data, optimizer, accumulate_by=by, **options), trained(data, optimizer, **options))


def test_losses_of_several_loaders_keep_their_weights() -> None:
    data = {"a": uneven(30, 2), "b": uneven(11, 5)}
    mixture = Mixture(order="round_robin", loss_weights={"b": 3.0})
    net = Tokens()
    quiet(count_tokens=count, accumulate_by="tokens", accumulate_grad_batches=4).fit(
        net, data, mixture=mixture
    )
    twin = Tokens()
    optimizer = twin.configure_optimizers()
    losses = [
        twin.training_step(each) * count(each) * weight
        for name, weight in (("a", 1.0), ("b", 3.0))
        for each in data[name]
    ]
    (torch.stack(losses).sum() / 48).backward()
    optimizer.step()
    assert_close(net, twin)


def test_each_optimizer_counts_the_batches_that_train_it() -> None:
    class Two(Tokens):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.first, self.last)]

    data = {"a": uneven(30, 2), "b": uneven(11, 5)}
    mixture = Mixture(order="round_robin", optimizers={"a": [0], "b": [1]})
    net, twin = Two(), Two()
    quiet(count_tokens=count, accumulate_by="tokens", accumulate_grad_batches=4).fit(
        net, data, mixture=mixture
    )
    for name, part in (("a", twin.first), ("b", twin.last)):
        loss = twin.training_step(large(data[name]))
        for parameter, grad in zip(
            part.parameters(), torch.autograd.grad(loss, list(part.parameters())), strict=True
        ):
            parameter.grad = grad
    for optimizer in twin.configure_optimizers():
        optimizer.step()
    assert_close(net, twin)


def test_float16_does_not_overflow_by_the_number_of_tokens() -> None:
    data = [(0.1 * x, 0.1 * y) for x, y in batches(4)]  # small enough for the scale that a scaler begins with
    data[1] = (data[1][0][:1], data[1][1][:1])
    heard, found = Heard(), []
    for precision in ("16-mixed", 32):
        torch.manual_seed(3)
        net = Net(lr=0.01)
        quiet(
            accumulate_by="tokens",
            count_tokens=lambda batch: MANY * len(batch[0]),
            accumulate_grad_batches=2,
            hooks=[heard],
            precision=precision,
            device="cpu",
        ).fit(net, data)
        found.append(net.layer.weight)
    assert heard.skips == []
    assert torch.allclose(*found, rtol=0, atol=1e-3)


def test_an_update_does_not_depend_on_the_windows_before_it() -> None:
    """The reference that losses are scaled by comes from the window before, and changes no digit."""

    class Still(Tokens):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    class Start(Hook):
        def __init__(self, net: nn.Module) -> None:
            self.weights = copy.deepcopy(net.state_dict())

        def on_step_end(self, step: int, module: nn.Module) -> None:
            if step == 1:
                module.load_state_dict(self.weights)

    found = []
    for before in (1, 3000):
        net = Still()
        data = [*uneven(before, 2 * before), *uneven(13, 29)]
        quiet(count_tokens=count, accumulate_by="tokens", accumulate_grad_batches=2, hooks=[Start(net)]).fit(
            net, data
        )
        found.append(net)
    assert_same(*found)


# ---- what is measured --------------------------------------------------------------------------------------------


def test_losses_of_windows_rows_and_epochs_are_means_over_tokens() -> None:
    data, heard, whole = uneven(30, 2, 11, 5), Heard(), Heard()
    here = quiet(
        count_tokens=count,
        accumulate_by="tokens",
        accumulate_grad_batches=2,
        hooks=[heard],
        log_every_n_steps=1,
    )
    there = quiet(hooks=[whole], count_tokens=count, log_every_n_steps=1)
    found = here.fit(Tokens(), data)
    there.fit(Tokens(), windows(data, 2))
    assert heard.losses == pytest.approx(whole.losses, abs=CLOSE)
    assert heard.rows[:2] == pytest.approx(whole.losses, abs=CLOSE)
    means = whole.losses
    assert found["train/loss"] == pytest.approx((32 * means[0] + 16 * means[1]) / 48, abs=CLOSE)
    assert heard.tokens == 48
    assert here.state.samples_seen == sum(len(each["x"]) for each in data)


def test_tokens_are_counted_once_per_batch() -> None:
    calls = 0

    def counting(batch: Batch) -> int:
        nonlocal calls
        calls += 1
        return count(batch)

    by_tokens(uneven(30, 2, 11, 5), accumulate_grad_batches=2, count_tokens=counting, hooks=[Heard()])
    assert calls == 4


# ---- resume ------------------------------------------------------------------------------------------------------


class SaveAt(Hook):
    def __init__(self, folder: Path, at: int) -> None:
        self.folder, self.at = folder, at

    def on_train_batch_end(self, trainer: Any, batches_seen: int) -> None:
        if batches_seen == self.at:
            trainer.save_checkpoint(self.folder / "cut")


@pytest.mark.parametrize("at", range(1, 7))
@pytest.mark.parametrize("more", [{}, {"nonfinite": "skip"}])
def test_a_resume_inside_a_window_is_exact(tmp_path: Path, at: int, more: dict[str, Any]) -> None:
    data = uneven(30, 2, 11, 5, 17, 9, 23)
    options: dict[str, Any] = {
        "count_tokens": count,
        "accumulate_by": "tokens",
        "accumulate_grad_batches": 3,
        **more,
    }
    trainer = quiet(hooks=[SaveAt(tmp_path, at)], run_dir=tmp_path / "run", **options)
    whole = trainer.fit(net := Tokens("adamw"), data)
    again = Tokens("adamw")
    found = quiet(run_dir=tmp_path / "again", **options).fit(again, data, resume=tmp_path / "cut")
    assert_same(again, net)
    assert found["train/loss"] == whole["train/loss"]


@pytest.mark.parametrize(
    ("before", "after"), [("batches", "tokens"), ("samples", "tokens"), ("tokens", "batches")]
)
def test_a_window_cannot_be_continued_with_other_weights(tmp_path: Path, before: str, after: str) -> None:
    data = uneven(30, 2, 11, 5)
    options: dict[str, Any] = {"count_tokens": count, "accumulate_grad_batches": 2}
    for at, name in ((1, "inside"), (2, "between")):
        trainer = quiet(
            hooks=[SaveAt(tmp_path / name, at)],
            run_dir=tmp_path / f"run-{name}",
            accumulate_by=before,
            **options,
        )
        trainer.fit(Tokens(), data)
    other = quiet(run_dir=tmp_path / "other", accumulate_by=after, **options)
    with pytest.raises(
        CheckpointError, match=f"accumulate_by='{before}', and this run has '{after}'. Resume with '{before}'"
    ):
        other.fit(Tokens(), data, resume=tmp_path / "inside" / "cut")
    other.fit(Tokens(), data, resume=tmp_path / "between" / "cut")
    assert other.global_step == 2


# ---- mistakes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "hint"),
    [("token", "Did you mean 'tokens'"), ("sample", "Did you mean 'samples'"), (None, "allowed")],
)
def test_an_unknown_way_to_count_is_refused_with_the_nearest_name(given: Any, hint: str) -> None:
    with pytest.raises(
        OptionError, match=f"accumulate_by={given!r}, allowed: 'batches', 'samples', 'tokens'.*{hint}|{hint}"
    ):
        quiet(accumulate_by=given)


def test_manual_optimization_refuses_to_weigh() -> None:
    class Manual(Net):
        automatic_optimization = False

    with pytest.raises(OptionError, match="leave accumulate_by at 'batches', not 'samples'"):
        quiet(accumulate_by="samples").fit(Manual(), batches())


@pytest.mark.parametrize("found", [-1, 2.5, float("nan"), float("inf"), None, "3", torch.tensor([1, 2])])
def test_a_count_that_is_not_a_whole_number_is_refused(found: Any) -> None:
    with pytest.raises(OptionError, match="count_tokens returned .* needs a whole number of tokens from 0"):
        by_tokens(uneven(30, 2), count_tokens=lambda batch: found)


def test_a_count_may_be_a_tensor_of_one_number() -> None:
    data = uneven(30, 2, 11)
    net = by_tokens(data, accumulate_grad_batches=3, count_tokens=lambda batch: batch["mask"].sum())
    assert_same(net, by_tokens(data, accumulate_grad_batches=3))


def test_hooks_hear_the_loss_as_the_step_returned_it() -> None:
    heard: list[float] = []
    data = uneven(30, 2)
    trainer = quiet(count_tokens=count, accumulate_by="tokens", accumulate_grad_batches=2)
    trainer.on("train_batch_end")(lambda loss: heard.append(loss))
    net = Tokens()
    expected = [net.training_step(each).item() for each in data]
    trainer.fit(net, data)
    assert heard == expected


def test_every_order_of_the_same_batches_makes_the_same_update() -> None:
    data = uneven(30, 2, 11)
    first, *others = (
        by_tokens([data[index] for index in order], accumulate_grad_batches=3)
        for order in itertools.permutations(range(3))
    )
    for each in others:
        assert_close(each, first)


# ---- Totals of a batch: samples, tokens and losses over ranks, and a padding batch that counts nothing


def in_a_run(look: Callable[[Any], None], **options: Any) -> None:
    """Call a function with the run of a fit, at the end of its first batch."""
    seen: list[int] = []

    class Looks(Hook):
        def on_train_batch_end(self, trainer: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                look(trainer._run)
                seen.append(batch_idx)

    data = TensorDataset(torch.randn(6, 4), torch.randn(6, 2))
    quiet(hooks=[Looks()], **options).fit(Net(), DataLoader(data, batch_size=3))
    assert seen == [0]


def shared(*of_ranks: tuple[float, float]) -> float:
    """The loss that all ranks read, from each one's weighted sum and weight."""

    def read(ranks: Ranks) -> float:
        return float(SharedLoss(ranks.add_up(torch.tensor(of_ranks[ranks.rank], dtype=torch.float64))))

    first, *others = on_ranks(len(of_ranks), read)
    assert isinstance(first, float) and all(repr(each) == repr(first) for each in others)
    return first


def test_the_loss_over_ranks_is_weighted_and_a_rank_without_a_loss_counts_nothing() -> None:
    assert shared((2.0, 1.0), (9.0, 3.0)) == 11.0 / 4.0
    assert shared((0.0, 0.0), (9.0, 3.0)) == 3.0
    assert math.isnan(shared((0.0, 0.0), (0.0, 0.0)))


def test_samples_and_tokens_are_summed_over_ranks() -> None:
    def count(ranks: Ranks) -> Any:
        run: Any = SimpleNamespace(
            data=SimpleNamespace(
                loaders={"train": []}, is_mixture=False, count_tokens=lambda batch: 10 * (ranks.rank + 1)
            ),
            plan=SimpleNamespace(wanted={"tokens_seen"}),
            boundary=SimpleNamespace(waits_for_signals=False),
            strategy=SimpleNamespace(ranks=ranks),
        )
        totals, s = BatchTotals(run, RankBatch()), State()
        assert totals.begin(s, 3 + ranks.rank) == 3 + ranks.rank
        assert (s.samples_seen, s.tokens_seen) == (0, 0)  # read when the batch is over
        totals.count(s)
        return s.samples_seen, s.tokens_seen

    assert on_ranks(2, count) == [(7, 30)] * 2


def test_a_padding_batch_weighs_nothing_and_leaves_log_and_buffers_alone() -> None:
    def look(run: Any) -> None:
        s, log = run.state, run.state.log
        run.module.register_buffer("seen", torch.zeros(1))
        totals = BatchTotals(run, RankBatch(is_padding=True))
        assert totals.begin(s, 3) == 0
        assert s.log is not log
        s.log.log("loss", 100.0, True, False, False, "mean", None)
        run.module.seen += 1
        assert totals.loss_weight(s) == 0.0
        totals.end_backward(run.window, 0.0)
        assert run.module.seen.item() == 0
        totals.end(s)
        assert s.log is log and log.newest.get("loss") != 100.0 and log.weight == 0

    in_a_run(look)


def test_known_samples_are_counted_without_asking_the_ranks() -> None:
    def look(run: Any) -> None:
        totals, s = BatchTotals(run, RankBatch(samples=8)), run.state
        run.boundary.waits_for_signals = False
        before = s.samples_seen
        totals.begin(s, 3)
        assert totals._answer is None
        totals.count(s)
        assert s.samples_seen - before == 8

    in_a_run(look)


@pytest.mark.parametrize(
    ("losses", "weights", "expected"),
    [
        ([2.0, 4.0], [1.0, 3.0], [14.0, 4.0]),
        ([None, 4.0], [1.0, 2.0], [8.0, 2.0]),
        ([5.0], [0.0], [0.0, 0.0]),
    ],
)
def test_losses_of_a_window_are_weighed_and_missing_ones_left_out(
    losses: list[Any], weights: list[float], expected: list[float]
) -> None:
    in_a_run(lambda run: assert_equal(BatchTotals(run, RankBatch())._weighed(losses, weights), expected))


def assert_equal(found: torch.Tensor, expected: list[float]) -> None:
    assert found.tolist() == expected
