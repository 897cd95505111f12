"""A batch, an update, an epoch and a validation of a loop written by hand, also where the loop is unusual."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from dialects.looped import Facts, net_and_sgd, recorder, train
from tiny import batches
from torch import nn
from torch.nn import functional as F

import hookline
from hookline import Hook, Line


def test_a_validation_left_by_a_break_is_over_before_the_next_batch() -> None:
    heard = recorder(["on_train_batch_start", "on_validation_end", "on_train_epoch_end"], detail=True)
    net, sgd = net_and_sgd()
    line = Line(net, sgd, hooks=[heard])
    with line:
        for index, _ in enumerate(line.epoch(list(range(3)))):
            for _ in line.validation([0, 1]) if index == 1 else ():
                break
    assert [(name, batch) for name, _, batch, _ in heard.seen] == [
        ("on_train_batch_start", 0),
        ("on_train_batch_start", 1),
        ("on_validation_end", 0),
        ("on_train_batch_start", 2),
        ("on_train_epoch_end", 2),
    ]


def test_a_validation_inside_a_validation_is_refused() -> None:
    net, sgd = net_and_sgd()
    with (
        pytest.raises(hookline.HooklineError, match="started inside this validation"),
        Line(net, sgd) as line,
    ):
        for _ in line.validation([0, 1]):
            for _ in line.validation([0]):
                pass


def test_a_validation_before_the_update_in_the_body_leaves_the_batch_open() -> None:
    events = ("on_train_batch_start", "on_validation_end", "on_train_batch_end", "on_step_end")
    hook = recorder(events)
    facts, (net, sgd) = Facts(), net_and_sgd()
    losses: list[float] = []
    line = Line(net, sgd, hooks=[hook, facts])
    with line:
        for index, (x, y) in enumerate(line.epoch(batches(2))):
            if index == 0:
                for a, b in line.validation(batches(1)):
                    line.log("val/loss", F.mse_loss(net(a), b).detach())
            sgd.zero_grad()
            loss = F.mse_loss(net(x), y)
            line.backward(loss)
            sgd.step()
            losses.append(loss.item())
    start, validated, end, step = events
    assert hook.seen == [start, validated, end, step, start, end, step]
    assert [loss for loss, _ in facts.steps] == pytest.approx(losses)


def test_two_epochs_at_once_are_refused() -> None:
    net, sgd = net_and_sgd()
    line = Line(net, sgd)
    with pytest.raises(hookline.HooklineError, match=r"line.epoch\(zip\(one, two\)\)"), line:
        for _ in zip(line.epoch(batches(2)), line.epoch(batches(2)), strict=True):
            pass


def test_a_hook_can_leave_a_batch_out_or_end_the_epoch() -> None:
    class Picks(Hook):
        def on_train_batch_start(self, batch_idx: int) -> Any:
            return {1: hookline.SKIP_BATCH, 3: hookline.END_EPOCH}.get(batch_idx)

    heard = recorder(["on_train_batch_end", "on_train_epoch_end"], detail=True)
    net, sgd = net_and_sgd()
    line, seen = Line(net, sgd, hooks=[Picks(), heard]), []
    with line:
        for batch in line.epoch(list(range(6))):
            seen.append(batch)
    assert seen == [0, 2]
    assert [(name, index) for name, _, index, _ in heard.seen] == [
        ("on_train_batch_end", 0),
        ("on_train_batch_end", 2),
        ("on_train_epoch_end", 3),
    ]
    assert line.state.epochs_seen == 1


def test_a_hook_can_replace_the_loss() -> None:
    class Doubles(Hook):
        def on_before_backward(self, loss: torch.Tensor) -> torch.Tensor:
            return loss * 2

    grads = []
    for hooks in ([], [Doubles()]):
        net, sgd = net_and_sgd()
        line = Line(net, sgd, hooks=hooks)
        with line:
            for x, y in line.epoch(batches(1)):
                line.backward(F.mse_loss(net(x), y))
        grads.append(net.weight.grad)
    assert torch.allclose(grads[0] * 2, grads[1])


def test_a_loop_that_breaks_ends_its_batch_and_its_validation() -> None:
    heard = recorder(
        [
            "on_train_batch_end",
            "on_step_end",
            "on_validation_batch_end",
            "on_validation_end",
            "on_train_epoch_end",
        ]
    )
    net, sgd = net_and_sgd()
    line = Line(net, sgd, hooks=[heard])
    with line:
        for x, y in line.epoch(batches(5)):
            line.backward(F.mse_loss(net(x), y))
            sgd.step()
            break
        for _ in line.validation(batches(5)):
            line.log("val/loss", 3.0)
            break
    assert heard.seen == ["on_train_batch_end", "on_step_end", "on_validation_end", "on_train_epoch_end"]
    assert line.metrics["val/loss"] == 3.0
    assert line.state.epochs_seen == 1


def norm_of(net: nn.Module) -> float:
    return float(nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None]))


# ---- optimizers that compute the loss themselves ----------------------------------------------------------------------------


def lbfgs_loop(hooks: list[Any]) -> tuple[list[tuple[float, float]], nn.Linear]:
    """The loss and the norm of each step's first evaluation, which is what the step is about."""
    net, _ = net_and_sgd()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4)
    first: list[tuple[float, float]] = []
    line = Line(net, optimizer, hooks=hooks)
    with line:
        for x, y in line.epoch(batches(2)):
            seen: list[tuple[float, float]] = []

            def closure(x: Any = x, y: Any = y, seen: Any = seen) -> torch.Tensor:
                optimizer.zero_grad()
                loss = F.mse_loss(net(x), y)
                line.backward(loss)
                seen.append((loss.item(), norm_of(net)))
                return loss

            optimizer.step(closure)  # type: ignore[no-untyped-call]
            first.append(seen[0])
    return first, net


