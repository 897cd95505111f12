"""`hookline.Line`: hooks in a loop that is written by hand."""

from __future__ import annotations

import difflib
import inspect
import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from dialects.looped import net_and_sgd, recorder, train
from servers import serving
from test_budgets import SOURCE, python_calls
from tiny import Net, batches, quiet
from torch.nn import functional as F

import hookline
from hookline import EVENTS, Hook, HooklineError, Line, OptionError, declare_event, every
from hookline.hooks import EarlyStopping, GradientMonitor, Webhook
from hookline.interop.hosted.host import RAW_LOOP
from hookline.report.runs import list_runs

CALLS_PER_STEP = 24


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


# ---- facts ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_line", [False, True])
def test_a_loop_that_calls_backward_itself_warns_of_hooks_that_wait_for_the_loss(
    by_line: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Waits(Hook):
        def on_after_backward(self) -> None: ...

        def on_step_end(self, loss: float) -> None: ...

    net, sgd = net_and_sgd()
    with Line(net, sgd, hooks=[Waits()]) as line:
        for x, y in line.epoch(batches(2)):
            loss = F.mse_loss(net(x), y)
            line.backward(loss) if by_line else loss.backward()
            sgd.step()
    said = [each for each in caplog.messages if "line.backward" in each]
    assert len(said) == (not by_line)
    if said:
        assert said[0].startswith("2 updates were made without line.backward(loss), so these events did not")
        assert "on_after_backward, and the loss was None at on_step_end" in said[0]


@pytest.mark.parametrize("has_batches", [False, True])
def test_a_loop_without_batches_warns_of_hooks_that_wait_for_them(
    has_batches: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Waits(Hook):
        def on_step_end(self) -> None: ...

        def on_train_epoch_end(self) -> None: ...

    class Served(Hook):
        def on_after_optimizer_step(self) -> None: ...

    net, sgd = net_and_sgd()
    with Line(net, sgd, hooks=[Waits(), Served(), EarlyStopping("val/loss")]) as line:
        for batch in line.epoch(batches(2)) if has_batches else batches(2):
            F.mse_loss(net(batch[0]), batch[1]).backward()
            sgd.step()
        for batch in line.validation(batches(1)):
            line.log("val/loss", F.mse_loss(net(batch[0]), batch[1]))
    said = [each for each in caplog.messages if "did not fire" in each]
    assert len(said) == (not has_batches)
    assert not any("line.backward" in each for each in caplog.messages), "no hook waits for the loss"
    if said:
        assert said[0].startswith("2 updates were made outside of line.epoch(loader)")
        assert "on_step_end (hooks: waits); on_train_epoch_end (hooks: waits). Use" in said[0]


def test_the_list_of_runs_says_how_a_loop_ended(tmp_path: Path) -> None:
    def status() -> tuple[str, bool, str]:
        (found,) = list_runs(tmp_path).runs
        return found.status, found.is_certain, found.reason

    def loop(epochs: int, fails: bool = False) -> None:
        net, sgd = net_and_sgd()
        with Line(net, sgd, logger=True, run_dir=tmp_path / "x") as line:
            for _ in line.epochs(epochs):
                for batch in line.epoch(batches(2)):
                    line.backward(F.mse_loss(net(batch[0]), batch[1]))
                    sgd.step()
                if fails:
                    seen.append(status()[0])
            if fails:
                raise ValueError("on purpose")

    seen: list[str] = []
    loop(2)
    assert status() == ("completed", True, "")
    with pytest.raises(ValueError, match="on purpose"):
        loop(3, fails=True)
    assert seen == ["running"] * 3  # from its first update on
    assert status() == ("failed", True, "ValueError: on purpose")


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


# ---- steering ---------------------------------------------------------------------------------------------------------------


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


def test_a_line_can_be_used_again() -> None:
    heard = recorder(["setup", "teardown"])
    net, sgd = net_and_sgd()
    line = Line(net, sgd, hooks=[heard])
    train(line, net, sgd, batches(1))
    train(line, net, sgd, batches(1), epochs=2)
    assert heard.seen == ["setup", "teardown"] * 2


def test_a_line_inside_itself_is_refused_and_its_run_continues() -> None:
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


def test_messages_are_sent_from_a_loop_of_one_s_own() -> None:
    net, sgd = net_and_sgd()
    with serving() as server:
        train(Line(net, sgd, hooks=[Webhook(server.url())]), net, sgd, batches(1), val=batches(1))
        texts = [json.loads(each)["text"] for each in server.bodies]
    assert len(texts) == 2  # the best so far, and the end


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


def test_a_loss_without_a_graph_is_refused() -> None:
    net, sgd = net_and_sgd()
    with pytest.raises(hookline.LossError, match="detached"), Line(net, sgd) as line:
        line.backward(torch.tensor(1.0))


# ---- cost -------------------------------------------------------------------------------------------------------------------


def test_a_step_without_listeners_costs_few_calls() -> None:
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


@pytest.fixture
def game_over() -> Iterator[None]:
    """An event of the user's own."""
    declare_event("on_game_over", facts=("score",), doc="A game is over.", replaces="score")
    yield
    EVENTS.forget("on_game_over")


@pytest.mark.usefixtures("game_over")
def test_a_loop_fires_events_that_were_declared() -> None:
    scores: list[float] = []

    class Bonus(Hook):
        def on_game_over(self, trainer, step, score):
            assert trainer is line
            return score + step

    class Seen(Hook):
        @every(2)
        def on_game_over(self, score):
            scores.append(score)

    net, sgd = net_and_sgd()
    line = Line(net, sgd, hooks=[Bonus(), Seen()])
    with line:
        for inputs, targets in line.epoch(batches(4)):
            line.backward(F.mse_loss(net(inputs), targets))
            sgd.step()
            assert line.emit("on_game_over", score=10) == 10 + line.global_step
    assert scores == [12, 14]
    with pytest.raises(HooklineError, match=r"on_game_over has the facts score; got scores"):
        line.emit("on_game_over", scores=1)
    with pytest.raises(HooklineError, match=r"has the facts score; got none\. Missing: score\.$"):
        line.emit("on_game_over")
    with pytest.raises(HooklineError, match="on_step_end is emitted by the loops"):
        line.emit("on_step_end")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "audit",
            r"a loop with hookline.Line has no option 'audit'. Only hookline.Trainer has it. Options: ",
        ),
        ("log_every_n_step", r"no option 'log_every_n_step'.*Did you mean 'log_every_n_steps'\?"),
        ("holds_rows", r"no option 'holds_rows'.*Options: module, optimizers, schedulers, hooks, logger"),
    ],
)
def test_an_option_that_a_line_does_not_have_is_refused_by_name(name: str, text: str) -> None:
    net, sgd = net_and_sgd()
    with pytest.raises(OptionError, match=text) as caught:
        Line(net, sgd, **{name: True})
    assert caught.value.option == name and "run_dir" in caught.value.allowed


