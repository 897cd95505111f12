"""Planted spikes: they are reported, skipped or undone, at the same update however often a run is killed."""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import preloaded
import pytest
import torch
from tiny import quiet
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import hookline
from hookline import Hook, HooklineError, Line, Module, OptionError, Trainer
from hookline.checkpoint.files import read
from hookline.hooks import ModelCheckpoint, SpikeGuard
from hookline.loggers import JSONLines, read_log
from hookline.report.reader import read_run
from hookline.report.run_events import all_events, level


class Net(Module):
    """A regression that learns in a few steps, with dropout, so that random numbers matter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 1)
        self.drop = torch.nn.Dropout(0.1)

    def training_step(self, batch: Any) -> Any:
        return F.mse_loss(self.layer(self.drop(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02)


def planted(*bad: int, count: int = 48, target: float = 1e4, **options: Any) -> Any:
    """`count` batches of two samples, of which these batches have a poisoned target."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(2 * count, 4, generator=generator)
    targets = inputs.sum(1, keepdim=True)
    for batch in bad:
        targets[2 * batch + 1] = target
    return DataLoader(TensorDataset(inputs, targets), 2, **options)


class Seen(Hook):
    """What was trained, as the final run has it."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []

    def on_train_batch_end(self, epoch: int, batch_idx: int, step: int, loss: float) -> None:
        self.batches.append([epoch, batch_idx, step, loss])

    def state_dict(self) -> dict[str, Any]:
        return {"batches": [list(each) for each in self.batches]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = [list(each) for each in state["batches"]]


def guard(action: str, **options: Any) -> SpikeGuard:
    return SpikeGuard(action, **{"window": 16, **options})  # type: ignore[arg-type]


def fit(
    run_dir: Path, data: Any, *hooks: Any, net: Module | None = None, resume: Any = None, **options: Any
) -> Trainer:
    usual: dict[str, Any] = {"max_epochs": 1, "seed": 3, "checkpoint": True, "log_every_n_steps": 5}
    trainer = quiet(run_dir=run_dir, hooks=hooks, **(usual | options))
    trainer.fit(Net() if net is None else net, data, resume=resume)
    return trainer


def saves(every: int = 5, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(every_n_train_steps=every, save_top_k=-1, filename="{step}", **options)


def weights(trainer: Trainer) -> list[float]:
    found: list[float] = torch.cat([each.detach().flatten() for each in trainer.module.parameters()]).tolist()
    return found


# ---- report ---------------------------------------------------------------------------------------------------------


def test_a_spike_is_reported_and_nothing_else_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watch = guard("report")
    watched = fit(tmp_path / "a", planted(30), watch, logger=[JSONLines()])
    assert weights(watched) == weights(fit(tmp_path / "b", planted(30)))
    (event,) = [each for each in read_log(tmp_path / "a") if each["type"] == "spike"]
    assert {name: event[name] for name in ("step", "epoch", "batch", "monitor", "action", "number")} == {
        "step": 31,
        "epoch": 0,
        "batch": 30,
        "monitor": "loss",
        "action": "report",
        "number": 1,
    }
    assert event["value"] > 1e6 > event["limit"] > event["median"] > 0
    found = re.findall(
        r"SpikeGuard: loss .* at step 31 \(epoch 0, batch 30\) is above its range", caplog.text
    )
    assert len(found) == 1  # not for each of the updates that follow, whose loss is high, too
    assert watch.spikes >= 1
    rows = [each["metrics"] for each in read_log(tmp_path / "a") if each["type"] == "metrics"]
    assert max(each.get("spike/count", 0) for each in rows) == watch.spikes
    (shown,) = [each for each in all_events(read_run(tmp_path / "a")) if each.kind == "spike"]
    assert level("spike") == "warn" and shown.step == 31 and "batch 30 (report)" in shown.text


def test_an_ordinary_run_has_no_spikes(tmp_path: Path) -> None:
    """Not while the loss falls from a high value, and not by the noise of single batches."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(600, 4, generator=generator)
    targets = inputs.sum(1, keepdim=True) + torch.randn(600, 1, generator=generator) + 20
    watch = SpikeGuard(window=64)
    fit(tmp_path, DataLoader(TensorDataset(inputs, targets), 4), watch)
    assert watch.spikes == 0


