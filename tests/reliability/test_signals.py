"""A signal ends a run in good order: the batch is finished, everything is saved, and the resumed run is the run that continued."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import preloaded
import pytest
import torch
from tiny import Net, batches, quiet
from torch import nn

from hookline import Hook, Preempted
from hookline.hooks.weight_averaging import WeightAveraging


class Dropping(Net):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step((self.drop(batch[0]), batch[1]), batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Kill(Hook):
    """Sends this process a signal at the n-th time of an event."""

    def __init__(self, event: str, at: int, number: int = signal.SIGTERM, again: bool = False) -> None:
        super().__init__()
        self.count, self.at, self.number, self.again = 0, at, number, again
        self.__dict__[event] = self._now

    def _now(self) -> None:
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), self.number)
            if self.again:
                os.kill(os.getpid(), self.number)


class Counter(Hook):
    """Counts what it hears, in its state: a resumed run must come to the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: dict[str, int] = {}

    def _note(self, what: str) -> None:
        self.heard[what] = self.heard.get(what, 0) + 1

    def on_train_batch_end(self) -> None:
        self._note("batch")

    def on_validation_start(self) -> None:
        self._note("validation")

    def on_validation_batch_end(self) -> None:
        self._note("validation batch")

    def on_validation_end(self) -> None:
        self._note("validated")

    def on_train_epoch_end(self) -> None:
        self._note("epoch")

    def state_dict(self) -> dict[str, Any]:
        return {"heard": self.heard}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.heard = state["heard"]


class Hears(Hook):
    """Notes the names of these events."""

    def __init__(self, *events: str) -> None:
        super().__init__()
        self.names: list[str] = []
        for event in events:
            self.__dict__[event] = self._noting(event)

    def teardown(self) -> None:
        self.names.append("teardown")

    def _noting(self, event: str) -> Any:
        return lambda: self.names.append(event)


OPTIONS: dict[str, Any] = {"max_epochs": 3, "seed": 1, "accumulate_grad_batches": 2, "val_check_interval": 3}


def train(
    path: Path, *hooks: Any, resume: str | None = None, **options: Any
) -> tuple[Any, Any, dict[str, int]]:
    counter = Counter()
    trainer = quiet(
        run_dir=path, hooks=[counter, WeightAveraging(decay=0.5), *hooks], **{**OPTIONS, **options}
    )
    torch.manual_seed(3 if resume is None else 4)
    module = Dropping()
    trainer.fit(module, batches(5), batches(3), resume=resume)
    return trainer, module, counter.heard


PLACES = [
    ("on_train_batch_start", 1),
    ("on_train_batch_end", 2),
    ("on_before_backward", 4),
    ("on_step_end", 1),
    ("on_validation_batch_start", 2),
    ("on_validation_end", 1),
    ("on_validation_start", 1),
    ("on_train_epoch_end", 1),
    ("on_train_epoch_start", 2),
    ("on_train_start", 1),
    ("on_train_batch_end", 5),
    ("on_validation_batch_end", 5),
]


@pytest.mark.parametrize(("event", "at"), PLACES)
def test_a_run_that_a_signal_has_ended_continues_bit_for_bit(tmp_path: Path, event: str, at: int) -> None:
    whole, expected, heard = train(tmp_path / "whole")
    with pytest.raises(Preempted) as ended:
        train(tmp_path / "cut", Kill(event, at))
    assert ended.value.code == 128 + signal.SIGTERM
    resumed, module, heard_again = train(tmp_path / "cut", resume="auto")
    assert resumed.state.resumed or (event == "on_train_start")
    assert resumed.global_step == whole.global_step
    assert heard_again == heard
    assert dict(resumed.metrics.read()) == dict(whole.metrics.read())
    for name, value in expected.state_dict().items():
        assert torch.equal(value, module.state_dict()[name]), name
    mine = resumed.optimizers[0].state_dict()["state"]
    for index, theirs in whole.optimizers[0].state_dict()["state"].items():
        assert all(torch.equal(value, mine[index][key]) for key, value in theirs.items())


def test_a_preempted_run_saves_then_ends_its_training_and_is_torn_down(tmp_path: Path) -> None:
    heard: list[tuple[str, str]] = []

    class Listens(Hook):
        def on_checkpoint_save(self, reason: str) -> None:
            heard.append(("saved", reason))

        def on_train_end(self, status: str) -> None:
            heard.append(("ended", status))

        def on_fit_end(self) -> None:
            heard.append(("fit", ""))

        def teardown(self) -> None:
            heard.append(("down", ""))

        def on_exception(self) -> None:
            heard.append(("failed", ""))

    with pytest.raises(Preempted):
        train(tmp_path, Listens(), Kill("on_train_batch_end", 2))
    assert heard == [("saved", "signal"), ("ended", "preempted"), ("fit", ""), ("down", "")]


def test_nothing_asked_for_after_the_signals_checkpoint_is_saved(tmp_path: Path) -> None:
    from hookline.hooks.model_checkpoint import ModelCheckpoint

    with pytest.raises(Preempted):
        train(tmp_path, ModelCheckpoint(save_last=True), Kill("on_train_batch_end", 2))
    assert [each.name for each in (tmp_path / "checkpoints").iterdir()] == ["step-1"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138)])
def test_the_exit_code_says_which_signal_it_was(tmp_path: Path, number: int, code: int) -> None:
    with pytest.raises(SystemExit) as ended:
        train(tmp_path, Kill("on_train_batch_end", 2, number))
    assert ended.value.code == code