class Slow:
    """A loader that takes its time, also to begin."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __iter__(self) -> Iterator[Any]:
        time.sleep(self.seconds)
        for batch in batches(3):
            time.sleep(self.seconds)
            yield batch


def test_waiting_for_the_loader_is_not_counted_as_training(tmp_path: Path) -> None:
    net, sgd = net_and_sgd()
    seen = []

    class Reads(Hook):
        def on_train_epoch_end(self, timings: Any) -> None:
            seen.append((timings.data >= 0.2, timings.validation >= 0.04))

    line = Line(net, sgd, hooks=[Reads()], logger=True, run_dir=tmp_path)
    with line:
        time.sleep(0.05)  # before training
        for _ in line.epochs(1):
            for x, y in line.epoch(Slow(0.05)):
                line.backward(F.mse_loss(net(x), y))
                sgd.step()
            for x, y in line.validation(Slow(0.01)):
                line.log("val/loss", F.mse_loss(net(x), y))
    spent = line.timings
    assert spent is not None and seen == [(True, True)] and spent.batches == 3
    assert spent.data >= 0.2 and spent.validation >= 0.04
    parts = spent.training + spent.data + spent.validation + spent.saving + (spent.hooks or 0.0)
    assert spent.total == pytest.approx(parts) and spent.training <= spent.total - 0.24
    *_, last = str(line.cost()).splitlines()
    assert (
        last == f"Time: {spent}" and "waiting for data" in last and "waiting for" in line.cost()._repr_html_()
    )
    rows = [json.loads(each) for each in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [each["data"] for each in rows if each["type"] == "timings"] == [spent.data]


def test_a_loop_that_reads_its_batches_itself_does_not_show_a_split_that_is_not_known() -> None:
    net, sgd = net_and_sgd()
    with Line(net, sgd, hooks=[recorder(["on_step_end"])]) as line:
        for x, y in batches(2):
            line.start_batch((x, y))
            line.backward(F.mse_loss(net(x), y))
            sgd.step()
            line.end_batch()
    assert "Time:" not in str(line.cost())


def test_the_cost_of_hooks_is_printed_as_a_table() -> None:
    net, sgd = net_and_sgd()
    line = Line(net, sgd, hooks=[recorder(["on_train_start", "on_step_end", "on_train_end"])])
    train(line, net, sgd, batches(3))
    first, head, *rows = str(line.cost()).splitlines()
    assert first.startswith("Hooks took ") and head.split()[:3] == ["hook", "event", "calls"]
    assert sorted(row.split()[:3] for row in rows[:3]) == [
        ["records", "on_step_end", "3"],
        ["records", "on_train_end", "1"],
        ["records", "on_train_start", "1"],
    ]
    assert isinstance(line.cost(), list) and len(line.cost()) == 3