def test_a_spike_does_not_hide_the_next_one(tmp_path: Path) -> None:
    """With mean and standard deviation it would, for as long as it is among the values."""
    watch = guard("skip")
    fit(tmp_path, planted(20, 22, 24, target=50.0), watch)
    assert watch.spikes == 3


def test_reports_read_the_device_only_when_a_row_is_due() -> None:
    """On the meta device every read raises."""
    watch, sizes = SpikeGuard(), []

    class Counts(Hook):
        def on_step_end(self, trainer: Any, step: int) -> None:
            sizes.append(len(watch._unread))
            if step == 20:
                trainer.remove_hook(watch)

    trainer = quiet(
        device="meta", hooks=[Counts(), watch], log_every_n_steps=1000, nonfinite="stop", max_steps=20
    )
    trainer.fit(Net(), planted())
    assert sizes == [*range(20)]
    assert all(isinstance(value, Tensor) for value, _ in watch._unread)


# ---- skip -----------------------------------------------------------------------------------------------------------


def test_the_update_of_a_spike_is_skipped(tmp_path: Path) -> None:
    seen, watch = Seen(), guard("skip")
    trainer = fit(tmp_path, planted(30), seen, watch, logger=[JSONLines()])
    assert (trainer.global_step, watch.spikes) == (47, 1)
    assert max(loss for _, batch, _, loss in seen.batches if batch != 30 and batch > 10) < 20
    assert [each["reason"] for each in read_log(tmp_path) if each["type"] == "skip"] == ["hook"]


@pytest.mark.parametrize("clip", [None, 1.0])
def test_the_gradient_norm_can_be_watched_and_clipping_still_reports_it(
    tmp_path: Path, clip: float | None
) -> None:
    """A small loss with a large gradient: the loss alone would not show it."""

    class Steep(Net):
        def training_step(self, batch: Any) -> Any:
            loss = super().training_step(batch)
            factor = 1e4 if self.trainer.state.batch_idx == 30 else 1.0
            return loss + factor * (self.layer.bias - self.layer.bias.detach()).sum()

    norms: list[float] = []

    class Norms(Hook):
        def on_step_end(self, grad_norm: float) -> None:
            norms.append(grad_norm)

    by_loss, by_norm = guard("skip"), guard("skip", monitor="grad_norm")
    options = {"gradient_clip_val": clip}
    fit(tmp_path / "loss", planted(), by_loss, net=Steep(), **options)
    trainer = fit(tmp_path / "norm", planted(), by_norm, Norms(), net=Steep(), **options)
    assert (by_loss.spikes, by_norm.spikes, trainer.global_step) == (0, 1, 47)
    plain = norms[:20]
    norms.clear()
    fit(tmp_path / "plain", planted(), Norms(), net=Steep(), **options)
    assert plain == norms[:20]
    reported = guard("report", monitor="grad_norm")
    fit(tmp_path / "report", planted(), reported, net=Steep(), **options)
    assert reported.spikes >= 1


def test_of_an_accumulation_window_the_mean_counts(tmp_path: Path) -> None:
    """One batch of three makes the spike, and the whole window is skipped, whatever the number of optimizers."""

    class Two(Net):
        def configure_optimizers(self) -> Any:
            return [
                torch.optim.SGD([self.layer.weight], lr=0.02),
                torch.optim.SGD([self.layer.bias], lr=0.02),
            ]

    watch = guard("skip", window=8)
    trainer = fit(tmp_path, planted(31), watch, net=Two(), accumulate_grad_batches=3)
    assert (trainer.global_step, watch.spikes) == (15, 1)
    assert watch._seen[:2] == (0, 48)


# ---- rollback -------------------------------------------------------------------------------------------------------