def test_lbfgs_is_told_of_with_the_loss_and_the_norm_that_its_step_began_with() -> None:
    facts = Facts()
    heard = recorder(["on_before_zero_grad", "on_before_optimizer_step", "on_after_optimizer_step"])
    first, _ = lbfgs_loop([facts, heard])
    assert facts.steps == [pytest.approx(each) for each in first]
    assert facts.epochs == [pytest.approx(sum(loss for loss, _ in first) / 2)]
    assert heard.seen == ["on_before_zero_grad", "on_before_optimizer_step", "on_after_optimizer_step"] * 2


def test_a_hook_can_leave_a_step_of_lbfgs_out() -> None:
    class Skips(Hook):
        def on_before_optimizer_step(self) -> Any:
            return hookline.SKIP_STEP

    _, net = lbfgs_loop([Skips()])
    assert torch.equal(net.weight, net_and_sgd()[0].weight)


# ---- updates that are not made --------------------------------------------------------------------------------------------


def test_a_window_that_a_scaler_drops_is_told_and_is_no_part_of_the_next_one() -> None:
    """The loop clears its gradients right after the step, so nothing is left to be measured at the end of the batch."""
    facts, heard = Facts(), recorder(["on_step_skipped"])
    net, sgd = net_and_sgd()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    line, losses = Line(net, sgd, hooks=[facts, heard]), []
    with line:
        for index, (x, y) in enumerate(line.epoch(batches(2))):
            loss = line.before_backward(F.mse_loss(net(x), y) * (float("inf") if index == 0 else 1.0))
            losses.append(loss.item())
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.unscale_(sgd)
            line.clip_gradients(1.0)
            scaler.step(sgd)
            scaler.update()
            sgd.zero_grad()
    assert heard.seen == ["on_step_skipped"]
    assert [loss for loss, _ in facts.steps] == [losses[1]]


def test_clipping_is_left_out_with_the_update_and_still_tells_the_norm() -> None:
    class Skips(Hook):
        def on_before_optimizer_step(self) -> Any:
            return hookline.SKIP_STEP

    heard = recorder(["on_gradient_clip", "on_step_skipped"])
    net, sgd = net_and_sgd()
    line = Line(net, sgd, hooks=[Skips(), heard])
    with line:
        for x, y in line.epoch(batches(1)):
            line.backward(F.mse_loss(net(x), y))
            before = norm_of(net)
            assert line.clip_gradients(0.01).item() == pytest.approx(before)
            sgd.step()
            assert norm_of(net) == pytest.approx(before)
    assert heard.seen == ["on_step_skipped"]


