"""`hookline.Line`: hooks in a loop that somebody wrote by hand."""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from servers import serving
from test_budgets import SOURCE, python_calls
from tiny import Net, batches, quiet
from torch import nn
from torch.nn import functional as F

import hookline
from hookline import EVENTS, Hook, Line, every
from hookline.hooks import (
    EarlyStopping,
    GradientMonitor,
    JSONLog,
    LRMonitor,
    ModelCheckpoint,
    SlurmRequeue,
    Webhook,
)
from hookline.interop.hosted.host import HOSTS, RAW_LOOP

CALLS_PER_STEP = 23


def net_and_sgd(lr: float = 0.1) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    return net, torch.optim.SGD(net.parameters(), lr=lr)


def recorder(names: Any, *, detail: bool = False) -> Any:
    """A hook that hears all these events and writes them down."""

    def listening_to(name: str) -> Callable[..., None]:
        def method(self: Any, step: int, batch_idx: int, epoch: int) -> None:
            self.seen.append((name, step, batch_idx, epoch) if detail else name)

        return method

    made = type("Records", (Hook,), {name: listening_to(name) for name in names})()
    made.seen = []
    return made


def train(
    line: Line, net: Any, sgd: Any, data: Any, *, epochs: int = 1, val: Any = (), window: int = 1
) -> None:
    """An ordinary loop with a line."""
    with line:
        for _ in line.epochs(epochs):
            data = list(data)
            for index, (x, y) in enumerate(line.epoch(data)):
                loss = F.mse_loss(net(x), y)
                if index % window == 0:
                    sgd.zero_grad()
                line.backward(loss, divide_by=min(window, len(data) - index // window * window))
                if (index + 1) % window == 0 or index + 1 == len(data):
                    sgd.step()
            for x, y in line.validation(val) if val else ():
                line.log("val/loss", F.mse_loss(net(x), y))


# ---- the same events as in the trainer, and nothing asked of the loop -----------------------------------------------------


@pytest.mark.parametrize("window", [1, 2])
def test_a_hook_hears_the_same_as_in_the_trainer(window: int) -> None:
    shared = [each for each in RAW_LOOP.offers if "checkpoint" not in each]
    there, here = recorder(shared, detail=True), recorder(shared, detail=True)
    quiet(hooks=[there], max_epochs=2, accumulate_grad_batches=window).fit(Net(), batches(5), batches(2))
    net, sgd = net_and_sgd()
    train(Line(net, sgd, hooks=[here]), net, sgd, batches(5), epochs=2, val=batches(2), window=window)
    assert here.seen == there.seen
    assert {name for name, *_ in here.seen} == set(shared) - {
        "on_gradient_clip",
        "on_step_skipped",
        "on_exception",
    }


def test_a_line_takes_at_most_ten_lines_and_changes_nothing_that_is_trained() -> None:
    def plain(net: Any, sgd: Any, data: Any, val: Any) -> None:
        for _ in range(2):
            for x, y in data:
                loss = F.mse_loss(net(x), y)
                sgd.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                sgd.step()
            for x, y in val:
                loss = F.mse_loss(net(x), y)

    def plain_with_hooks(net: Any, sgd: Any, data: Any, val: Any) -> None:
        line = Line(net, sgd, hooks=[GradientMonitor(log_frequency=1), EarlyStopping("val/loss", patience=9)])
        with line:
            for _ in line.epochs(2):
                for x, y in line.epoch(data):
                    loss = F.mse_loss(net(x), y)
                    sgd.zero_grad()
                    line.backward(loss)
                    line.clip_gradients(0.5)
                    sgd.step()
                for x, y in line.validation(val):
                    loss = F.mse_loss(net(x), y)
                    line.log("val/loss", loss)

    sources = [
        [each.strip() for each in inspect.getsource(loop).splitlines()[1:]]
        for loop in (plain, plain_with_hooks)
    ]
    added = [each for each in difflib.ndiff(*sources) if each.startswith("+ ")]
    assert 0 < len(added) <= 10
    results = []
    for loop in (plain, plain_with_hooks):
        net, sgd = net_and_sgd()
        loop(net, sgd, batches(3), batches(1))
        results.append(net.weight.detach())
    assert torch.equal(*results)


def test_a_loop_of_another_shape_is_served_as_well() -> None:
    """No epochs, no loader, a `while`: the calls behind the iterators are there to be used."""
    heard = recorder(
        [
            "on_train_batch_start",
            "on_before_backward",
            "on_after_backward",
            "on_after_optimizer_step",
            "on_train_batch_end",
            "on_step_end",
            "on_train_end",
        ]
    )
    net, sgd = net_and_sgd()
    line = Line(net, sgd, hooks=[heard])
    source = iter(batches(2))
    with line:
        while (batch := next(source, None)) is not None:
            line.start_batch(batch)
            loss = line.before_backward(F.mse_loss(net(batch[0]), batch[1]))
            loss.backward()
            line.after_backward()
            sgd.step()
            line.end_batch()
    once = [
        "on_train_batch_start",
        "on_before_backward",
        "on_after_backward",
        "on_after_optimizer_step",
        "on_train_batch_end",
        "on_step_end",
    ]
    assert heard.seen == [*once, *once, "on_train_end"]


def test_steps_are_heard_even_if_the_loop_says_nothing_else() -> None:
    heard = recorder(
        ["on_before_zero_grad", "on_before_optimizer_step", "on_after_optimizer_step"], detail=True
    )
    net, sgd = net_and_sgd()
    with Line(net, sgd, hooks=[heard]) as line:
        for x, y in batches(2):
            sgd.zero_grad()
            F.mse_loss(net(x), y).backward()
            sgd.step()
    assert [name for name, *_ in heard.seen] == [
        "on_before_zero_grad",
        "on_before_optimizer_step",
        "on_after_optimizer_step",
    ] * 2
    assert line.global_step == 2


def test_optimizers_are_left_as_they_were_found() -> None:
    net, sgd = net_and_sgd()
    train(Line(net, sgd), net, sgd, batches(2))
    assert "zero_grad" not in vars(sgd)
    assert not sgd._optimizer_step_pre_hooks and not sgd._optimizer_step_post_hooks
    with pytest.raises(RuntimeError, match="mine"), Line(net, sgd):
        raise RuntimeError("mine")
    assert "zero_grad" not in vars(sgd) and not sgd._optimizer_step_post_hooks


# ---- facts ------------------------------------------------------------------------------------------------------------------


def test_facts_are_those_of_the_trainer() -> None:
    class Looks(Hook):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def on_step_end(
            self, ctx: Any, loss: float, grad_norm: float, lr: float, tokens_seen: int, samples_seen: int
        ) -> None:
            assert (ctx.loss, ctx.grad_norm, ctx.lr, ctx.step) == (loss, grad_norm, lr, len(self.seen) + 1)
            self.seen.append([loss, grad_norm, lr, tokens_seen, samples_seen])

    there, here = Looks(), Looks()
    module = Net()
    torch.manual_seed(0)
    net, sgd = net_and_sgd()
    module.layer.load_state_dict(net.state_dict())
    quiet(hooks=[there], accumulate_grad_batches=2).fit(module, batches(4))
    train(Line(net, sgd, hooks=[here]), net, sgd, batches(4), window=2)
    assert here.seen == [pytest.approx(each, rel=1e-5) for each in there.seen] and len(here.seen) == 2


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


def test_the_module_is_the_user_s_own_whatever_runs_it() -> None:
    net, sgd = net_and_sgd()
    line = Line(torch.compile(net, backend="eager"), sgd)
    assert line.module is net and line.state.wrapped_model is not net


def test_a_line_takes_its_place_from_the_launcher_as_the_trainer_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_ID": "0",
    }.items():
        monkeypatch.setenv(name, value)
    s = Line(*net_and_sgd()).state
    assert (s.rank, s.local_rank, s.world_size) == (3, 1, 4)
    monkeypatch.setenv("RANK", "abc")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(hookline.OptionError, match="RANK='abc', which is not a whole number"):
        Line(*net_and_sgd())


def test_a_process_that_turns_out_to_be_another_rank_hears_what_is_meant_for_that_one(tmp_path: Path) -> None:
    class First(Hook):
        ranks = "zero"

        def setup(self) -> None:
            pytest.fail("this is rank 1")

    heard = recorder(["setup"])
    net, sgd = net_and_sgd()
    line = Line(net, sgd, hooks=[First(), heard], logger=True, run_dir=tmp_path)
    line.set_rank(1, 1, 2)
    train(line, net, sgd, batches(1))
    assert heard.seen == ["setup"]
    assert not list(tmp_path.iterdir())  # there is one record of a run, rank zero's


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


# ---- steering ---------------------------------------------------------------------------------------------------------------


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


def test_a_request_to_stop_ends_the_epochs() -> None:
    class Stops(Hook):
        def on_step_end(self, trainer: Any, step: int) -> None:
            if step == 3:
                trainer.stop("enough")

    net, sgd = net_and_sgd()
    line = Line(net, sgd, hooks=[Stops()])
    train(line, net, sgd, batches(2), epochs=10)
    assert (line.global_step, line.should_stop, line.stop_reason, line.status) == (
        3,
        True,
        "enough",
        "stopped",
    )
    assert line.state.epochs_seen == 1


def test_early_stopping_works_on_what_the_validation_logs() -> None:
    net, sgd = net_and_sgd(lr=0.0)
    line = Line(net, sgd, hooks=[EarlyStopping("val/loss", patience=2)])
    train(line, net, sgd, batches(2), epochs=10, val=batches(1))
    assert line.state.epochs_seen == 3 and "EarlyStopping" in line.stop_reason


def test_the_loop_may_stop_by_raising_as_a_hook_may() -> None:
    heard = recorder(["on_train_end", "on_exception", "teardown"])
    net, sgd = net_and_sgd()
    line = Line(net, sgd, hooks=[heard])
    with line:
        raise hookline.StopTraining("seen enough")
    assert heard.seen == ["on_train_end", "teardown"]
    assert (line.status, line.stop_reason) == ("stopped", "seen enough")


# ---- endings ----------------------------------------------------------------------------------------------------------------


def test_a_loop_that_fails_is_told_to_everyone_and_keeps_its_error() -> None:
    class Fails(Hook):
        def on_exception(self, exception: BaseException) -> None:
            raise ValueError("in the hook")

    heard = recorder(
        ["on_train_batch_end", "on_train_epoch_end", "on_train_end", "on_exception", "on_fit_end", "teardown"]
    )
    net, sgd = net_and_sgd()
    line = Line(net, sgd, hooks=[Fails(), heard])
    with pytest.raises(ZeroDivisionError) as error, line:
        for _ in line.epoch(batches(3)):
            1 / 0  # noqa: B018
    assert heard.seen == ["on_exception", "teardown"]
    assert line.status == "error"
    assert any("in the hook" in each for each in error.value.__notes__)


def test_ctrl_c_stays_what_it_is() -> None:
    heard = recorder(["on_exception", "on_train_end", "teardown"])
    net, sgd = net_and_sgd()
    line = Line(net, sgd, hooks=[heard])
    with pytest.raises(KeyboardInterrupt), line:
        raise KeyboardInterrupt
    assert heard.seen == ["on_exception", "teardown"] and line.status == "interrupted"


def test_a_set_up_that_fails_tears_down_whoever_was_set_up() -> None:
    class Broken(Hook):
        def setup(self) -> None:
            raise ValueError("no disk")

    heard = recorder(["setup", "on_train_start", "on_exception", "teardown"])
    net, sgd = net_and_sgd()
    with pytest.raises(ValueError, match="no disk"), Line(net, sgd, hooks=[heard, Broken()]):
        pytest.fail("the loop must not run")
    assert heard.seen == ["setup", "on_exception", "teardown"]


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


def test_a_line_can_be_used_again() -> None:
    heard = recorder(["setup", "teardown"])
    net, sgd = net_and_sgd()
    line = Line(net, sgd, hooks=[heard])
    train(line, net, sgd, batches(1))
    train(line, net, sgd, batches(1), epochs=2)
    assert heard.seen == ["setup", "teardown"] * 2


def test_a_line_inside_itself_is_refused_and_its_run_goes_on() -> None:
    net, sgd = net_and_sgd()
    line = Line(net, sgd, hooks=[heard := recorder(["on_exception", "on_step_end", "teardown"])])
    with line:
        with pytest.raises(hookline.HooklineError, match="in a run already"), line:
            pass
        for x, y in line.epoch(batches(1)):
            line.backward(F.mse_loss(net(x), y))
            sgd.step()
    assert heard.seen == ["on_step_end", "teardown"]


@pytest.mark.parametrize(
    "call",
    [
        lambda line, loss: next(line.epoch([1])),
        lambda line, loss: next(line.epochs(1)),
        lambda line, loss: next(line.validation([1])),
        lambda line, loss: line.start_batch(1),
        lambda line, loss: line.backward(loss),
        lambda line, loss: line.clip_gradients(1.0),
    ],
)
def test_outside_of_with_a_loop_is_told_what_is_missing(call: Any) -> None:
    net, sgd = net_and_sgd()
    with pytest.raises(hookline.HooklineError, match="with line:"):
        call(Line(net, sgd), net(torch.ones(1, 4)).sum())


# ---- what is kept and written -----------------------------------------------------------------------------------------------


class Counts(Hook):
    """Counts its calls, and keeps the count."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    @every("3 steps")
    def on_step_end(self, step: int) -> None:
        self.steps.append(step)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = list(state["steps"])


def test_hooks_go_on_where_they_were_with_the_loop_s_own_checkpoint(tmp_path: Path) -> None:
    first, (net, sgd) = Counts(), net_and_sgd()
    line = Line(net, sgd, hooks=[first])
    train(line, net, sgd, batches(5))
    torch.save({"net": net.state_dict(), "line": line.state_dict()}, tmp_path / "mine.pt")

    second, (net, sgd) = Counts(), net_and_sgd()
    line = Line(net, sgd, hooks=[second])
    line.load_state_dict(torch.load(tmp_path / "mine.pt")["line"])
    train(line, net, sgd, batches(5), epochs=2)
    assert line.global_step == 10 and line.state.resumed
    assert second.steps == [3, 6, 9]


def test_a_checkpoint_of_the_line_s_own_brings_everything_back(tmp_path: Path) -> None:
    first, (net, _) = Counts(), net_and_sgd()
    adam = torch.optim.Adam(net.parameters(), lr=0.1)
    line = Line(net, adam, hooks=[first], run_dir=tmp_path)
    with line:
        for x, y in line.epoch(batches(4)):
            line.backward(F.mse_loss(net(x), y))
            adam.step()
        line.save_checkpoint(tmp_path / "here")

    heard = recorder(["on_load_checkpoint", "on_checkpoint_load"])
    other = nn.Linear(4, 2)
    again = torch.optim.Adam(other.parameters(), lr=0.1)
    second = Counts()
    line = Line(other, again, hooks=[second, heard])
    with line:
        line.load_checkpoint(tmp_path / "here")
        assert torch.equal(other.weight, net.weight)
        assert again.state_dict()["state"][0]["step"] == 4
        assert (line.global_step, second.steps, line.state.resumed) == (4, [3], True)
    assert heard.seen == ["on_load_checkpoint", "on_checkpoint_load"]
    third = nn.Linear(4, 2)
    hookline.load_weights(third, tmp_path / "here")
    assert torch.equal(third.weight, net.weight)


def test_a_checkpoint_can_be_written_when_the_loop_is_over(tmp_path: Path) -> None:
    net, sgd = net_and_sgd()
    line = Line(net, sgd)
    train(line, net, sgd, batches(1))
    line.save_checkpoint(tmp_path / "late")
    other = nn.Linear(4, 2)
    hookline.load_weights(other, tmp_path / "late")
    assert torch.equal(other.weight, net.weight)
    with pytest.raises(hookline.OptionError, match="reason='soon', allowed: interval"):
        line.save_checkpoint(reason="soon")


def test_a_checkpoint_for_other_optimizers_is_refused_by_its_path(tmp_path: Path) -> None:
    net, sgd = net_and_sgd()
    with Line(net, sgd) as line:
        line.save_checkpoint(tmp_path / "here")
    with (
        Line(net) as line,
        pytest.raises(
            hookline.CheckpointError, match=r"here is not a checkpoint of a Line with 0 optimizers"
        ),
    ):
        line.load_checkpoint(tmp_path / "here")


def test_model_checkpoint_keeps_the_best(tmp_path: Path) -> None:
    net, sgd = net_and_sgd()
    hook = ModelCheckpoint(monitor="val/loss", save_top_k=1)
    line = Line(net, sgd, hooks=[hook], run_dir=tmp_path)
    train(line, net, sgd, batches(3), epochs=3, val=batches(1))
    assert Path(hook.best_model_path).is_dir()
    best = nn.Linear(4, 2)
    hookline.load_weights(best, hook.best_model_path)
    assert torch.equal(best.weight, net.weight)  # it got better every time


def test_rows_go_to_loggers_and_hooks_may_edit_them(tmp_path: Path) -> None:
    class Adds(Hook):
        def on_train_metrics(self, metrics: Any) -> None:
            if "train/loss" in metrics:  # what hooks log at on_step_end is a row of its own
                metrics["twice"] = 2 * metrics["train/loss"]

    net, sgd = net_and_sgd()
    line = Line(
        net,
        sgd,
        hooks=[Adds(), LRMonitor(), GradientMonitor(log_frequency=1), JSONLog()],
        logger=True,
        run_dir=tmp_path,
        log_every_n_steps=1,
    )
    train(line, net, sgd, batches(2), val=batches(1))
    rows = [json.loads(each) for each in next(tmp_path.glob("*.jsonl")).read_text().splitlines()]
    seen = {key for row in rows for key in (row.get("metrics") or row)}
    assert {"train/loss", "twice", "lr", "lr-SGD", "grad_norm", "val/loss"} <= seen
    assert list((tmp_path / "logs").glob("*.jsonl"))


def test_a_line_s_log_says_what_each_row_is_over(tmp_path: Path) -> None:
    net, sgd = net_and_sgd()
    line = Line(net, sgd, logger=True, run_dir=tmp_path, log_every_n_steps=1)
    train(line, net, sgd, batches(2), val=batches(1))
    rows = [json.loads(each) for each in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["over"] for row in rows if row["type"] == "metrics"] == [
        "step",
        "step",
        "evaluation",
        "epoch",
    ]


def test_a_loader_whose_length_is_not_implemented_is_one_of_unknown_length() -> None:
    class Endless:
        def __iter__(self) -> Any:
            return iter(batches(2))

        def __len__(self) -> int:
            raise NotImplementedError

    net, sgd = net_and_sgd()
    line, seen = Line(net, sgd), list[Any]()
    with line:
        seen += [line.num_training_batches for _ in line.epoch(Endless())]
    assert seen == [None, None]


def test_a_checkpoint_that_cannot_be_written_ends_the_run_or_is_told_as_chosen(tmp_path: Path) -> None:
    class Saves(Hook):
        failed: Any = None

        def on_step_end(self, trainer: Any) -> None:
            trainer.save_checkpoint(tmp_path / "file" / "checkpoint")

        def on_checkpoint_failed(self, path: Path, exception: Exception) -> None:
            self.failed = path, type(exception)

    (tmp_path / "file").touch()
    net, sgd = net_and_sgd()
    hook = Saves()
    with pytest.raises(hookline.CheckpointError, match="could not be written"):
        train(Line(net, sgd, hooks=[Saves()]), net, sgd, batches(2))
    train(line := Line(net, sgd, hooks=[hook], on_save_error="warn"), net, sgd, batches(2))
    assert line.status == "completed" and line.global_step == 2
    assert hook.failed == (tmp_path / "file" / "checkpoint", hookline.CheckpointError)
    with pytest.raises(hookline.OptionError, match=r"on_save_error='wran'.*Did you mean 'warn'"):
        Line(net, sgd, on_save_error="wran")


def test_messages_are_sent_from_a_loop_of_one_s_own() -> None:
    net, sgd = net_and_sgd()
    with serving() as server:
        train(Line(net, sgd, hooks=[Webhook(server.url())]), net, sgd, batches(1), val=batches(1))
        texts = [json.loads(each)["text"] for each in server.bodies]
    assert len(texts) == 2  # the best so far, and the end


def test_what_hooks_cost_is_accounted_for() -> None:
    net, sgd = net_and_sgd()
    line = Line(net, sgd, hooks=[Counts()])
    train(line, net, sgd, batches(6))
    assert [(row.hook, row.event, row.calls) for row in line.cost()] == [("counts", "on_step_end", 2)]
    assert "counts" in str(line.explain())


def test_a_hook_that_comes_late_or_leaves_early_is_set_up_and_torn_down() -> None:
    late = recorder(["setup", "on_train_start", "on_train_batch_end", "teardown"])
    net, sgd = net_and_sgd()
    line = Line(net, sgd)
    with line:
        for index, _ in enumerate(line.epoch(list(range(4)))):
            if index == 1:
                line.add_hook(late, "late")
            if index == 2:
                line.remove_hook("late")
    assert late.seen == ["setup", "on_train_batch_end", "teardown"]


# ---- what is refused --------------------------------------------------------------------------------------------------------


def test_an_event_that_the_host_cannot_tell_is_refused_when_the_hook_is_added() -> None:
    class Moves(Hook):
        def on_after_batch_transfer(self, batch: Any) -> None: ...

    with pytest.raises(
        hookline.HookError,
        match=r"hook 'moves' \(Moves\) listens to on_after_batch_transfer, which a loop with "
        r"hookline.Line cannot emit: the loop moves its batches itself",
    ):
        Line(*net_and_sgd(), hooks=[Moves()])


def test_a_part_of_the_trainer_that_the_host_has_not_is_refused_when_the_hook_is_added() -> None:
    class Mixes(Hook):
        def on_step_end(self, state: Any) -> None:
            state.trainer.loaders.set_weights({})

    with pytest.raises(
        hookline.HookError,
        match=r"'mixes' \(Mixes\) needs trainer.loaders in Mixes.on_step_end, which a loop",
    ):
        Line(*net_and_sgd()).add_hook(Mixes())


def test_what_is_asked_for_with_care_is_no_reason_to_refuse() -> None:
    class Careful(Hook):
        def on_step_end(self, trainer: Any) -> None:
            if hasattr(trainer, "loaders"):
                trainer.loaders.set_weights({})

    net, sgd = net_and_sgd()
    train(Line(net, sgd, hooks=[Careful()]), net, sgd, batches(1))


def test_a_trainer_s_part_that_is_not_there_is_named_when_it_is_asked_for() -> None:
    with pytest.raises(AttributeError, match=r"hookline.Line has no trainer.max_epoch for hooks"):
        _ = Line(*net_and_sgd()).max_epoch


def test_a_loss_without_a_graph_is_refused() -> None:
    net, sgd = net_and_sgd()
    with pytest.raises(hookline.LossError, match="detached"), Line(net, sgd) as line:
        line.backward(torch.tensor(1.0))


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("sgd", "str"),
        (3, "int"),
        (torch.optim.SGD, "SGD, a class"),
        ([nn.Linear(1, 1)], "Linear"),
        (nn.Linear(1, 1).parameters(), "Parameter"),
    ],
)
def test_something_else_than_an_optimizer_is_refused_when_it_is_given(given: Any, name: str) -> None:
    with pytest.raises(hookline.OptionError, match=f"torch.optim.Optimizer.*but got {name}"):
        Line(nn.Linear(4, 2), given)


def test_a_built_in_hook_that_can_do_nothing_in_a_loop_is_refused_when_it_is_added() -> None:
    with pytest.raises(
        hookline.HookError, match=r"SlurmRequeue\) has no effect in a loop with hookline.Line: it acts when"
    ):
        Line(nn.Linear(4, 2), hooks=[SlurmRequeue()])


def test_something_else_than_a_model_is_refused() -> None:
    with pytest.raises(hookline.OptionError, match=r"torch.nn.Module, not SGD"):
        Line(net_and_sgd()[1], net_and_sgd()[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", HOSTS)
def test_the_tables_of_hosts_speak_of_real_events(name: str) -> None:
    host = HOSTS[name]
    heard = {
        each.name for each in EVENTS if "H" in each.receivers and not each.action and each.inside != "own"
    }
    assert set(host.offers) <= heard and set(host.lacks) <= heard
    assert not set(host.offers) & set(host.lacks)
    never = heard - set(host.offers) - set(host.lacks)
    assert never <= {each for each in heard if "sanity" in each or "test" in each or "predict" in each} | {
        "on_validation_abandoned",
        "on_load_checkpoint",
        "on_checkpoint_load",
    }


# ---- cost -------------------------------------------------------------------------------------------------------------------


def test_a_step_that_nobody_listens_to_costs_few_calls() -> None:
    def is_ours(frame: FrameType) -> bool:
        return frame.f_code.co_filename.startswith((SOURCE, "<hookline"))

    def calls(hooks: list[Any]) -> float:
        counts = []
        for n in (20, 60):
            net, sgd = net_and_sgd()
            line, data = Line(net, sgd, hooks=hooks), batches(n)
            counts.append(python_calls(lambda: train(line, net, sgd, data), is_ours))  # noqa: B023
        return (counts[1] - counts[0]) / 40

    class Silent(Hook):
        """Hears nothing."""

    calls([])
    bare = calls([])
    assert 0 < bare <= CALLS_PER_STEP
    assert calls([Silent(f"silent_{n}") for n in range(20)]) == bare


def test_a_trainer_says_that_a_lines_checkpoint_is_not_of_its_own_kind(tmp_path: Path) -> None:
    net, sgd = net_and_sgd()
    with Line(net, sgd) as line:
        line.save_checkpoint(tmp_path / "here")
    with pytest.raises(hookline.CheckpointError, match=r"written by a hookline\.Line.*load_weights"):
        quiet().fit(net, batches(1), loss=F.mse_loss, optimizer=sgd, resume=tmp_path / "here")