def test_the_run_goes_back_and_leaves_the_batches_of_the_spike_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Three spikes in a row: the first two are skipped."""
    seen, watch = Seen(), guard("rollback")
    trainer = fit(tmp_path, planted(30, 31, 32), seen, saves(), watch, logger=[JSONLines()])
    assert (watch.rollbacks, watch.left_out) == (1, [(0, 30, 30), (0, 31, 31), (0, 32, 32)])
    assert [batch for _, batch, _, _ in seen.batches] == [*range(30), *range(33, 48)]
    assert [step for _, _, step, _ in seen.batches] == [*range(1, 46)]
    (done,) = json.loads((tmp_path / "run.json").read_text())["rollbacks"]
    assert (done["from_step"], done["step"], done["from_batch"]) == (30, 25, 33)
    assert re.fullmatch(
        r"SpikeGuard: loss .* at step 31 \(epoch 0, batch 32\), the last of 3 spikes in a row", done["reason"]
    )
    assert trainer.hooks.list_hooks() == ["seen", "model_checkpoint", "spike_guard"]
    shown = [each for each in all_events(read_run(tmp_path)) if each.kind == "rollback"]
    assert len(shown) == 1 and "SpikeGuard: loss" in shown[0].text

    # a run that never had these batches takes the same way
    plain_seen = Seen()

    class Skips(Hook):
        def on_train_batch_start(self, batch_idx: int) -> Any:
            return hookline.SKIP_BATCH if batch_idx in (30, 31, 32) else None

    plain = fit(tmp_path / "plain", planted(30, 31, 32), plain_seen, Skips())
    assert weights(plain) == weights(trainer) and plain_seen.batches == seen.batches


def test_a_checkpoint_without_a_state_of_the_guard_is_gone_back_to_once(tmp_path: Path) -> None:
    """A run that was begun without the guard, and is resumed with it."""
    fit(tmp_path, planted(30), saves(), Stops(10))
    watch = guard("rollback", patience=1, threshold=100)
    trainer = fit(tmp_path, planted(30), saves(1000), watch, resume="auto", max_time=1e6)
    assert (watch.rollbacks, watch.left_out, trainer.global_step) == (1, [(0, 30, 30)], 47)


def test_two_spikes_in_a_row_are_only_skipped(tmp_path: Path) -> None:
    watch = guard("rollback")
    trainer = fit(tmp_path, planted(30, 31), saves(), watch)
    assert (watch.spikes, watch.rollbacks, trainer.global_step) == (2, 0, 46)


@pytest.mark.parametrize(
    ("options", "more", "left_out", "step"),
    [
        ({}, {}, [(0, 30, 30)], 25),
        ({"margin": 6, "skip_batches": 7}, {}, [(0, 23, 30)], 20),
        ({"window": 8}, {"accumulate_grad_batches": 3}, [(0, 30, 32)], 5),
        ({"window": 8, "skip_batches": 4}, {"accumulate_grad_batches": 3}, [(0, 24, 32)], 5),
    ],
)
def test_margin_and_batches_to_leave_out(
    tmp_path: Path, options: dict[str, Any], more: dict[str, Any], left_out: list[Any], step: int
) -> None:
    loaded: list[int] = []

    class Looks(Hook):
        def on_checkpoint_load(self, step: int) -> None:
            loaded.append(step)

    watch = guard("rollback", patience=1, **options)
    fit(tmp_path, planted(30), saves(), Looks(), watch, **more)
    assert (watch.left_out, loaded) == (left_out, [step])


def test_batches_that_are_left_out_do_not_widen_the_window_after_them(tmp_path: Path) -> None:
    """Two windows in a row have spikes: each rollback leaves out its own window, and one before it."""
    watch = guard("rollback", window=8, patience=1, skip_batches=1)
    fit(tmp_path, planted(30, 32), saves(), watch, accumulate_grad_batches=2)
    assert (watch.rollbacks, watch.left_out) == (2, [(0, 28, 31), (0, 30, 33)])


def test_workers_and_saves_in_the_background_and_a_second_epoch(tmp_path: Path) -> None:
    """The batches of the first epoch's end and of the second are left out after going back to the first."""
    seen, watch = Seen(), guard("rollback", patience=4)
    data = planted(0, 1, 22, 23, count=24, num_workers=1)
    trainer = fit(tmp_path, data, seen, saves(7), watch, max_epochs=2, checkpoint="async")
    assert watch.rollbacks == 1
    assert watch.left_out == [(0, 22, 22), (0, 23, 23), (1, 0, 0), (1, 1, 1)]
    trained = [(epoch, batch) for epoch, batch, _, _ in seen.batches]
    assert trained == [(0, each) for each in range(22)] + [(1, each) for each in range(2, 24)]
    assert trainer.status == "completed"


