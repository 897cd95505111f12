"""One batch and one update: the weights are those of a loop written by hand, bit for bit."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Net, batches, quiet
from torch import Tensor, nn
from torch.nn import functional as F

from hookline import END_EPOCH, SKIP_BATCH, SKIP_STEP, STEP_DONE, Hook, HookError, LossError

Batch = tuple[Tensor, Tensor]


class Stream:
    """A loader that cannot tell its length."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


class Skipped(Hook):
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def on_step_skipped(self, reason: str) -> None:
        self.reasons.append(reason)


class AtBatchStart(Hook):
    """Returns a signal at the batches named."""

    def __init__(self, signals: dict[int, Any]) -> None:
        self.signals = signals

    def on_train_batch_start(self, batch_idx: int) -> Any:
        return self.signals.get(batch_idx)


def twins(net: Any = None) -> tuple[Any, Any]:
    net = Net() if net is None else net
    return net, copy.deepcopy(net)


def assert_same_weights(a: nn.Module, b: nn.Module) -> None:
    for (name, mine), (_, theirs) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def by_hand(
    net: Net, windows: list[list[Batch]], planned: int = 1, before_step: Callable[[], Any] = lambda: None
) -> None:
    """Each window is one update; losses are divided by `planned`, and rescaled if the window holds fewer."""
    optimizer = net.configure_optimizers()
    for window in windows:
        optimizer.zero_grad()
        for batch in window:
            loss = net.training_step(batch, 0)
            (loss if planned == 1 else loss / planned).backward()
        if len(window) != planned:
            for p in net.parameters():
                p.grad *= planned / len(window)
        before_step()
        optimizer.step()


# ---- equal to a loop written by hand -----------------------------------------------------------------------------


def test_plain_training_equals_a_loop_written_by_hand() -> None:
    net, twin = twins()
    quiet(max_epochs=3).fit(net, batches())
    by_hand(twin, [[b] for b in batches()] * 3)
    assert_same_weights(net, twin)


def test_accumulation_equals_a_loop_written_by_hand() -> None:
    net, twin = twins()
    quiet(accumulate_grad_batches=2).fit(net, batches(4))
    data = batches(4)
    by_hand(twin, [data[:2], data[2:]], planned=2)
    assert_same_weights(net, twin)


def test_a_short_last_window_is_divided_by_its_real_length() -> None:
    net, twin = twins()
    quiet(accumulate_grad_batches=3).fit(net, batches(5))
    data = batches(5)
    optimizer = twin.configure_optimizers()
    for window in (data[:3], data[3:]):
        optimizer.zero_grad()
        for batch in window:
            (twin.training_step(batch, 0) / len(window)).backward()
        optimizer.step()
    assert_same_weights(net, twin)


def test_a_short_last_window_of_a_loader_without_length_is_rescaled() -> None:
    net, twin = twins()
    quiet(accumulate_grad_batches=3).fit(net, Stream(batches(5)))
    data = batches(5)
    by_hand(twin, [data[:3], data[3:]], planned=3)
    assert_same_weights(net, twin)


def test_a_window_does_not_reach_into_the_next_epoch() -> None:
    net, twin = twins()
    trainer = quiet(accumulate_grad_batches=2, max_epochs=2)
    trainer.fit(net, Stream(batches(3)))
    data = batches(3)
    by_hand(twin, [data[:2], data[2:]] * 2, planned=2)
    assert_same_weights(net, twin)
    assert trainer.global_step == 4


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradient_clipping_equals_a_loop_written_by_hand(algorithm: str) -> None:
    net, twin = twins()
    quiet(gradient_clip_val=0.05, gradient_clip_algorithm=algorithm, max_epochs=2).fit(net, batches())
    clip = nn.utils.clip_grad_norm_ if algorithm == "norm" else nn.utils.clip_grad_value_
    by_hand(twin, [[b] for b in batches()] * 2, before_step=lambda: clip(list(twin.parameters()), 0.05))
    assert_same_weights(net, twin)


