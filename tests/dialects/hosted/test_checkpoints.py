"""Checkpoints of a loop written by hand."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from dialects.looped import Counts, net_and_sgd, recorder, train
from tiny import batches, quiet
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import hookline
from hookline import CheckpointError, Hook, Line, every
from hookline.checkpoint.files import read_manifest
from hookline.engine.events import EVENTS
from hookline.hooks import ModelCheckpoint


def test_hooks_continue_where_they_were_with_the_loop_s_own_checkpoint(tmp_path: Path) -> None:
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


def test_sharded_weights_are_refused_and_not_saved_in_part(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        net = fully_shard(nn.Linear(4, 2), mesh=init_device_mesh("cpu", (1,)))
        line = Line(net, torch.optim.SGD(net.parameters(), lr=0.1), run_dir=tmp_path)
        with pytest.raises(
            CheckpointError, match=r"sharded over ranks \(2, such as weight\).*strategy='fsdp'"
        ):
            line.save_checkpoint(tmp_path / "here")
        assert not (tmp_path / "here").exists()
    finally:
        torch.distributed.destroy_process_group()


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


def test_a_trainer_says_that_a_lines_checkpoint_is_not_of_its_own_kind(tmp_path: Path) -> None:
    net, sgd = net_and_sgd()
    with Line(net, sgd) as line:
        line.save_checkpoint(tmp_path / "here")
    with pytest.raises(hookline.CheckpointError, match=r"written by a hookline\.Line.*load_weights"):
        quiet().fit(net, batches(1), loss=F.mse_loss, optimizer=sgd, resume=tmp_path / "here")


def test_state_taken_in_the_middle_of_a_batch_has_heard_of_its_update() -> None:
    class Counts(Hook):
        def __init__(self) -> None:
            super().__init__()
            self.steps: list[int] = []

        @every("2 steps")
        def on_step_end(self, step: int) -> None:
            self.steps.append(step)

        def state_dict(self) -> dict[str, Any]:
            return {"steps": list(self.steps)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.steps = list(state["steps"])

    kept: dict[str, Any] = {}
    for n in (4, 6):  # of which 4 are done
        net, sgd = net_and_sgd()
        line = Line(net, sgd, hooks=[hook := Counts()])
        if kept:
            line.load_state_dict(kept)
        with line:
            for x, y in line.epoch(batches(n)):
                line.backward(F.mse_loss(net(x), y))
                sgd.step()
                if line.global_step == 4:
                    kept = line.state_dict()
    assert hook.steps == [2, 4, 6]
    assert (line.state.batches_seen, line.state.samples_seen) == (6, 18)


def test_a_checkpoint_that_a_killed_process_owed_has_the_loaded_weights() -> None:
    def run(data: int, start: str = "") -> None:
        net, sgd = net_and_sgd()
        keep = [ModelCheckpoint(every_n_train_steps=2, dirpath=each, save_top_k=-1) for each in "ab"]
        with Line(net, sgd, hooks=keep, run_dir="run") as line:
            if start:
                line.load_checkpoint(start)
            for _ in line.epochs(1):
                for x, y in line.epoch(batches(data)):
                    line.backward(F.mse_loss(net(x), y))
                    sgd.step()
                    sgd.zero_grad()

    def weights(path: str) -> Any:
        hookline.load_weights(net := net_and_sgd()[0], path)
        return net.state_dict()["weight"]

    run(2)
    first, owed = "run/a/epoch=0-step=2", "run/b/epoch=0-step=2"
    shutil.rmtree(owed)  # as if the process had been killed between the two
    run(3, first)
    assert torch.equal(weights(owed), weights(first)) and read_manifest(owed)["step"] == 2


class Starts(Hook):
    """Notes the events around a start, and what a hook knows then."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, bool]] = []

    def setup(self, step: int, resumed: bool) -> None:
        self.events.append(("setup", step, resumed))

    def on_checkpoint_load(self, step: int, resumed: bool) -> None:
        self.events.append(("load", step, resumed))

    def on_fit_start(self, step: int, resumed: bool) -> None:
        self.events.append(("fit", step, resumed))

    def on_train_start(self, step: int, resumed: bool) -> None:
        self.events.append(("train", step, resumed))

    def on_before_zero_grad(self, step: int, resumed: bool) -> None:
        self.events.append(("zero_grad", step, resumed))