def test_a_loss_that_is_not_finite_does_not_wait(tmp_path: Path) -> None:
    watch = guard("rollback")
    trainer = fit(tmp_path, planted(30, target=math.nan), saves(), watch)
    assert (watch.rollbacks, watch.left_out) == (1, [(0, 30, 30)])
    assert trainer.global_step == 47 and all(map(math.isfinite, weights(trainer)))


def test_without_a_good_checkpoint_the_update_is_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watch = guard("rollback", patience=1)
    trainer = fit(tmp_path, planted(30), saves(40), watch)
    assert (watch.rollbacks, watch.left_out, trainer.global_step) == (0, [], 47)
    assert "no checkpoint of step 29 or before of this run" in caplog.text
    assert caplog.messages[-1].endswith("The run continues without going back.")


def test_without_a_good_checkpoint_excluded_samples_are_left_out_later_and_a_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watch = guard("rollback", patience=1, threshold=1000, exclude=True)
    trainer = fit(tmp_path, planted(30), saves(40), watch, max_epochs=2)
    assert "without going back. From the next epoch on, 2 samples will be left out." in caplog.text
    assert (watch.rollbacks, watch.spikes, trainer.global_step) == (0, 1, 47 + 47)


def test_too_many_rollbacks_end_the_run(tmp_path: Path) -> None:
    watch = guard("rollback", patience=1, max_rollbacks=2)
    with pytest.raises(HooklineError, match=r"gone back 2 times already \(max_rollbacks=2\)"):
        fit(tmp_path, planted(25, 30, 35), saves(), watch)
    again = guard("rollback", patience=1, max_rollbacks=3)
    trainer = fit(tmp_path, planted(25, 30, 35), saves(), again, resume="auto")
    assert (again.rollbacks, trainer.status) == (3, "completed")
    assert again.left_out == [(0, 25, 25), (0, 30, 30), (0, 35, 35)]


# ---- resumes and kills ----------------------------------------------------------------------------------------------


class Stops(Hook):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_end(self, trainer: Any, batches_seen: int) -> None:
        if batches_seen == self.at:
            trainer.stop("cut")


@pytest.mark.parametrize("action", ["report", "skip", "rollback"])
@pytest.mark.parametrize("at", [13, 27, 31, 40])
def test_a_run_that_is_cut_and_resumed_decides_as_one_that_is_not(
    tmp_path: Path, action: str, at: int
) -> None:
    """To the bit: also if values wait to be read, and if the cut is inside a series of spikes."""
    made = [guard(action, patience=2) for _ in range(3)]
    seen = [Seen() for _ in range(3)]
    data = planted(30, 31, 36, 37)
    whole = fit(tmp_path / "whole", data, seen[0], saves(), made[0], log_every_n_steps=7)
    fit(tmp_path / "cut", data, seen[1], saves(), made[1], Stops(at), log_every_n_steps=7)
    again = fit(
        tmp_path / "cut", data, seen[2], saves(), made[2], resume="auto", log_every_n_steps=7, max_time=1e6
    )
    assert weights(again) == weights(whole)
    assert seen[2].batches == seen[0].batches
    assert made[2].state_dict() == made[0].state_dict()
    assert made[0].rollbacks == (2 if action == "rollback" else 0)