class TwoPart(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.mse_loss(self.layer(self.first(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.first.parameters(), lr=0.1),
            torch.optim.Adam(self.layer.parameters(), lr=0.01),
        ]


def test_two_optimizers_equal_a_loop_written_by_hand_and_count_one_step() -> None:
    net, twin = twins(TwoPart())
    trainer = quiet()
    trainer.fit(net, batches())
    optimizers = twin.configure_optimizers()
    for batch in batches():
        for each in optimizers:
            each.zero_grad()
        twin.training_step(batch, 0).backward()
        for each in optimizers:
            each.step()
    assert_same_weights(net, twin)
    assert trainer.global_step == 4


def test_every_optimizer_has_its_own_events() -> None:
    heard: list[tuple[str, int]] = []

    class Listen(Hook):
        def on_before_zero_grad(self, optimizer_idx: int) -> None:
            heard.append(("zero_grad", optimizer_idx))

        def on_before_optimizer_step(self, optimizer_idx: int) -> None:
            heard.append(("before", optimizer_idx))

        def on_after_optimizer_step(self, optimizer_idx: int, step: int) -> None:
            assert step == 1
            heard.append(("after", optimizer_idx))

    quiet(hooks=[Listen()]).fit(TwoPart(), batches(1))
    assert heard == [
        ("zero_grad", 0),
        ("zero_grad", 1),
        ("before", 0),
        ("after", 0),
        ("before", 1),
        ("after", 1),
    ]


def test_bf16_mixed_equals_a_loop_written_by_hand() -> None:
    net, twin = twins()
    quiet(precision="bf16-mixed", device="cpu").fit(net, batches())
    optimizer = twin.configure_optimizers()
    for batch in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = twin.training_step(batch, 0)
        loss.backward()
        optimizer.step()
    assert_same_weights(net, twin)


def scaled_by_hand(net: Net, data: list[Batch], clip: float | None = None) -> torch.amp.GradScaler:
    optimizer, scaler = net.configure_optimizers(), torch.amp.GradScaler("cpu")
    for batch in data:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = net.training_step(batch, 0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if clip is not None:
            nn.utils.clip_grad_norm_(list(net.parameters()), clip)
        scaler.step(optimizer)
        scaler.update()
    return scaler


def with_overflow() -> list[Batch]:
    """Four batches, the second of which makes gradients that half precision cannot hold once they are scaled."""
    return [(x, y * (1000 if index == 1 else 0.01)) for index, (x, y) in enumerate(batches(4))]


@pytest.mark.parametrize("clip", [None, 0.05])
def test_16_mixed_equals_a_loop_written_by_hand_with_a_scaler(clip: float | None) -> None:
    net, twin = twins()
    trainer = quiet(precision="16-mixed", device="cpu", gradient_clip_val=clip)
    trainer.fit(net, with_overflow())
    scaler = scaled_by_hand(twin, with_overflow(), clip)
    assert_same_weights(net, twin)
    assert trainer.strategy.precision.scaler is not None
    assert trainer.strategy.precision.scaler.get_scale() == scaler.get_scale() == 2.0**15


def test_an_overflow_in_16_mixed_skips_the_step_and_says_so() -> None:
    skipped = Skipped()
    trainer = quiet(precision="16-mixed", device="cpu", hooks=[skipped])
    trainer.fit(Net(), with_overflow())
    assert skipped.reasons == ["nonfinite"]
    assert trainer.global_step == 3


def test_gradients_are_unscaled_when_hooks_see_them() -> None:
    norms: list[float] = []

    class Look(Hook):
        def on_before_optimizer_step(self, module: Net) -> None:
            norms.append(
                float(nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None]))
            )

    net, twin = twins()
    data = [(x, y * 0.01) for x, y in batches(1)]
    quiet(precision="16-mixed", device="cpu", hooks=[Look()]).fit(net, data)
    twin.training_step(data[0], 0).backward()
    real = float(nn.utils.get_total_norm([p.grad for p in twin.parameters()]))
    assert norms == [pytest.approx(real, rel=0.01)]


class Curved(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4)


def test_lbfgs_equals_a_loop_written_by_hand() -> None:
    net, twin = twins(Curved())
    trainer = quiet(max_epochs=2)
    trainer.fit(net, batches(3))
    optimizer = twin.configure_optimizers()
    for batch in batches(3) * 2:

        def closure(batch: Any = batch) -> Any:
            optimizer.zero_grad()
            loss = twin.training_step(batch, 0)
            loss.backward()
            return loss

        optimizer.step(closure)
    assert_same_weights(net, twin)
    assert trainer.global_step == 6


def test_lbfgs_does_not_compute_the_first_loss_twice() -> None:
    calls: list[int] = []

    class Counting(Curved):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            calls.append(batch_idx)
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), max_iter=1)

    quiet().fit(Counting(), batches(3))
    assert calls == [0, 1, 2]