def test_a_hook_starts_with_the_step_of_the_loaded_checkpoint_as_with_the_trainer(tmp_path: Path) -> None:
    (net, sgd), hook = net_and_sgd(), Starts()
    with Line(net, sgd, hooks=[hook], run_dir=tmp_path) as line:
        assert line.load_checkpoint("auto") is False
        assert hook.events == [("setup", 0, False)]
        for x, y in line.epoch(batches(2)):
            line.backward(F.mse_loss(net(x), y))
            sgd.step()
        line.save_checkpoint(tmp_path / "checkpoints/last")
    assert hook.events == [("setup", 0, False), ("fit", 0, False), ("train", 0, False)]

    (net, sgd), hook = net_and_sgd(), Starts()
    with Line(net, sgd, hooks=[hook], run_dir=tmp_path) as line:
        assert line.load_checkpoint("auto") is True
        starts = [("setup", 0, False), ("load", 2, True), ("fit", 2, True), ("train", 2, True)]
        assert hook.events == starts
        sgd.zero_grad()
    assert hook.events == [*starts, ("zero_grad", 2, True)]


@pytest.mark.parametrize("call", ["nothing", "zero_grad", "step", "validation", "state_dict", "emit"])
def test_a_run_starts_before_anything_else_happens_in_it(call: str) -> None:
    (net, sgd), hook = net_and_sgd(), Starts()
    EVENTS.declare("on_round")
    calls = {
        "nothing": lambda line: None,
        "zero_grad": lambda line: sgd.zero_grad(),
        "step": lambda line: sgd.step(),
        "validation": lambda line: [*line.validation(batches(1))],
        "state_dict": lambda line: line.state_dict(),
        "emit": lambda line: line.emit("on_round"),
    }
    with Line(net, sgd, hooks=[hook]) as line:
        calls[call](line)
        EVENTS.forget("on_round")
        if call != "nothing":
            assert hook.events[:3] == [("setup", 0, False), ("fit", 0, False), ("train", 0, False)]
    assert [name for name, *_ in hook.events[:3]] == ["setup", "fit", "train"]
    assert len(hook.events) == 3 + (call == "zero_grad")


def test_a_checkpoint_cannot_be_loaded_inside_an_epoch(tmp_path: Path) -> None:
    net, sgd = net_and_sgd()
    before = r"inside an epoch.*before `for epoch in line.epochs"
    with pytest.raises(hookline.HooklineError, match=before), Line(net, sgd, run_dir=tmp_path) as line:
        for _ in line.epochs(1):
            line.load_checkpoint("auto")


@pytest.mark.parametrize("reads", [True, False])
def test_a_loop_without_an_optimizer_keeps_the_checkpoint_of_its_newest_epoch(
    reads: bool, tmp_path: Path
) -> None:
    """Its step stays 0, so the step alone does not say that a checkpoint is of the same state."""
    found = []
    for epochs in (2, 3):
        net = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.zeros_(net.weight)
        saving = ModelCheckpoint(save_top_k=2)
        with Line(net, hooks=[saving], run_dir=tmp_path) as line:
            line.load_checkpoint("auto")
            for _ in line.epochs(epochs):
                if reads:
                    assert list(line.epoch(range(3))) == [0, 1, 2]
                else:
                    line.start_epoch()
                with torch.no_grad():
                    net.weight += 1
        found.append(sorted(each.name for each in (tmp_path / "checkpoints").iterdir()))
    first, last = ["epoch=0-step=0", "epoch=1-step=0"], ["epoch=1-step=0", "epoch=2-step=0"]
    assert found == [first, last] and net.weight[0, 0] == 3
    assert Path(saving.best_model_path).name == last[-1]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda net: torch.optim.Adam(net.parameters()), r"other optimizers .* There: AdamW\. Here: Adam\."),
        (lambda net: torch.optim.SGD(net.parameters(), 0.1), r"There: AdamW\. Here: SGD\."),
        (
            lambda net: torch.optim.AdamW([*net.parameters()][::-1]),
            r"cannot be restored: .* two\.bias is in group 0, at place 3 in the checkpoint, and in group 0, at "
            r"place 0 here\. Resume with the same parameters",
        ),
    ],
)
def test_a_checkpoint_of_another_optimizer_or_order_is_refused_before_anything_is_restored(
    make: Any, text: str, tmp_path: Path
) -> None:
    net = nn.ModuleDict({"one": nn.Linear(4, 4), "two": nn.Linear(4, 4)})  # places have the same shapes
    with Line(net, torch.optim.AdamW(net.parameters()), run_dir=tmp_path) as line:
        line.save_checkpoint(tmp_path / "first")
    with torch.no_grad():
        net["one"].weight.fill_(7.0)
    with pytest.raises(CheckpointError, match=text) as refused, Line(net, make(net)) as line:
        line.load_checkpoint(tmp_path / "first")
    assert str(tmp_path / "first") in str(refused.value) and (net["one"].weight == 7.0).all()