# ---- several lines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_to_leave", ["the inner one", "the outer one"])
def test_two_lines_hear_one_optimizer_and_leave_it_as_it_was(first_to_leave: str) -> None:
    names = ["on_before_zero_grad", "on_after_optimizer_step"]
    one, two = recorder(names), recorder(names)
    net, sgd = net_and_sgd()
    lines = [Line(net, sgd, hooks=[one]), Line(net, sgd, hooks=[two])]
    for line in lines:
        line.__enter__()
    sgd.zero_grad()
    sgd.step()
    for line in lines if first_to_leave == "the outer one" else lines[::-1]:
        line.__exit__(None, None, None)
    sgd.zero_grad()
    assert one.seen == two.seen == names
    assert not sgd._optimizer_step_post_hooks


# ---- what comes in another order -----------------------------------------------------------------------------------------


def test_an_evaluation_of_lbfgs_that_fails_and_is_caught_costs_the_next_batch_nothing() -> None:
    facts, (net, _) = Facts(), net_and_sgd()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
    first: list[float] = []
    line = Line(net, optimizer, hooks=[facts])
    with line:
        for index, (x, y) in enumerate(line.epoch(batches(3))):
            losses: list[float] = []

            def closure(
                x: Any = x, y: Any = y, losses: Any = losses, fails: bool = index == 1
            ) -> torch.Tensor:
                if fails and losses:
                    raise ValueError("diverged")
                optimizer.zero_grad()
                loss = F.mse_loss(net(x), y)
                line.backward(loss)
                losses.append(loss.item())
                return loss

            try:
                optimizer.step(closure)  # type: ignore[no-untyped-call]
            except ValueError:
                continue
            finally:
                first.append(losses[0])
    assert [loss for loss, _ in facts.steps] == pytest.approx([first[0], first[2]])


# ---- several optimizers, and other ones ----------------------------------------------------------------------------------