def test_lbfgs_reports_one_loss_per_batch_everywhere() -> None:
    """The loss of the batch as it was before the update, not that of the optimizer's last try."""
    heard: list[float] = []
    trainer = quiet()
    trainer.on("train_batch_end")(lambda loss: heard.append(loss))
    metrics = trainer.fit(Curved(), batches(1))
    assert heard == [metrics["train/loss"]]


# ---- what a training step may return -----------------------------------------------------------------------------


class Returning(Net):
    """Returns what a function makes of the loss."""

    def __init__(self, make: Callable[[Tensor, int], Any]) -> None:
        super().__init__()
        self.make = make

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.make(super().training_step(batch, batch_idx), batch_idx)


def test_a_dictionary_with_a_loss_trains_as_the_loss_does() -> None:
    net, twin = twins(Returning(lambda loss, i: {"loss": loss, "index": float(i), "text": "no number"}))
    metrics = quiet().fit(net, batches())
    by_hand(_as_net(twin), [[b] for b in batches()])
    assert_same_weights(net, twin)
    assert metrics["train/index"] == 1.5
    assert "train/text" not in metrics


def _as_net(twin: Returning) -> Any:
    twin.make = lambda loss, i: loss
    return twin


def test_a_loss_of_shape_one_trains_as_a_scalar_does() -> None:
    net, twin = twins(Returning(lambda loss, i: loss.reshape(1)))
    metrics = quiet(accumulate_grad_batches=2).fit(net, batches())
    data = batches()
    by_hand(_as_net(twin), [data[:2], data[2:]], planned=2)
    assert_same_weights(net, twin)
    assert metrics["train/loss"] > 0


def test_none_leaves_the_batch_out() -> None:
    net, twin = twins(Returning(lambda loss, i: None if i == 1 else loss))
    skipped = Skipped()
    trainer = quiet(hooks=[skipped])
    trainer.fit(net, batches())
    data = batches()
    by_hand(_as_net(twin), [[data[0]], [data[2]], [data[3]]])
    assert_same_weights(net, twin)
    assert skipped.reasons == ["no_loss"]
    assert trainer.global_step == 3


def test_a_batch_without_loss_still_has_its_end_event_with_no_loss() -> None:
    losses: list[float | None] = []

    class Listen(Hook):
        def on_train_batch_end(self, loss: float | None) -> None:
            losses.append(loss)

    quiet(hooks=[Listen()]).fit(Returning(lambda loss, i: {"loss": None} if i == 1 else loss), batches(3))
    assert [loss is None for loss in losses] == [False, True, False]


def test_a_float_is_refused_as_a_loss() -> None:
    with pytest.raises(LossError, match="training_step returned float"):
        quiet().fit(Returning(lambda loss, i: loss.item()), batches())


def test_a_detached_loss_is_refused() -> None:
    with pytest.raises(LossError, match=r"batch 0 cannot be differentiated: it was detached"):
        quiet().fit(Returning(lambda loss, i: loss.detach()), batches())


def test_a_dictionary_without_a_loss_is_refused_with_its_keys() -> None:
    with pytest.raises(LossError, match=r"without 'loss' \(keys: lost\)"):
        quiet().fit(Returning(lambda loss, i: {"lost": loss}), batches())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_vector_is_refused_with_its_shape(accumulate: int) -> None:
    with pytest.raises(LossError, match=r"one number, but has the shape \(3,\)"):
        quiet(accumulate_grad_batches=accumulate).fit(Returning(lambda loss, i: loss.expand(3)), batches())


