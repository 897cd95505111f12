"""A loop written by hand that was stopped and is started again: finished if a hook had stopped it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from dialects.looped import net_and_sgd, train
from tiny import batches
from torch.nn import functional as F

from hookline import Hook, Line, OptionError, StopTraining
from hookline.checkpoint import files
from hookline.hooks import EarlyStopping, ModelCheckpoint
from hookline.loggers import read_log
from hookline.report.runs import list_runs

WORSE = [1.0, 0.5, 0.7, 0.8, 0.9]
"""val/loss of each epoch: the second is the best, and EarlyStopping(patience=1) stops after the third."""


class Loop:
    """A program with a loop, which can be started again."""

    def __init__(self, folder: Path, hooks: Any, losses: list[float] = WORSE) -> None:
        self.folder, self.hooks, self.losses = folder, hooks, losses
        self.epochs: list[int] = []

    def __call__(self, load: Any = "auto", epochs: int = 5) -> Line:
        self.epochs = []
        net, sgd = net_and_sgd()
        line = Line(net, sgd, hooks=self.hooks(), run_dir=self.folder, logger=True, log_every_n_steps=1)
        with line:
            line.load_checkpoint(load)
            for epoch in line.epochs(epochs):
                for x, y in line.epoch(batches(2)):
                    sgd.zero_grad()
                    line.backward(F.mse_loss(net(x), y))
                    sgd.step()
                for _ in line.validation(batches(1)):
                    line.log("val/loss", self.losses[epoch])
                self.epochs.append(epoch)
        return line


def stops_and_keeps() -> list[Hook]:
    return [
        EarlyStopping("val/loss", patience=1),
        ModelCheckpoint(monitor="val/loss", filename="best"),
        ModelCheckpoint(save_last=True, save_top_k=0, name="last"),
    ]


def sums(folder: Path) -> dict[str, str]:
    """The checksum of every file of a checkpoint."""
    return {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in folder.iterdir()}


def nothing_to_train(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each for each in caplog.messages if each.startswith("Nothing")]


def test_a_loop_that_a_hook_has_stopped_is_finished(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(tmp_path, stops_and_keeps)
    first = loop()
    assert loop.epochs == [0, 1, 2] and first.status == "stopped"
    assert not nothing_to_train(caplog)
    best, rows = sums(tmp_path / "checkpoints/best"), [*read_log(tmp_path)]
    for _ in range(2):
        caplog.clear()
        again = loop()
        assert loop.epochs == [] and (again.global_step, again.state.epochs_seen) == (6, 3)
        assert (again.status, again.stop_reason) == ("stopped", first.stop_reason)
        assert again.should_stop and not [*again.hooks["last"].best_k_models]
        (text,) = nothing_to_train(caplog)
        last = tmp_path / "checkpoints/last"
        assert text == (
            f"Nothing to train: this loop was stopped at step 6 ({first.stop_reason}). To train on, pass its "
            f"checkpoint: line.load_checkpoint({str(last)!r}), or train longer: line.epochs(n) with n above 5. "
            "To start over, choose another run_dir."
        )
        assert "EarlyStopping: val/loss" in text and "trains on" not in caplog.text
    # what the first run has left is as it was, and how it ended is written down again
    assert sums(tmp_path / "checkpoints/best") == best
    assert files.read_manifest(tmp_path / "checkpoints/best")["monitor"]["score"] == 0.5
    assert {each["type"] for each in [*read_log(tmp_path)][len(rows) :]} == {"end"}
    (listed,) = list_runs(tmp_path).runs
    assert (listed.status, listed.step, listed.epochs, listed.reason) == ("stopped", 6, 3, first.stop_reason)


@pytest.mark.parametrize("how", ["by the path", "longer"])
def test_a_finished_loop_trains_on_if_it_is_told_to(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path, stops_and_keeps, [*WORSE, 0.4, 0.3])
    reason = loop().stop_reason
    caplog.clear()
    if how == "by the path":
        last = tmp_path / "checkpoints/last"
        line = loop(last)
        assert f"The loop of {last} had been stopped: {reason}. It trains on." in caplog.messages
        assert not nothing_to_train(caplog)
    else:
        line = loop(epochs=7)
        assert len(nothing_to_train(caplog)) == 1
    assert loop.epochs == [3] and line.status == "stopped"  # the patience of EarlyStopping is over


def test_a_loop_whose_newest_checkpoint_is_older_than_the_stop_trains_until_it_is_stopped_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop(tmp_path, lambda: stops_and_keeps()[:2])
    for epochs in ([0, 1, 2], [2]):
        line = loop()
        assert loop.epochs == epochs and (line.status, line.global_step) == ("stopped", 6)
    assert not nothing_to_train(caplog) and "had been stopped" not in caplog.text


@pytest.mark.parametrize("how", ["line.stop", "StopTraining", "should_stop"])
def test_a_loop_that_leaves_by_itself_continues(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a signal: it saves, leaves and is started again."""
    done: list[int] = []
    for _ in range(2):
        net, sgd = net_and_sgd()
        with Line(net, sgd, hooks=[ModelCheckpoint(save_last=True)], run_dir=tmp_path) as line:
            resumed = line.load_checkpoint("auto")
            for _ in line.epochs(1):
                for x, y in line.epoch(batches(4)):
                    sgd.zero_grad()
                    line.backward(F.mse_loss(net(x), y))
                    sgd.step()
                    done.append(line.batch_idx)
                    if line.batch_idx == 1 and not resumed:
                        line.save_checkpoint(tmp_path / "checkpoints/signal")
                        if how == "StopTraining":
                            raise StopTraining("SIGTERM")
                        if how == "line.stop":
                            line.stop("SIGTERM")
                            line.stop("again")
                        else:
                            line.should_stop = True
    assert done == [0, 1, 2, 3] and line.status == "completed"
    assert not nothing_to_train(caplog) and "trains on" not in caplog.text