def test_an_update_that_a_failure_interrupts_is_judged_once(tmp_path: Path) -> None:
    class Fails(Hook):
        def on_step_skipped(self) -> None:
            raise RuntimeError("on purpose")

    def plain() -> Net:
        net = Net()
        net.drop.p = 0.0  # the batch is repeated with other random numbers
        return net

    made = [guard("skip") for _ in range(3)]
    whole = fit(tmp_path / "whole", planted(30), made[0], net=plain())
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(tmp_path / "cut", planted(30), made[1], Fails(), net=plain())
    again = fit(tmp_path / "cut", planted(30), made[2], resume="auto", net=plain())
    assert made[1].state_dict()["series"] == [[31, 0, 30, 30]]
    assert made[2].state_dict() == made[0].state_dict() and weights(again) == weights(whole)


SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
from hookline import Hook
from hooks.test_spike_guard import Seen, fit, guard, planted, saves, weights

class Dies(Hook):
    name = "dies"
    def __init__(self, event):
        self.back = 0
        def die(state, path=None):
            if event == "on_train_batch_start":
                is_now = state.trainer._run.resume.rollbacks and state.batch_idx == 34
            elif event == "on_load_checkpoint":
                is_now = state.trainer._run.resume.rollbacks
            else:
                is_now = state.trainer._run.resume.rollbacks and state.step <= 30
            if is_now:
                os.kill(os.getpid(), signal.SIGKILL)
        if event:
            self.__dict__[event] = die