def test_another_failure_in_backward_keeps_its_own_message() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            raise RuntimeError("my own backward")

    with pytest.raises(RuntimeError, match="my own backward"):
        quiet().fit(Returning(lambda loss, i: Failing.apply(loss)), batches())


# ---- signals inside an accumulation window -----------------------------------------------------------------------


@pytest.mark.parametrize("skipped_batch", [0, 1])
def test_a_window_with_a_skipped_batch_steps_on_the_others(skipped_batch: int) -> None:
    net, twin = twins()
    trainer = quiet(accumulate_grad_batches=2, hooks=[AtBatchStart({skipped_batch: SKIP_BATCH})])
    trainer.fit(net, batches(4))
    data = batches(4)
    by_hand(twin, [[data[1 - skipped_batch]], data[2:]], planned=2)
    assert_same_weights(net, twin)
    assert trainer.global_step == 2


@pytest.mark.parametrize("none_batch", [0, 1])
def test_a_window_with_a_batch_without_loss_steps_on_the_others(none_batch: int) -> None:
    net, twin = twins(Returning(lambda loss, i: None if i == none_batch else loss))
    skipped = Skipped()
    quiet(accumulate_grad_batches=2, hooks=[skipped]).fit(net, batches(4))
    data = batches(4)
    by_hand(_as_net(twin), [[data[1 - none_batch]], data[2:]], planned=2)
    assert_same_weights(net, twin)
    assert skipped.reasons == []


def test_a_window_without_any_loss_is_skipped_once() -> None:
    skipped = Skipped()
    trainer = quiet(accumulate_grad_batches=2, hooks=[skipped])
    trainer.fit(Returning(lambda loss, i: None if i < 2 else loss), batches(4))
    assert skipped.reasons == ["no_loss"]
    assert trainer.global_step == 1


@pytest.mark.parametrize("loader", [lambda data: data, Stream], ids=["known length", "unknown length"])
def test_an_epoch_ended_inside_a_window_steps_on_what_it_has(loader: Any) -> None:
    net, twin = twins()
    ends: list[int] = []

    class Listen(AtBatchStart):
        def on_step_end(self, step: int) -> None:
            ends.append(step)

    quiet(accumulate_grad_batches=2, hooks=[Listen({3: END_EPOCH})]).fit(net, loader(batches(6)))
    data = batches(6)
    by_hand(twin, [data[:2], [data[2]]], planned=2)
    assert_same_weights(net, twin)
    assert ends == [1, 2]


def test_minus_one_ends_the_epoch_too() -> None:
    trainer = quiet(hooks=[AtBatchStart({2: -1})], max_epochs=2)
    trainer.fit(Net(), batches(6))
    assert trainer.global_step == 4
    assert trainer.status == "completed"


def test_ending_the_epoch_beats_skipping_the_batch() -> None:
    trainer = quiet(hooks=[AtBatchStart({1: END_EPOCH}), AtBatchStart({1: SKIP_BATCH})])
    trainer.fit(Net(), batches(6))
    assert trainer.global_step == 1


def test_a_skipped_batch_has_no_further_events_and_is_not_seen() -> None:
    heard: list[str] = []

    class Listen(AtBatchStart):
        def on_after_backward(self) -> None:
            heard.append("backward")

        def on_step_skipped(self, reason: str) -> None:
            heard.append(reason)

        def on_train_batch_end(self, batch_idx: int) -> None:
            heard.append(f"end {batch_idx}")

    trainer = quiet(hooks=[Listen({0: SKIP_BATCH})])
    trainer.fit(Net(), batches(2))
    assert heard == ["backward", "end 1"]
    assert (trainer.state.batches_seen, trainer.state.samples_seen) == (1, 3)


def test_a_value_that_is_no_signal_is_refused() -> None:
    with pytest.raises(HookError, match="may return None, SKIP_BATCH, END_EPOCH"):
        quiet(hooks=[AtBatchStart({0: "skip"})]).fit(Net(), batches())