def test_a_loop_of_another_shape_reads_that_it_is_finished(tmp_path: Path) -> None:
    class Stops(Hook):
        def on_train_batch_end(self, trainer: Any, batches_seen: int) -> None:
            if batches_seen == 3:
                trainer.should_stop = True

    def trained(load: Any) -> tuple[int, Line]:
        net, sgd = net_and_sgd()
        count = 0
        with Line(net, sgd, hooks=[Stops(), ModelCheckpoint(save_last=True)], run_dir=tmp_path) as line:
            line.load_checkpoint(load)
            while line.global_step < 6 and not line.should_stop:
                line.start_epoch(2, first=line.global_step % 2)
                for x, y in batches(2)[line.global_step % 2 :]:
                    line.start_batch((x, y))
                    sgd.zero_grad()
                    loss = line.before_backward(F.mse_loss(net(x), y))
                    loss.backward()
                    line.after_backward()
                    sgd.step()
                    line.end_batch()
                    count += 1
                    if line.should_stop:
                        break
                line.end_epoch()
            assert [*line.epoch(batches(2))] == [] or not line.should_stop
        return count, line

    assert trained("auto")[0] == 3
    count, line = trained("auto")
    assert (count, line.status, line.stop_reason) == (0, "stopped", "trainer.should_stop was set")
    assert trained(tmp_path / "checkpoints/last")[0] == 3


def test_an_older_checkpoint_does_not_say_that_it_was_stopped(tmp_path: Path) -> None:
    loop = Loop(tmp_path, stops_and_keeps)
    loop()
    contents = files.read(tmp_path / "checkpoints/last")
    for name in ("stop", "epochs"):
        del contents["loop"][0][name]
    files.write(contents, tmp_path / "checkpoints/older")
    line = loop()
    assert loop.epochs == [3] and line.global_step == 8


def test_a_loop_continues_from_its_best_checkpoint(tmp_path: Path) -> None:
    def line(*hooks: Any) -> tuple[Line, Any, Any]:
        net, sgd = net_and_sgd()
        return (
            Line(net, sgd, hooks=[ModelCheckpoint("val/loss", mode="max"), *hooks], run_dir=tmp_path),
            net,
            sgd,
        )

    made, net, sgd = line(ModelCheckpoint(dirpath="epochs"))
    with made:
        assert not made.load_checkpoint("best")
    train(made, net, sgd, batches(2), epochs=2, val=batches(1))
    again, net, sgd = line(ModelCheckpoint(dirpath="epochs"))
    with again:
        assert again.load_checkpoint("best")
        assert again.global_step == 2  # the loss falls, and mode="max" keeps the first
        assert list(again.epochs(2)) == [1]


def test_another_number_of_schedulers_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net, sgd = net_and_sgd()
    train(Line(net, sgd, hooks=[ModelCheckpoint()], run_dir=tmp_path), net, sgd, batches(2))
    schedule = torch.optim.lr_scheduler.StepLR(sgd, 1)
    with Line(net, sgd, schedulers=schedule, run_dir=tmp_path) as line:
        line.load_checkpoint("auto")
    assert "has the state of 0 schedulers, and the Line has 1" in caplog.text


def test_a_monitored_training_loss_that_the_loop_does_not_report_is_explained() -> None:
    net, sgd = net_and_sgd()
    line = Line(net, sgd, hooks=[EarlyStopping("train/loss")])
    with pytest.raises(OptionError, match="monitors 'train/loss'") as caught, line:
        for _ in line.epochs(1):
            for x, y in line.epoch(batches(2)):
                (net(x) - y).square().mean().backward()
                sgd.step()
    assert "2 updates were made without line.backward(loss)" in "\n".join(caught.value.__notes__)