event, run_dir = sys.argv[1:]
seen = Seen()
watch = guard("rollback", patience=2)
trainer = fit(
    Path(run_dir), planted(31, 32), seen, saves(), watch, Dies("" if event == "none" else event), resume="auto"
)
print(weights(trainer), seen.batches, watch.rollbacks, watch.left_out)
"""


def test_a_kill_before_during_and_after_a_rollback_changes_nothing(tmp_path: Path) -> None:
    """While the checkpoint is restored, before the restored state is saved, while it is, after it, and later."""

    def run(event: str, folder: str) -> Any:
        path = str(Path(__file__).parents[1])
        code = f"import sys; sys.path.insert(0, {path!r})\n" + textwrap.dedent(SCRIPT)
        return preloaded.run(
            [sys.executable, "-c", code, event, str(tmp_path / folder)], capture_output=True, text=True
        )

    whole = run("none", "whole")
    assert whole.returncode == 0, whole.stderr
    assert whole.stdout.endswith("1 [(0, 31, 31), (0, 32, 32)]\n")
    for event in (
        "on_load_checkpoint",
        "on_checkpoint_load",
        "on_save_checkpoint",
        "on_checkpoint_save",
        "on_train_batch_start",
    ):
        killed = run(event, event)
        assert killed.returncode == -9, killed.stderr
        again = run("none", event)
        assert again.returncode == 0, again.stderr
        assert again.stdout == whole.stdout, event


def test_the_restored_state_holds_what_the_guard_has_learned(tmp_path: Path) -> None:
    """A new process that resumes from it takes the way of the run that went back, to the bit."""
    import shutil

    class Copies(Hook):
        def on_checkpoint_save(self, path: Path, step: int, state: Any) -> None:
            if state.trainer._run.resume.rollbacks and not (tmp_path / "copy").exists():
                shutil.copytree(path, tmp_path / "copy")

    seen = [Seen(), Seen()]
    watches = [guard("rollback", patience=2, margin=3) for _ in seen]
    data = planted(31, 32)
    here = fit(tmp_path / "run", data, seen[0], saves(), watches[0], Copies())
    assert read(tmp_path / "copy")["hooks"]["spike_guard"]["left_out"] == [[0, 31, 31], [0, 32, 32]]
    there = fit(tmp_path / "new", data, seen[1], saves(), watches[1], resume=tmp_path / "copy")
    assert weights(here) == weights(there) and seen[0].batches == seen[1].batches
    assert watches[0].state_dict() == watches[1].state_dict()


# ---- other loops, refusals, cost ------------------------------------------------------------------------------------


def test_in_a_loop_of_your_own_it_reports_and_skips_and_refuses_to_go_back() -> None:
    for action in ("report", "skip"):
        watch, net = guard(action), Net()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
        with Line(net, optimizer, hooks=[watch], log_every_n_steps=5) as line:
            for batch in line.epoch(planted(30)):
                loss = F.mse_loss(net.layer(batch[0]), batch[1])
                optimizer.zero_grad()
                line.backward(loss)
                optimizer.step()
        assert watch.spikes >= 1
    net = Net()
    with (
        pytest.raises(OptionError, match=r"action='rollback' works in a fit of hookline\.Trainer"),
        Line(net, torch.optim.Adam(net.parameters()), hooks=[guard("rollback")]),
    ):
        pass


@pytest.mark.parametrize("action", ["report", "skip"])
def test_a_loss_that_it_does_not_receive_is_not_a_spike(
    action: Any, caplog: pytest.LogCaptureFixture
) -> None:
    net = torch.nn.Linear(4, 2)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    spikes = SpikeGuard(action)
    with Line(net, sgd, hooks=[spikes]) as line:
        for batch in line.epoch([torch.ones(2, 4)] * 3):
            net(batch).mean().backward()
            sgd.step()
    assert (spikes.spikes, line.global_step) == (0, 3)
    assert [each[:33] for each in caplog.messages if "SpikeGuard" in each] == [
        "SpikeGuard: step 1 (epoch 0, batc"
    ]
    assert "has no loss" in caplog.text and "finite" not in caplog.text


def test_under_the_rules_of_another_trainer_it_refuses_to_go_back(tmp_path: Path) -> None:
    from hookline.interop.lightning import LightningModule
    from hookline.interop.lightning import Trainer as LightningTrainer

    class Lit(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return F.mse_loss(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.02)

    def lightning(*hooks: Any) -> None:
        quietly: dict[str, Any] = {
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "logger": False,
        }
        LightningTrainer(max_epochs=1, callbacks=list(hooks), default_root_dir=tmp_path, **quietly).fit(
            Lit(), planted(30)
        )

    watch = guard("skip")
    lightning(watch)
    assert watch.spikes == 1
    with pytest.raises(OptionError, match="action='rollback' works in a fit of hookline.Trainer"):
        lightning(guard("rollback"))

    class Asks(Hook):
        def on_train_batch_end(self, state: Any) -> None:
            state.trainer.roll_back()

    with pytest.raises(HooklineError, match=r"not with the rules of another trainer \(LightningRules\)"):
        lightning(Asks())


def test_a_run_that_saves_nothing_is_refused_before_it_trains(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="needs checkpoints to go back to, and this run saves none"):
        fit(tmp_path, planted(), guard("rollback"), checkpoint=False)

    class Saves(Hook):
        def on_train_epoch_end(self, trainer: Any) -> None:
            trainer.save_checkpoint()

    class Derived(ModelCheckpoint):
        pass

    for hook in (Saves(), Derived()):
        assert fit(tmp_path, planted(), guard("rollback"), hook, checkpoint=False).status == "completed"
    wrong = guard("report")
    wrong.ranks = "zero"
    with pytest.raises(OptionError, match="all ranks must decide alike"):
        fit(tmp_path, planted(), wrong)


def test_a_second_fit_begins_anew(tmp_path: Path) -> None:
    watch = guard("rollback", patience=1)
    fit(tmp_path / "a", planted(30), saves(), watch)
    assert watch.rollbacks == 1
    fit(tmp_path / "b", planted(), saves(), watch)
    assert (watch.spikes, watch.rollbacks, watch.left_out) == (0, 0, [])


def test_what_it_costs_in_calls(caplog: pytest.LogCaptureFixture) -> None:
    """A listener of one event, and nothing at the start of a batch unless batches are left out."""
    for action, event in (
        ("report", "on_step_end"),
        ("skip", "on_before_optimizer_step"),
        ("rollback", "on_before_optimizer_step"),
    ):
        trainer = Trainer(hooks=[guard(action)], logger=False, enable_progress_bar=False)
        listening = {
            event
            for event in (
                "on_train_batch_start",
                "on_before_optimizer_step",
                "on_step_end",
                "on_train_batch_end",
            )
            if trainer.plan.listeners(event)
        }
        assert listening == {event}
    with caplog.at_level(logging.WARNING):
        assert "SpikeGuard" not in caplog.text