# ---- hooks around the update -------------------------------------------------------------------------------------


class BeforeStep(Hook):
    def __init__(self, answer: Callable[[Any], Any]) -> None:
        self.answer = answer

    def on_before_optimizer_step(self, optimizer: Any) -> Any:
        return self.answer(optimizer)


def test_skip_step_leaves_the_weights_alone_and_does_not_count() -> None:
    net, twin = twins()
    skipped = Skipped()
    trainer = quiet(hooks=[BeforeStep(lambda optimizer: SKIP_STEP), skipped])
    trainer.fit(net, batches())
    assert_same_weights(net, twin)
    assert skipped.reasons == ["hook"] * 4
    assert trainer.global_step == 0


def test_step_done_counts_the_update_that_the_hook_has_made() -> None:
    def step_at_half_speed(optimizer: Any) -> Any:
        with torch.no_grad():
            for p in optimizer.param_groups[0]["params"]:
                p -= 0.05 * p.grad
        return STEP_DONE

    net, twin = twins()
    twin.lr = 0.05
    trainer = quiet(hooks=[BeforeStep(step_at_half_speed)])
    trainer.fit(net, batches())
    by_hand(twin, [[b] for b in batches()])
    for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert trainer.global_step == 4


def test_a_hook_can_replace_the_loss_before_backward() -> None:
    class Double(Hook):
        def on_before_backward(self, loss: Tensor) -> Tensor:
            assert loss.requires_grad
            return 2 * loss

    net, twin = twins()
    twin.lr = 0.2
    metrics = quiet(hooks=[Double()]).fit(net, batches(1))
    loss = twin.training_step(batches(1)[0], 0).item()
    by_hand(twin, [batches(1)])
    for mine, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert metrics["train/loss"] == pytest.approx(2 * loss)


def test_replaced_losses_chain_from_hook_to_hook() -> None:
    seen: list[float] = []

    class Plus(Hook):
        def on_before_backward(self, loss: Tensor) -> Tensor:
            seen.append(loss.item())
            return loss + 1

    quiet(hooks=[Plus(), Plus()]).fit(Net(), batches(1))
    assert seen[1] == pytest.approx(seen[0] + 1)


def test_the_loss_that_hooks_hear_is_never_divided_by_the_accumulation() -> None:
    net, twin = twins()
    live: list[float] = []
    after: list[float] = []
    window: list[float] = []

    class Listen(Hook):
        def on_before_backward(self, loss: Tensor) -> None:
            live.append(loss.item())

        def on_train_batch_end(self, loss: float) -> None:
            after.append(loss)

        def on_step_end(self, loss: float) -> None:
            window.append(loss)

    quiet(accumulate_grad_batches=2, hooks=[Listen()]).fit(net, batches(2))
    real = [twin.training_step(b, 0).item() for b in batches(2)]
    assert live == after == real
    assert window == [pytest.approx(sum(real) / 2)]


def test_gradients_can_be_read_at_every_moment_the_contract_names() -> None:
    seen: dict[str, float | None] = {}

    def norm(module: Any) -> float | None:
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        return float(nn.utils.get_total_norm(grads)) if grads else None

    class Look(Hook):
        def on_before_zero_grad(self, module: Any) -> None:
            seen["before zero_grad"] = norm(module)

        def on_after_backward(self, module: Any) -> None:
            seen["after backward"] = norm(module)

        def on_before_optimizer_step(self, module: Any) -> None:
            seen["before clip"] = norm(module)

        def on_gradient_clip(self, module: Any, grad_norm: float) -> None:
            seen["clipped"] = norm(module)
            seen["fact at clip"] = grad_norm

        def on_after_optimizer_step(self, module: Any) -> None:
            seen["after step"] = norm(module)

        def on_step_end(self, module: Any, grad_norm: float) -> None:
            seen["step end"] = norm(module)
            seen["fact at step end"] = grad_norm

    quiet(gradient_clip_val=0.01, hooks=[Look()]).fit(Net(), batches(1))
    whole = seen["after backward"]
    assert whole is not None and whole > 0.02
    assert seen["before zero_grad"] is None
    assert seen["before clip"] == whole
    assert seen["fact at clip"] == seen["fact at step end"] == pytest.approx(whole)
    assert seen["clipped"] == seen["after step"] == seen["step end"] == pytest.approx(0.01, rel=1e-3)