class Rates(Hook):
    """What is told of the update that a batch ends with."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[float, float | None]] = []

    def on_step_end(self, lr: float, grad_norm: float | None) -> None:
        self.steps.append((lr, grad_norm))


@pytest.mark.parametrize("at_once", [True, False])
def test_the_norm_is_that_of_all_optimizers_that_were_clipped_for_an_update(at_once: bool) -> None:
    hook, (one, two) = Rates(), (nn.Linear(4, 2), nn.Linear(4, 2))
    first, second = torch.optim.SGD(one.parameters(), lr=0.1), torch.optim.SGD(two.parameters(), lr=0.2)
    norms: list[float] = []
    line = Line(nn.ModuleList([one, two]), [first, second], hooks=[hook])
    with line:
        for x, y in line.epoch(batches(2)):
            first.zero_grad()
            second.zero_grad()
            line.backward(F.mse_loss(one(x), y) + 3 * F.mse_loss(two(x), y))
            norms.append(float(torch.linalg.vector_norm(torch.tensor([norm_of(one), norm_of(two)]))))
            if at_once:
                line.clip_gradients(0.5)
            else:
                alone = norm_of(one)
                assert float(line.clip_gradients(0.5, first)) == pytest.approx(alone)
                line.clip_gradients(0.5, second)
            first.step()
            second.step()
    assert [norm for _, norm in hook.steps] == pytest.approx(norms)


def test_rate_loss_and_norm_are_all_those_of_the_last_optimizer_that_made_a_step() -> None:
    hook, facts, (one, two) = Rates(), Facts(), (nn.Linear(4, 4), nn.Linear(4, 1))
    first, second = torch.optim.SGD(one.parameters(), lr=0.1), torch.optim.SGD(two.parameters(), lr=0.5)
    last: list[tuple[float, float]] = []
    line = Line(nn.ModuleList([one, two]), [first, second], hooks=[hook, facts])
    with line:
        for x, _ in line.epoch(batches(2)):
            for optimizer, net in ((second, two), (first, one)):
                loss = two(one(x)).mean()
                optimizer.zero_grad()
                line.backward(loss)
                norm = norm_of(net)
                optimizer.step()
            last.append((loss.item(), norm))
    assert [rate for rate, _ in hook.steps] == [0.1, 0.1]
    assert [value for each in facts.steps for value in each] == pytest.approx(
        [value for each in last for value in each]
    )


def test_of_several_losses_in_a_batch_the_last_counts_as_at_the_end_of_the_step() -> None:
    seen: list[float] = []

    class Losses(Hook):
        def on_step_end(self, loss: float) -> None:
            seen.append(loss)

    net, sgd = net_and_sgd()
    with Line(net, sgd, hooks=[Losses()]) as line:
        for _ in line.epochs(1):
            for x, y in line.epoch(batches(3)):
                for factor in (1.0, 10.0):
                    sgd.zero_grad()
                    line.backward(factor * F.mse_loss(net(x), y))
                    sgd.step()
    assert len(seen) == 3 and line.metrics["train/loss"] == pytest.approx(sum(seen) / 3)


def test_backward_counts_the_windows_of_a_loop_whose_batches_are_skipped() -> None:
    class SkipsTheFourth(Hook):
        def on_train_batch_start(self, batch_idx: int) -> Any:
            return hookline.SKIP_BATCH if batch_idx == 3 else None

    windows = Facts()
    net, sgd = net_and_sgd()
    with Line(net, sgd, hooks=[SkipsTheFourth(), windows]) as line:
        for _ in line.epochs(2):
            for index, (x, y) in enumerate(line.epoch(batches(7))):
                if index in (0, 4):  # the loop skips batches too
                    continue
                if line.backward(F.mse_loss(net(x), y), divide_by=4) == 4:
                    sgd.step()
                    sgd.zero_grad()
    assert (line.global_step, line.state.batches_seen) == (2, 12) and len(windows.steps) == 2


def test_an_optimizer_that_is_attached_in_a_run_is_heard_from_then_on() -> None:
    net, old = net_and_sgd()
    sgd = old
    line = Line(net, sgd, hooks=[hook := recorder(["on_after_optimizer_step"])])
    with line:
        for epoch in line.epochs(2):
            if epoch == 1:
                sgd = torch.optim.SGD(net.parameters(), lr=0.01)
                line.attach(net, sgd)
            for x, y in line.epoch(batches(3)):
                line.backward(F.mse_loss(net(x), y))
                sgd.step()
    assert line.global_step == 6 and len(hook.seen) == 6
    assert not old._optimizer_step_post_hooks and "zero_grad" not in vars(old)


def test_a_loop_that_is_interrupted_before_a_step_a_hook_leaves_out_gets_its_gradients_back() -> None:
    class Skips(Hook):
        skips = True

        def on_before_optimizer_step(self) -> Any:
            return hookline.SKIP_STEP if self.skips else None

    hook, heard, (net, sgd) = Skips(), recorder(["on_step_skipped", "on_step_end"]), net_and_sgd()
    line = Line(net, sgd, hooks=[hook, heard])
    with pytest.raises(KeyboardInterrupt), line:
        for x, y in line.epoch(batches(1)):
            line.backward(F.mse_loss(net(x), y))
            line.clip_gradients(1.0)
            raise KeyboardInterrupt
    assert all(p.grad is not None for p in net.parameters())
    hook.skips = False
    with line:
        for x, y in line.epoch(batches(2)):
            sgd.zero_grad()
            line.backward(F.mse_loss(net(x), y))
            line.clip_gradients(1.0)
            sgd.step()
    assert heard.seen == ["on_step_end", "on_step_end"] and line.global_step == 2


def test_optimizers_are_left_as_they_were_found() -> None:
    net, sgd = net_and_sgd()
    train(Line(net, sgd), net, sgd, batches(2))
    assert "zero_grad" not in vars(sgd)
    assert not sgd._optimizer_step_pre_hooks and not sgd._optimizer_step_post_hooks
    with pytest.raises(RuntimeError, match="mine"), Line(net, sgd):
        raise RuntimeError("mine")
    assert "zero_grad" not in vars(sgd) and not sgd._optimizer_step_post_hooks


def test_the_norm_is_the_one_before_clipping_and_hooks_see_the_gradients_before() -> None:
    class Looks(Hook):
        def on_before_optimizer_step(self, module: nn.Module) -> None:
            self.before = torch.nn.utils.get_total_norm([p.grad for p in module.parameters()]).item()

        def on_gradient_clip(self, grad_norm: float) -> None:
            self.clipped = grad_norm

        def on_step_end(self, grad_norm: float, module: nn.Module) -> None:
            self.at_end = grad_norm
            self.after = torch.nn.utils.get_total_norm([p.grad for p in module.parameters()]).item()

    hook = Looks()
    net, sgd = net_and_sgd()
    line = Line(net, sgd, hooks=[hook])
    with line:
        for x, y in line.epoch(batches(1)):
            line.backward(F.mse_loss(net(x), y))
            assert line.clip_gradients(0.01).item() == pytest.approx(hook.before)
            sgd.step()
    assert hook.before == pytest.approx(hook.clipped) == pytest.approx(hook.at_end)
    assert hook.after == pytest.approx(0.01, rel=1e-3)


def test_several_optimizers_in_one_batch_are_one_step() -> None:
    heard = recorder(["on_after_optimizer_step", "on_step_end"], detail=True)
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    both = [torch.optim.SGD(each.parameters(), lr=0.1) for each in net]
    line = Line(net, both, hooks=[heard])
    with line:
        for x, y in line.epoch(batches(2)):
            line.backward(F.mse_loss(net(x), y))
            for each in both:
                each.step()
    assert [(name, step) for name, step, *_ in heard.seen] == [
        ("on_after_optimizer_step", 1),
        ("on_after_optimizer_step", 1),
        ("on_step_end", 1),
        ("on_after_optimizer_step", 2),
        ("on_after_optimizer_step", 2),
        ("on_step_end", 2),
    ]


@pytest.mark.parametrize(("answer", "steps"), [(hookline.SKIP_STEP, 1), (hookline.STEP_DONE, 2)])
def test_a_hook_can_leave_an_update_out_that_the_loop_makes(answer: Any, steps: int) -> None:
    class Once(Hook):
        def on_before_optimizer_step(self, batch_idx: int) -> Any:
            return answer if batch_idx == 0 else None

        def on_step_skipped(self, reason: str, module: nn.Module) -> None:
            self.reason, self.gradient = reason, module.weight.grad

    net, sgd = net_and_sgd()
    adam = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
    before = net.weight.detach().clone()
    hook = Once()
    line = Line(net, adam, hooks=[hook])
    with line:
        for index, (x, y) in enumerate(line.epoch(batches(2))):
            line.backward(F.mse_loss(net(x), y))
            adam.step()
            assert torch.equal(net.weight, before) == (index == 0)
            assert net.weight.grad is not None
    assert line.global_step == steps
    if answer is hookline.SKIP_STEP:
        assert hook.reason == "hook" and hook.gradient is not None


def test_a_step_that_a_scaler_leaves_out_is_told_and_the_next_one_is_heard_again() -> None:
    heard = recorder(
        ["on_before_optimizer_step", "on_step_skipped", "on_after_optimizer_step", "on_step_end"]
    )
    net, sgd = net_and_sgd()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    line = Line(net, sgd, hooks=[heard])
    with line:
        for index, (x, y) in enumerate(line.epoch(batches(2))):
            sgd.zero_grad()
            loss = line.before_backward(F.mse_loss(net(x), y) * (float("inf") if index == 0 else 1.0))
            scaler.scale(loss).backward()
            line.after_backward()
            scaler.unscale_(sgd)
            line.clip_gradients(1.0)
            scaler.step(sgd)
            scaler.update()
    assert heard.seen == [
        "on_before_optimizer_step",
        "on_step_skipped",
        "on_before_optimizer_step",
        "on_after_optimizer_step",
        "on_step_end",
    ]


def test_the_norm_of_each_of_two_optimizers_is_its_own_and_that_of_the_update_covers_both() -> None:
    class Norms(Hook):
        def __init__(self) -> None:
            super().__init__()
            self.before: list[float] = []
            self.at_end = 0.0

        def on_before_optimizer_step(self, grad_norm: float) -> None:
            self.before.append(grad_norm)

        def on_step_end(self, grad_norm: float) -> None:
            self.at_end = grad_norm

    for order in ("clip clip", "clip all", "clip step", ""):
        nets, norms = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 1)]), Norms()
        optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in nets]
        with Line(nets, optimizers, hooks=[norms]) as line:
            for x in line.epoch([torch.randn(8, 3)]):
                line.backward(nets[1](nets[0](x)).square().mean())
                by_hand = [
                    float(nn.utils.get_total_norm([p.grad for p in each.parameters()])) for each in nets
                ]
                for optimizer in {"clip clip": optimizers, "clip all": [None]}.get(order, []):
                    line.clip_gradients(0.01, optimizer)
                for each in optimizers:
                    if order == "clip step":
                        line.clip_gradients(0.01, each)
                    each.step()
        assert norms.before == pytest.approx(by_hand)
        assert norms.at_end == pytest.approx(math.hypot(*by_hand))
