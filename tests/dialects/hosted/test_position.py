"""A loop written by hand that is killed with SIGKILL ends as if it had not been."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

import preloaded
import pytest
import torch
from dialects.looped import net_and_sgd, train
from ranks.torchrun import Outcome, torchrun
from tiny import batches
from torch.nn import functional as F

import hookline
from hookline import Hook, Line
from hookline.hooks import ModelCheckpoint
from hookline.run.lock import is_running

TESTS = Path(__file__).parents[2]


def run(folder: Path, *given: Any) -> tuple[int, dict[str, Any]]:
    """Run the loop in a process of its own; return its code, and what it has come to."""
    folder.mkdir(exist_ok=True)
    code = f"from dialects.killed_loop import main; main({str(folder)!r}, *{given!r})"
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = preloaded.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, timeout=120
    )
    assert done.returncode in (0, -9), done.stderr
    end = folder / "end.json"
    return done.returncode, json.loads(end.read_text()) if end.exists() else {}


@pytest.mark.parametrize(
    ("kind", "window", "steps", "kills"),
    [
        # the checkpoint after each validation holds a complete epoch
        ("in order", 1, None, [((2, "start"), (2, 0)), ((2, "batch 3"), (2, 0)), ((1, "validated"), (1, 0))]),
        # every 4 steps: inside an epoch, and after the last batch but before the validation
        ("shuffled", 1, 4, [((1, "batch 2"), (1, 2)), ((2, "batch 1"), (2, 0)), ((1, "validated"), None)]),
        ("own generator", 1, 4, [((1, "batch 4"), (1, 2)), ((3, "start"), (2, 4))]),
        ("seeded by epoch", 1, None, [((1, "batch 4"), (1, 0))]),
        ("seeded by epoch", 1, 4, [((1, "batch 4"), (1, 2))]),
        # 3 updates of 2 batches an epoch
        ("shuffled", 2, 2, [((0, "batch 5"), (0, 4)), ((1, "trained"), (2, 0))]),
    ],
)
def test_a_killed_loop_ends_as_one_that_was_not(
    kind: str, window: int, steps: int | None, kills: list[Any], tmp_path: Path
) -> None:
    code, whole = run(tmp_path / "whole", kind, window, steps, None)
    assert code == 0 and not whole["resumed"] and whole["end"]["schedule"] == 4
    assert whole["end"]["batches"] == 24 and whole["end"]["counts"]["validations"] == 4
    for number, (kill, first) in enumerate(kills):
        folder = tmp_path / str(number)
        code, nothing = run(folder, kind, window, steps, kill)
        assert code == -9 and not nothing and is_running(folder) is False
        code, again = run(folder, kind, window, steps, None)
        assert again["resumed"] and again["end"] == whole["end"] and is_running(folder) is None, kill
        places = [tuple(each[:2]) for each in again["order"]]
        assert first is None or places[0] == first
        assert again["order"] == whole["order"][-len(places) :]


def updated(line: Line, net: Any, sgd: Any, batch: Any) -> None:
    sgd.zero_grad()
    line.backward(F.mse_loss(net(batch[0]), batch[1]))
    sgd.step()


def validated(line: Line, net: Any) -> None:
    for x, y in line.validation(batches(1)):
        line.log("val/loss", F.mse_loss(net(x), y))


@pytest.mark.parametrize("when", ["after the update", "before the update", "in a loader of the loop's own"])
def test_a_checkpoint_has_the_weights_of_its_validation_and_what_the_body_did_after_it(
    when: str, tmp_path: Path
) -> None:
    net, sgd = net_and_sgd()
    schedule = torch.optim.lr_scheduler.StepLR(sgd, 1, gamma=0.5)
    saving = ModelCheckpoint(monitor="val/loss", save_top_k=-1, filename="{step}")
    line = Line(net, sgd, schedulers=schedule, hooks=[saving], run_dir=tmp_path)
    found: dict[int, Any] = {}
    with line:
        for _ in line.epochs(1):
            for batch in batches(3) if when.startswith("in") else line.epoch(batches(3)):
                if when == "before the update":
                    validated(line, net)
                    found[line.global_step] = net.weight.clone()
                updated(line, net, sgd, batch)
                if when != "before the update":
                    validated(line, net)
                    found[line.global_step] = net.weight.clone()
                schedule.step()
    assert len(found) == 3
    for step, weight in found.items():
        other = torch.nn.Linear(4, 2)
        again = torch.optim.SGD(other.parameters(), lr=0.1)
        later = torch.optim.lr_scheduler.StepLR(again, 1, gamma=0.5)
        with Line(other, again, schedulers=later) as line:
            line.load_checkpoint(tmp_path / "checkpoints" / f"step={step}")
            assert torch.equal(other.weight, weight)
            assert later.last_epoch == step


def kept_inside(tmp_path: Path, epochs: int = 1) -> dict[str, Any]:
    """The state of a loop after two of three batches of its last epoch."""
    net, sgd = net_and_sgd()
    line = Line(net, sgd)
    with line:
        for epoch in line.epochs(epochs):
            for batch in line.epoch(batches(3)):
                updated(line, net, sgd, batch)
                if (epoch, line.batch_idx) == (epochs - 1, 1):
                    torch.save(line.state_dict(), tmp_path / "kept.pt")
    return torch.load(tmp_path / "kept.pt")  # without pickles, which torch refuses by default


def test_a_loop_that_the_line_cannot_skip_in_is_warned_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = kept_inside(tmp_path, epochs=2)

    def resumed() -> tuple[Line, Any, Any]:
        caplog.clear()
        net, sgd = net_and_sgd()
        line = Line(net, sgd)
        line.load_state_dict(kept)
        return line, net, sgd

    line, net, sgd = resumed()
    with line:
        for _ in line.epochs(2):
            for batch in batches(3):
                updated(line, net, sgd, batch)
    (text,) = [each.getMessage() for each in caplog.records]
    assert "made after 2 batches of epoch 1, and they are trained again" in text
    assert "line.epoch(loader)`, which skips them" in text and line.global_step == 5 + 3

    line, net, sgd = resumed()
    with line:
        for _ in range(2):
            for batch in line.epoch(batches(3)):
                updated(line, net, sgd, batch)
    (text,) = [each.getMessage() for each in caplog.records]
    assert "has 1 complete epoch." in text and "line.epochs(n)`, or `range(1, n)`" in text
    assert line.global_step == 5 + 1 + 3

    line, net, sgd = resumed()
    with line:
        for _ in line.epochs(2):
            line.start_epoch(3)
            for batch in batches(3):
                line.start_batch(batch)
                updated(line, net, sgd, batch)
                line.end_batch()
    (text,) = [each.getMessage() for each in caplog.records]
    assert "they are trained again" in text and "line.start_epoch(batches, first)" in text

    line, net, sgd = resumed()
    with line:
        for _ in line.epochs(2):
            for batch in line.epoch(batches(3)):
                updated(line, net, sgd, batch)
    assert not caplog.records and line.global_step == 6
    assert not sgd._optimizer_step_pre_hooks


def test_epochs_of_a_loader_of_the_loop_s_own_are_counted(tmp_path: Path) -> None:
    for total in (2, 5):
        net, sgd = net_and_sgd()
        line = Line(net, sgd, run_dir=tmp_path, hooks=[ModelCheckpoint(save_last=True, monitor="val/loss")])
        done = []
        with line:
            line.load_checkpoint("auto")
            for epoch in line.epochs(total):
                for batch in batches(3):
                    updated(line, net, sgd, batch)
                validated(line, net)
                done.append(epoch)
    assert done == [2, 3, 4] and line.global_step == 15


def test_a_loader_that_begins_later_itself_is_not_skipped_in_and_a_short_one_is_refused(
    tmp_path: Path,
) -> None:
    kept = kept_inside(tmp_path)
    net, sgd = net_and_sgd()
    line = Line(net, sgd)
    line.load_state_dict(kept)
    with line:
        for _ in line.epochs(1):
            for batch in line.epoch(batches(3)[2:], skip=False):
                assert line.batch_idx == 2
                updated(line, net, sgd, batch)
    assert line.global_step == line.state.batches_seen == 3
    line = Line(net, sgd)
    line.load_state_dict(kept)
    with pytest.raises(hookline.CheckpointError, match="made after 2 batches of epoch 0.*has only 1"), line:
        next(line.epoch(batches(1)))


def test_a_stop_in_an_accumulation_window_keeps_its_gradients(tmp_path: Path) -> None:
    class Stops(Hook):
        def on_train_batch_end(self, trainer: Any, batches_seen: int) -> None:
            if batches_seen == 3 and not trainer.state.resumed:
                trainer.stop("enough")

    def trained(folder: Path, hooks: list[Any], load: Any = "auto") -> Any:
        net, sgd = net_and_sgd()
        line = Line(net, sgd, hooks=hooks, run_dir=folder)
        with line:
            line.load_checkpoint(load)
            for _ in line.epochs(1):
                for x, y in line.epoch(batches(4)):
                    line.backward(F.mse_loss(net(x), y), divide_by=2)
                    if line.batch_idx % 2:
                        sgd.step()
                        sgd.zero_grad()
        return net.weight.detach(), line.global_step

    whole, _ = trained(tmp_path / "whole", [])
    hooks = [Stops(), ModelCheckpoint(save_last=True)]
    cut, steps = trained(tmp_path / "cut", hooks)
    assert steps == 1 and not torch.equal(cut, whole)
    last = tmp_path / "cut/checkpoints/last"
    again, steps = trained(tmp_path / "cut", [ModelCheckpoint(save_last=True)], load=last)
    assert steps == 2 and torch.equal(again, whole)


@pytest.mark.parametrize(
    ("way", "reads"),
    [
        ("after the epoch", "line.epoch"),
        ("after a validation", "line.epoch"),
        ("a stop in its last batch", "line.epoch"),
        ("after the epoch", "start_epoch"),
        ("a stop in its last batch", "start_epoch"),
        ("after a validation", "the loop's own"),
    ],
)
def test_a_window_that_is_open_between_two_epochs_keeps_its_gradients(
    way: str, reads: str, tmp_path: Path
) -> None:
    monitor = "val/loss" if way == "after a validation" else None

    def trained(folder: Path, leaves: bool = False) -> tuple[Any, int]:
        net, sgd = net_and_sgd()
        hooks = [] if way.startswith("a stop") else [ModelCheckpoint(monitor=monitor, save_top_k=-1)]
        line, count = Line(net, sgd, hooks=hooks, run_dir=folder), 0
        with line:
            line.load_checkpoint("auto")
            for epoch in line.epochs(3):
                if reads == "start_epoch":
                    line.start_epoch(3)
                for number, (x, y) in enumerate(
                    line.epoch(batches(3)) if reads == "line.epoch" else batches(3)
                ):
                    if reads == "start_epoch":
                        line.start_batch((x, y))
                    count = epoch * 3 + number + 1
                    line.backward(F.mse_loss(net(x), y), divide_by=2)
                    if leaves and way.startswith("a stop") and count == 3:
                        line.save_checkpoint(folder / "checkpoints/here")
                        line.stop("SIGTERM")
                    if leaves and count == 4:
                        raise KeyboardInterrupt
                    if count % 2 == 0:
                        sgd.step()
                        sgd.zero_grad()
                if monitor:
                    validated(line, net)
        return net.weight.detach(), line.global_step

    whole, steps = trained(tmp_path / "whole")
    with contextlib.suppress(KeyboardInterrupt):
        trained(tmp_path / "cut", leaves=True)
    again, steps_again = trained(tmp_path / "cut")
    assert steps == steps_again == 4 and torch.equal(again, whole)


def test_a_loop_that_starts_its_batches_itself_continues_exactly(tmp_path: Path) -> None:
    class Starts(Hook):
        count = 0

        def on_train_batch_start(self) -> None:
            self.count += 1

        def state_dict(self) -> dict[str, Any]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.count = state["count"]

    def trained(folder: Path, fails_at: int = -1) -> tuple[Any, ...]:
        net, sgd = net_and_sgd()
        starts, firsts = Starts(), []
        line = Line(net, sgd, hooks=[starts, ModelCheckpoint(every_n_train_steps=2)], run_dir=folder)
        with line:
            line.load_checkpoint("auto")
            for _ in line.epochs(3):
                firsts.append(line.first_batch)
                line.start_epoch(5, line.first_batch)
                for _ in range(firsts[-1], 5):
                    line.start_batch(None)
                    x = torch.randn(2, 4)
                    updated(line, net, sgd, (x, x[:, :2]))
                    if line.global_step == fails_at:
                        raise KeyboardInterrupt
                    line.end_batch()
                line.end_epoch()
        return net.weight.tolist(), starts.count, line.global_step, firsts

    *whole, _ = trained(tmp_path / "whole")
    with contextlib.suppress(KeyboardInterrupt):
        trained(tmp_path / "cut", fails_at=9)
    *again, firsts = trained(tmp_path / "cut")
    assert again == whole and firsts == [3, 0]


def test_a_state_inside_an_accumulation_window_says_that_it_lacks_the_gradients(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net, sgd = net_and_sgd()
    line, warned = Line(net, sgd), []
    with line:
        for _ in line.epochs(1):
            for number, batch in enumerate(line.epoch(batches(4)), 1):
                line.backward(F.mse_loss(net(batch[0]), batch[1]), divide_by=2)
                if number % 2 == 0:
                    sgd.step()
                    sgd.zero_grad()
                caplog.clear()
                line.state_dict()
                warned.append("does not have the gradients" in caplog.text)
    assert warned == [True, False, True, False]


def test_auto_needs_a_directory_and_finds_nothing_at_first(tmp_path: Path) -> None:
    net, sgd = net_and_sgd()
    with (
        Line(net, sgd) as line,
        pytest.raises(hookline.OptionError, match=r"'auto'.*pass Line\(run_dir=\.\.\.\)"),
    ):
        line.load_checkpoint("auto")
    with Line(net, sgd, run_dir=tmp_path) as line:
        assert line.load_checkpoint("auto") is False


def test_a_checkpoint_without_a_position_says_what_is_repeated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = kept_inside(tmp_path)
    net, sgd = net_and_sgd()
    for change, text in (
        ({"loop": None}, "older version of Hookline has neither the random streams"),
        ({"loop": [{**kept["loop"][0], "world_size": 2}]}, "is of 2 ranks, and there are 1 here.*2 batches"),
    ):
        caplog.clear()
        line = Line(net, sgd)
        line.load_state_dict({**kept, **change})
        train(line, net, sgd, batches(3))
        (record,) = caplog.records
        assert record.levelno == logging.WARNING and record.getMessage().count("epoch 0") == 1
        assert re.search(text, record.getMessage())


ON_RANKS = """
    import contextlib
    import logging
    import sys
    import torch
    from torch import distributed, nn
    from torch.nn.functional import mse_loss
    from torch.nn.parallel import DistributedDataParallel
    from tiny import batches
    import hookline.checkpoint.files
    from hookline import Hook, Line
    from hookline.hooks import ModelCheckpoint

    distributed.init_process_group("gloo")
    rank = distributed.get_rank()

    def say(*words):
        sys.stdout.write(" ".join(map(str, words)) + "\\n")
        sys.stdout.flush()

    class Stops(Hook):
        def on_step_end(self, step, trainer):
            if step == 5:
                trainer.stop("enough")

    def train(folder, *hooks, saves=True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        model = DistributedDataParallel(net)
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        torch.manual_seed(rank)
        saving = [ModelCheckpoint(every_n_train_steps=4, save_top_k=-1, filename="{step}")]
        line = Line(model, sgd, hooks=[*hooks, *saving], run_dir=folder)
        with line:
            found = line.load_checkpoint("auto")
            for epoch in line.epochs(2):
                for index in line.epoch(torch.randperm(6).tolist()):
                    x, y = batches(6)[index]
                    sgd.zero_grad()
                    line.backward(mse_loss(model(x + rank), y))
                    sgd.step()
        drawn = torch.rand(2).tolist()
        return found, line.global_step, drawn, [each.detach().clone() for each in net.parameters()]

    _, steps, drawn, weights = train("whole")
    found, cut, *_ = train("cut", Stops())
    again, more, redrawn, reached = train("cut")
    same = all(map(torch.equal, weights, reached))
    say("RANK", rank, steps, found, again, more, drawn == redrawn, same, cut < 12)

    # hooks whose state differs from rank to rank, and one whose state does not

    class Losses(Hook):
        def __init__(self):
            super().__init__()
            self.seen = []
        def on_step_end(self, loss):
            self.seen.append(round(loss, 6))
        def state_dict(self):
            return {"seen": torch.tensor(self.seen, dtype=torch.float64)}
        def load_state_dict(self, state):
            self.seen = state["seen"].tolist()

    class Mean(Hook):
        def on_train_epoch_end(self, metrics):
            self.loss = metrics["train/loss"]

    of_whole, of_again = (Losses(), Mean()), (Losses(), Mean())
    train("whole hooks", *of_whole)
    train("cut hooks", Losses(), Stops())
    train("cut hooks", *of_again)
    same = of_whole[0].seen == of_again[0].seen
    say("HOOKS", rank, same, of_whole[1].loss == of_again[1].loss, len(of_again[0].seen))
    kept = hookline.checkpoint.files.read("cut hooks/checkpoints/step=4")["ranks"]
    say("KEPT", rank, kept[0], "hooks/losses" in kept[1], "hooks/model_checkpoint" in kept[1])

    # windows of three batches, of which the last rank has other gradients than the first

    class StopsFirst(Hook):
        ranks = "zero"
        def on_train_epoch_end(self, trainer):
            trainer.stop("enough")

    def accumulate(folder, *hooks, leaves=False, load="auto"):
        torch.manual_seed(0)
        net = nn.Linear(4, 2).double()
        model = DistributedDataParallel(net)
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        line = Line(model, sgd, hooks=[*hooks], run_dir=folder)
        with line:
            line.load_checkpoint(load)
            for epoch in line.epochs(2):
                for x, y in line.epoch(batches(6)):
                    is_update = line.batch_idx % 3 == 2
                    with contextlib.nullcontext() if is_update else model.no_sync():
                        line.backward(mse_loss(model(x.double() + rank), y.double()), divide_by=3)
                    if is_update:
                        sgd.step()
                        sgd.zero_grad()
                    if leaves and line.batch_idx == 4:  # one batch of the window is missing
                        line.save_checkpoint(f"{folder}/checkpoints/here")
                        line.stop("SIGTERM")
        return line, net.weight.detach().clone()

    line, whole = accumulate("whole window")
    cut, _ = accumulate("cut window", leaves=True)
    again, weight = accumulate("cut window")
    say("WINDOW", rank, cut.global_step, again.global_step, torch.allclose(weight, whole, rtol=1e-12))

    heard = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("hookline").addHandler(handler)
    for _ in range(2):
        line, _ = accumulate("stopped", StopsFirst(), ModelCheckpoint(save_last=True, save_top_k=0))
    told = sum("Nothing to train" in each for each in heard)
    say("STOPPED", rank, line.state.batches_seen, line.status, line.should_stop, told)
    line, _ = accumulate("stopped", load="stopped/checkpoints/last")
    say("ON", rank, line.state.batches_seen, line.status)
    distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    outcome = torchrun(ON_RANKS, tmp_path_factory.mktemp("ranks"), deadline=300)
    assert outcome.code == 0, outcome.output
    return outcome


def test_every_rank_continues_with_its_own_random_streams(on_ranks: Outcome) -> None:
    assert on_ranks.lines("RANK") == [f"{rank} 12 False True 12 True True True" for rank in (0, 1)]


def test_every_rank_continues_with_the_state_of_its_own_hooks(on_ranks: Outcome) -> None:
    assert on_ranks.lines("HOOKS") == [f"{rank} True True 12" for rank in (0, 1)]
    assert on_ranks.lines("KEPT") == [f"{rank} {{}} True False" for rank in (0, 1)]


def test_ranks_continue_an_accumulation_window_with_the_mean_of_their_gradients(on_ranks: Outcome) -> None:
    assert on_ranks.lines("WINDOW") == [f"{rank} 1 4 True" for rank in (0, 1)]


def test_ranks_stay_stopped_together_and_one_of_them_says_so(on_ranks: Outcome) -> None:
    assert on_ranks.lines("STOPPED") == ["0 6 stopped True 1", "1 6 stopped True 0"]
    assert on_ranks.lines("ON") == ["0 12 completed", "1 12 completed"]
