"""`StepContext`: an update as one object, in a run and by hand."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from typing import Any

import pytest
import torch
from metrics.reads import CountReads
from tiny import Net, batches, quiet

from hookline import Hook, StepContext


class Keeps(Hook):
    """Keeps every context, as a user who looks at them after the run would."""

    def __init__(self) -> None:
        self.contexts: list[StepContext] = []

    def on_step_end(self, ctx: StepContext) -> None:
        self.contexts.append(ctx)


def test_it_can_be_made_by_hand_to_test_a_hook() -> None:
    ctx = StepContext(step=3, loss=0.5, grad_norm=1.0, lr=1e-3, tokens_seen=7)
    hook = Keeps()
    hook.on_step_end(ctx)
    assert (ctx.step, ctx.loss, ctx.grad_norm, ctx.lr, ctx.tokens_seen) == (3, 0.5, 1.0, 1e-3, 7)
    assert (ctx.epoch, ctx.rank, ctx.world_size, ctx.metrics, ctx.model) == (0, 0, 1, {}, None)
    assert repr(ctx) == "StepContext(step=3, loss=0.5, grad_norm=1, lr=0.001)"


def test_it_compares_like_the_dataclass_of_its_document() -> None:
    model, optimizer = object(), object()
    ctx = StepContext(1, torch.tensor(0.5), 2.0, 0.1, 5, model, optimizer, epoch=3, metrics={"loss": 0.5})
    assert ctx == StepContext(1, 0.5, torch.tensor(2.0), 0.1, 5, model, optimizer)
    assert StepContext() == StepContext()
    others = [
        (2, 0.5, 2.0, 0.1, 5, model, optimizer),
        (1, 0.6, 2.0, 0.1, 5, model, optimizer),
        (1, 0.5, 2.1, 0.1, 5, model, optimizer),
        (1, 0.5, 2.0, 0.2, 5, model, optimizer),
        (1, 0.5, 2.0, 0.1, 6, model, optimizer),
        (1, 0.5, 2.0, 0.1, 5, object(), optimizer),
        (1, 0.5, 2.0, 0.1, 5, model, object()),
    ]
    assert all(ctx != StepContext(*fields) for fields in others)
    assert ctx != (1, 0.5, 2.0, 0.1, 5, model, optimizer)
    with pytest.raises(TypeError, match="unhashable"):  # as of every dataclass that can be changed
        hash(ctx)


def test_it_is_a_dataclass_to_those_who_ask() -> None:
    seven = ["step", "loss", "grad_norm", "lr", "tokens_seen", "model", "optimizer"]
    assert dataclasses.is_dataclass(StepContext)
    assert [each.name for each in dataclasses.fields(StepContext)] == [
        *seven,
        "epoch",
        "rank",
        "world_size",
        "metrics",
    ]
    assert [each.name for each in dataclasses.fields(StepContext) if each.compare] == seven
    ctx = StepContext(1, torch.tensor(0.5), 2.0, 0.1, 5, metrics={"loss": 0.5})
    assert dataclasses.replace(ctx, step=2) == StepContext(2, 0.5, 2.0, 0.1, 5)
    assert dataclasses.asdict(ctx) == {
        **dict(zip(seven, (1, 0.5, 2.0, 0.1, 5, None, None), strict=True)),
        "epoch": 0,
        "rank": 0,
        "world_size": 1,
        "metrics": {"loss": 0.5},
    }
    ctx.loss = 0.25
    assert ctx.loss == 0.25
    assert copy.copy(ctx) == pickle.loads(pickle.dumps(ctx)) == ctx


def test_contexts_of_a_run_equal_those_made_by_hand() -> None:
    hook, net = Keeps(), Net()
    quiet(hooks=[hook]).fit(net, batches(2))
    first, second = hook.contexts
    assert first != second
    by_hand = StepContext(1, first.loss, first.grad_norm, first.lr, first.tokens_seen, net, first.optimizer)
    assert first == by_hand and by_hand in hook.contexts
    assert dataclasses.asdict(first)["metrics"]["loss"] == first.loss


def test_what_is_not_given_is_not_a_number() -> None:
    ctx = StepContext()
    assert math.isnan(ctx.loss) and math.isnan(ctx.grad_norm) and math.isnan(ctx.lr)


def test_the_seven_fields_may_be_given_by_position() -> None:
    model, optimizer = object(), object()
    ctx = StepContext(1, 2.0, 3.0, 4.0, 5, model, optimizer)
    assert (ctx.step, ctx.loss, ctx.grad_norm, ctx.lr, ctx.tokens_seen) == (1, 2.0, 3.0, 4.0, 5)
    assert ctx.model is model and ctx.optimizer is optimizer


def test_tensors_become_floats_when_looked_at_and_only_once() -> None:
    ctx = StepContext(loss=torch.tensor(0.5), grad_norm=torch.tensor(2.0))
    with CountReads() as counter:
        assert counter.reads == []
        assert type(ctx.loss) is float and ctx.loss == ctx.loss == 0.5
        assert ctx.grad_norm == ctx.grad_norm == 2.0
    assert len(counter.reads) == 2


def test_a_run_gives_one_context_per_update() -> None:
    hook = Keeps()
    net = Net()
    quiet(max_epochs=2, hooks=[hook]).fit(net, batches(2, size=3))
    assert [ctx.step for ctx in hook.contexts] == [1, 2, 3, 4]
    assert [ctx.epoch for ctx in hook.contexts] == [0, 0, 1, 1]
    assert [ctx.tokens_seen for ctx in hook.contexts] == [12, 24, 36, 48]
    assert all(ctx.model is net and isinstance(ctx.optimizer, torch.optim.SGD) for ctx in hook.contexts)
    assert all(ctx.metrics["loss"] == ctx.loss for ctx in hook.contexts)


def test_loss_is_the_mean_over_the_window() -> None:
    losses: list[float] = []
    hook = Keeps()
    trainer = quiet(accumulate_grad_batches=2, hooks=[hook])
    trainer.on("train_batch_end")(lambda loss: losses.append(loss))
    trainer.fit(Net(), batches(4))
    assert [ctx.loss for ctx in hook.contexts] == pytest.approx([sum(losses[:2]) / 2, sum(losses[2:]) / 2])


def test_the_learning_rate_is_the_one_the_update_used() -> None:
    class Decays(Net):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    hook = Keeps()
    trainer = quiet(hooks=[hook])
    after: list[float] = []
    trainer.on("train_batch_end")(lambda lr: after.append(lr))
    trainer.fit(Decays(), batches(3))
    assert [ctx.lr for ctx in hook.contexts] == [1.0, 0.5, 0.25]
    assert after == [0.5, 0.25, 0.125]  # the scheduler has moved on by then


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_clip_val": 1e-3}, {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}],
)
def test_grad_norm_is_the_total_before_clipping(options: dict[str, Any]) -> None:
    class Measures(Net):
        norms: list[float] = []

        def on_before_optimizer_step(self) -> None:
            squares = [float((p.grad**2).sum()) for p in self.parameters() if p.grad is not None]
            self.norms.append(math.sqrt(sum(squares)))

    hook, net = Keeps(), Measures()
    net.norms = []
    quiet(hooks=[hook], **options).fit(net, batches(3))
    assert [ctx.grad_norm for ctx in hook.contexts] == pytest.approx(net.norms, rel=1e-5)
    assert min(net.norms) > 1e-3  # or clipping would have had nothing to do


def test_a_context_kept_for_later_still_tells_its_own_step() -> None:
    hook = Keeps()
    losses: list[float] = []
    trainer = quiet(hooks=[hook])
    trainer.on("step_end")(lambda loss: losses.append(loss))
    trainer.fit(Net(), batches(4))
    assert [ctx.loss for ctx in hook.contexts] == losses
    assert len(set(losses)) == 4


def test_many_hooks_that_ask_share_one_read_of_the_loss() -> None:
    class Looks(Hook):
        def on_step_end(self, ctx: StepContext, loss: float) -> None:
            assert ctx.loss == loss

    with CountReads() as counter:
        quiet(hooks=[Looks("a"), Looks("b")]).fit(Net(), batches(3))
    assert (
        len(counter.reads) == 3 + 2
    )  # and whether the weights are finite, before the first step and when all is over


def test_asking_for_a_context_reads_nothing_by_itself() -> None:
    trainer = quiet(device="meta", hooks=[Keeps()])
    trainer.fit(Net(), batches(3))  # a host read of a meta tensor would raise
    assert trainer.global_step == 3