def test_the_finished_steps_gradients_are_there_before_they_are_cleared() -> None:
    at_step_end: list[Tensor] = []
    before_clearing: list[Tensor] = []

    class Look(Hook):
        def on_step_end(self, module: Any) -> None:
            at_step_end.append(module.layer.weight.grad.clone())

        def on_before_zero_grad(self, module: Any, step: int) -> None:
            if step:
                before_clearing.append(module.layer.weight.grad.clone())

    quiet(hooks=[Look()]).fit(Net(), batches(3))
    assert len(before_clearing) == 2
    for early, late in zip(at_step_end, before_clearing, strict=False):
        assert torch.equal(early, late)


def test_the_gradient_norm_without_clipping_is_that_of_the_update() -> None:
    norms: list[float] = []

    class Look(Hook):
        def on_step_end(self, grad_norm: float) -> None:
            norms.append(grad_norm)

    net, twin = twins()
    quiet(hooks=[Look()]).fit(net, batches(1))
    twin.training_step(batches(1)[0], 0).backward()
    assert norms == [pytest.approx(float(nn.utils.get_total_norm([p.grad for p in twin.parameters()])))]


def test_the_gradient_norm_of_several_optimizers_is_that_of_all_gradients() -> None:
    norms: list[float] = []

    class Look(Hook):
        def on_step_end(self, grad_norm: float) -> None:
            norms.append(grad_norm)

    net, twin = twins(TwoPart())
    quiet(hooks=[Look()]).fit(net, batches(1))
    twin.training_step(batches(1)[0], 0).backward()
    assert norms == [pytest.approx(float(nn.utils.get_total_norm([p.grad for p in twin.parameters()])))]


def test_step_context_tells_of_one_update() -> None:
    seen: list[Any] = []

    class Look(Hook):
        def on_step_end(self, ctx: Any) -> None:
            seen.append(
                (ctx.step, ctx.loss, ctx.lr, ctx.tokens_seen, ctx.model, ctx.optimizer, ctx.grad_norm)
            )

    net, twin = twins()
    trainer = quiet(accumulate_grad_batches=2, hooks=[Look()])
    trainer.fit(net, batches(2))
    losses = [twin.training_step(b, 0).item() for b in batches(2)]
    [(step, loss, lr, tokens, model, optimizer, grad_norm)] = seen
    assert (step, lr, tokens) == (1, 0.1, 24)
    assert loss == pytest.approx(sum(losses) / 2)
    assert model is net
    assert optimizer is trainer.optimizers[0]
    assert grad_norm > 0