def test_ctrl_c_saves_and_then_is_a_keyboard_interrupt(tmp_path: Path) -> None:
    recorder = Hears("on_train_end", "on_exception", "on_fit_end", "on_checkpoint_save")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, recorder, Kill("on_train_batch_end", 2, signal.SIGINT))
    assert recorder.names == ["on_checkpoint_save", "on_train_end", "on_exception", "teardown"]
    assert (tmp_path / "checkpoints" / "step-1" / "manifest.json").exists()


def test_a_signal_in_the_sanity_check_promises_no_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, Kill("on_validation_batch_end", 1, signal.SIGINT), num_sanity_val_steps=2)
    assert "SIGINT: finishing this batch, then the run ends" in capfd.readouterr().err
    assert not list(tmp_path.glob("checkpoints/step-*"))


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGTERM, Preempted), (signal.SIGINT, KeyboardInterrupt)]
)
def test_a_second_signal_ends_the_run_at_once(
    tmp_path: Path, number: int, error: type[BaseException]
) -> None:
    recorder = Hears("on_train_batch_end", "on_train_end", "on_exception")
    with pytest.raises(error):
        train(tmp_path, recorder, Kill("on_before_backward", 2, number, again=True))
    assert recorder.names == ["on_train_batch_end", "on_exception", "teardown"]
    assert not (tmp_path / "checkpoints").exists()


def test_a_validation_that_is_cut_short_tells_so_and_gives_the_weights_back(tmp_path: Path) -> None:
    weights: dict[str, Any] = {}

    class Looks(Hook):
        order = 1000

        def on_validation_start(self, module: Any) -> None:
            weights["averaged"] = module.layer.weight.clone()

        def on_validation_abandoned(self, module: Any) -> None:
            weights["after"] = module.layer.weight.clone()

        def on_validation_end(self) -> None:
            weights["ended"] = weights.get("ended", 0) + 1

    with pytest.raises(Preempted):
        train(tmp_path, Looks(), Kill("on_validation_batch_end", 4))
    assert weights["ended"] == 1  # that was the one before
    assert not torch.equal(weights["averaged"], weights["after"])


def test_handlers_are_given_back_and_the_users_own_stay(tmp_path: Path) -> None:
    mine: list[int] = []

    def handler(number: int, frame: Any) -> None:
        mine.append(number)

    before = signal.signal(signal.SIGUSR1, handler)
    term = signal.getsignal(signal.SIGTERM)
    try:
        trainer, *_ = train(tmp_path, Kill("on_train_batch_end", 2, signal.SIGUSR1))
        assert trainer.status == "completed" and mine == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGTERM) is term and signal.getsignal(signal.SIGUSR1) is handler
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not [
        each
        for each in threading.enumerate()
        if each.name == "hookline grace period" and each.join(5) and each.is_alive()
    ]


def test_a_run_inside_a_run_ends_with_it_and_both_are_saved(tmp_path: Path) -> None:
    inner = quiet(run_dir=tmp_path / "inner", max_epochs=100, hooks=[Kill("on_train_batch_end", 2)])

    class FitsAnother(Hook):
        def on_train_batch_end(self, batch_idx: int) -> None:
            if batch_idx == 1:
                inner.fit(Net(), batches(3))

    with pytest.raises(Preempted):
        train(tmp_path / "outer", FitsAnother())
    assert inner.status == "preempted" and inner.global_step == 2
    assert [each.name for each in (tmp_path / "inner" / "checkpoints").iterdir()] == ["step-2"]
    assert [each.name for each in (tmp_path / "outer" / "checkpoints").iterdir()] == ["step-1"]


def test_a_fit_in_another_thread_leaves_signals_alone(tmp_path: Path) -> None:
    done: list[str] = []
    thread = threading.Thread(target=lambda: done.append(train(tmp_path)[0].status))
    thread.start()
    thread.join()
    assert done == ["completed"]


SCRIPT = """
import sys, time, signal, os, threading
sys.path.insert(0, {tests!r})
from tiny import Net, batches, quiet
from hookline import Hook
class Slow(Hook):
    def on_train_batch_end(self, batch_idx):
        if batch_idx == 1:
            print("ready", flush=True)
            {body}
trainer = quiet(run_dir={run_dir!r}, hooks=[Slow()], max_epochs=100000, grace_period={grace})
trainer.fit(Net(), batches(5))
print("not reached")
"""


def start(run_dir: Path, body: str, grace: float = 60.0) -> subprocess.Popen[str]:
    code = textwrap.dedent(SCRIPT).format(
        tests=str(Path(__file__).parents[1]), run_dir=str(run_dir), body=body, grace=grace
    )
    child = preloaded.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    return child


def test_a_script_that_gets_a_signal_exits_with_its_code(tmp_path: Path) -> None:
    child = start(tmp_path, "time.sleep(0.01)")
    child.send_signal(signal.SIGTERM)
    out, errors = child.communicate(timeout=300)
    assert child.returncode == 143, errors
    assert "not reached" not in out and "SIGTERM: finishing this batch" in errors
    assert list((tmp_path / "checkpoints").glob("step-*/manifest.json"))


def test_what_does_not_end_in_the_grace_period_is_ended(tmp_path: Path) -> None:
    child = start(tmp_path, "time.sleep(60)", grace=0.3)
    child.send_signal(signal.SIGTERM)
    _, errors = child.communicate(timeout=300)
    assert child.returncode == 143, errors
    assert "The grace period of 0.3 s is over" in errors