def test_batch_metrics_hold_this_batches_values_under_plain_keys() -> None:
    seen: list[dict[str, float]] = []

    class Logging(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("logged", 7.0 + batch_idx)
            return {"loss": super().training_step(batch, batch_idx), "acc": torch.tensor(0.5 * batch_idx)}

    class Look(Hook):
        def on_train_batch_end(self, metrics: Any, loss: float) -> None:
            seen.append(dict(metrics))
            assert metrics["loss"] == loss

    quiet(hooks=[Look()]).fit(Logging(), batches(2))
    assert [(each["acc"], each["logged"]) for each in seen] == [(0.0, 7.0), (0.5, 8.0)]


def test_batch_metrics_do_not_repeat_a_value_under_its_epoch_name() -> None:
    class Look(Hook):
        def on_train_batch_end(self, metrics: Any) -> None:
            self.keys = set(metrics)

    look = Look()
    quiet(hooks=[look]).fit(Returning(lambda loss, i: {"loss": loss, "acc": 0.5}), batches(1))
    assert look.keys == {"loss", "acc"}


def test_what_hooks_are_handed_never_holds_the_graph() -> None:
    kept: list[Any] = []

    class Leaky(Hook):
        """Keeps everything it gets, as careless hooks do."""

        def on_train_batch_end(self, outputs: Any, loss: float, metrics: Any) -> None:
            kept.extend(
                [outputs["loss"], outputs["nested"][0], loss, *metrics.values(), *metrics.raw().values()]
            )

    class Nested(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            out = self.layer(batch[0])
            loss = F.mse_loss(out, batch[1])
            self.log("logged", loss)
            return {"loss": loss, "nested": [out]}

    net = Nested()
    trainer = quiet(hooks=[Leaky()])
    metrics = trainer.fit(net, batches(2))
    assert len(kept) == 2 * 7
    for value in (*kept, *metrics.raw().values()):
        assert not isinstance(value, Tensor) or value.grad_fn is None
    assert all(type(value) is float for value in metrics.values())
    assert "graph" not in vars(net)


def test_tokens_and_samples_are_counted() -> None:
    class Ask(Hook):
        def on_train_end(self, tokens_seen: int, samples_seen: int, batches_seen: int) -> None:
            self.seen = (tokens_seen, samples_seen, batches_seen)

    ask = Ask()
    quiet(hooks=[ask], max_epochs=2).fit(Net(), batches(4, size=3))
    assert ask.seen == (2 * 4 * 12, 2 * 4 * 3, 8)


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"gradient_clip_val": 0.1, "accumulate_grad_batches": 3},
        {"accumulate_by": "tokens", "accumulate_grad_batches": 3},
    ],
)
def test_a_hundred_steps_never_read_from_the_device(extra: dict[str, Any]) -> None:
    """On the meta device every host read raises."""

    class Logging(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("logged", loss, on_step=True, on_epoch=True)
            return {"loss": loss, "other": loss * 2}

    trainer = quiet(device="meta", max_steps=100, max_epochs=-1, val_check_interval=7, **extra)
    trainer.fit(Logging(), batches(10), batches(2))
    assert trainer.global_step == 100
    assert trainer.module.layer.weight.is_meta


@pytest.mark.parametrize(
    "give",
    [lambda loss: 0.5, lambda loss: loss.detach(), lambda loss: {"loss": loss}],
    ids=["float", "detached", "dict"],
)
def test_a_hook_that_returns_a_loss_that_cannot_be_differentiated_is_named(
    give: Callable[[Tensor], Any],
) -> None:
    class Good(Hook):
        def on_before_backward(self, loss: Tensor) -> Any:
            return loss * 2

    class Bad(Hook):
        def on_before_backward(self, loss: Tensor) -> Any:
            return give(loss)

    with pytest.raises(
        LossError, match=r"was returned as the loss, and cannot be differentiated\. Return a tensor"
    ) as failed:
        quiet(hooks=[Good(), Bad()]).fit(Net(), batches(1))
    assert any("raised by hook 'bad' in on_before_backward" in note for note in failed.value.__notes__)


def test_what_was_logged_before_on_step_end_failed_is_written_when_the_run_ends() -> None:
    class Logs(Net):
        def training_step(self, batch, batch_idx):
            self.log("seen", 3.0)
            return super().training_step(batch, batch_idx)

    class Fails(Hook):
        def on_step_end(self, trainer):
            trainer.log("own", 4.0)
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        quiet(logger=True, run_dir="run", hooks=[Fails()]).fit(Logs(), batches(2))
    rows = [json.loads(line) for line in Path("run/log.jsonl").read_text().splitlines()]
    logged = {key: value for row in rows for key, value in row.get("metrics", row).items()}
    assert logged["seen"] == 3.0 and logged["own"] == 4.0


def test_what_was_worked_out_for_a_batch_is_not_kept_into_the_next() -> None:
    at_start, at_end = [], []
    trainer = quiet()
    trainer.on("train_batch_start")(lambda state: at_start.append([*state.cache]))
    trainer.on("train_batch_end")(lambda state, outputs: at_end.append([*state.cache]))
    trainer.fit(Net(), batches(2))
    assert at_start == [[], []]
    assert at_end == [["outputs"], ["outputs"]]
